// The open-addressing table that finds nodes by prefix hash and blocks by the engine's hash.
//
// A slot is a number and 32 bits of its key's hash: most look-ups read one cache line here and the key itself once. A
// number's home is its tag scaled to the capacity, so capacities grow by a third instead of doubling. Linear probing;
// deletion shifts the entries behind back, so that no tombstones pile up.
#pragma once

#include <cstdint>
#include <random>

#include "index_memory.h"

namespace kvmesh::index {

// Prompts are chosen by clients, and XXH3 has no key: without a secret they could choose prefixes that share a home.
inline uint64_t secret_multiplier() {
  static const uint64_t secret = [] {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
  }();
  return secret;
}

inline uint32_t tag_of(uint64_t key) { return static_cast<uint32_t>((key ^ key >> 32) * secret_multiplier() >> 32); }

class Table {
 public:
  explicit Table(size_t* account) : slots_(account), account_(account) {}

  size_t count() const { return count_; }
  size_t bytes() const { return slots_.bytes(); }
  bool has_room(size_t more) const { return count_ + more <= limit(slots_.capacity()); }
  static size_t bytes_for(size_t count) { return Array<Slot>::bytes_for(capacity_for(count)); }

  // How many entries to make room for when `needed` do not fit.
  size_t grown_for(size_t needed) const { return std::max(needed, limit(slots_.capacity()) * 4 / 3); }

  void prefetch(uint32_t tag) const { __builtin_prefetch(slots_.data() + home(tag)); }

  // The number with this tag for which `equal` holds, or kNone.
  template <typename Equal>
  uint32_t find(uint32_t tag, const Equal& equal) const {
    if (count_ == 0) return kNone;
    for (size_t slot = home(tag);; slot = next(slot)) {
      const Slot entry = slots_[slot];
      if (entry.number == kNone || (entry.tag == tag && equal(entry.number))) return entry.number;
    }
  }

  // There must be room.
  void insert(uint32_t tag, uint32_t number) {
    size_t slot = home(tag);
    while (slots_[slot].number != kNone) slot = next(slot);
    slots_[slot] = {tag, number};
    ++count_;
  }

  // The entry must be there.
  void renumber(uint32_t tag, uint32_t number, uint32_t now) { slots_[slot_of(tag, number)].number = now; }

  // The entry must be there.
  void erase(uint32_t tag, uint32_t number) {
    size_t hole = slot_of(tag, number);
    for (size_t slot = next(hole); slots_[slot].number != kNone; slot = next(slot)) {
      if (distance(home(slots_[slot].tag), slot) < distance(hole, slot)) continue;  // the hole lies before its home
      slots_[hole] = slots_[slot];
      hole = slot;
    }
    slots_[hole].number = kNone;
    --count_;
  }

  // Gives every number another one.
  template <typename Rename>
  void rename(const Rename& renamed) {
    for (size_t slot = 0; slot < slots_.capacity(); ++slot)
      if (slots_[slot].number != kNone) slots_[slot].number = renamed(slots_[slot].number);
  }

  // Makes room for `count` entries and no more; not fewer than there are.
  void resize(size_t count) {
    Array<Slot> slots(account_);
    slots.set_capacity(capacity_for(std::max(count, count_)));
    slots.swap(slots_);
    for (size_t slot = 0; slot < slots_.capacity(); ++slot) slots_[slot].number = kNone;
    count_ = 0;
    for (size_t slot = 0; slot < slots.capacity(); ++slot)
      if (slots[slot].number != kNone) insert(slots[slot].tag, slots[slot].number);
  }

 private:
  struct Slot {
    uint32_t tag;
    uint32_t number;
  };

  static size_t capacity_for(size_t count) { return count == 0 ? 0 : std::max<size_t>(8, count * 4 / 3 + 2); }
  static size_t limit(size_t capacity) { return capacity == 0 ? 0 : (capacity - 1) * 3 / 4; }
  size_t home(uint32_t tag) const { return static_cast<uint64_t>(tag) * slots_.capacity() >> 32; }
  size_t next(size_t slot) const { return slot + 1 == slots_.capacity() ? 0 : slot + 1; }
  size_t distance(size_t from, size_t to) const { return to >= from ? to - from : to + slots_.capacity() - from; }
  size_t slot_of(uint32_t tag, uint32_t number) const {
    size_t slot = home(tag);
    while (slots_[slot].number != number) slot = next(slot);
    return slot;
  }

  Array<Slot> slots_;
  size_t count_ = 0;
  size_t* account_;
};

}  // namespace kvmesh::index
