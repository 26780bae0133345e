// The open-addressing table that finds nodes by prefix hash and blocks by the engine's hash.
//
// A slot is a number and 32 bits of its key's hash, its tag: most look-ups read one cache line here and the key itself
// once. A number's home is its tag scaled to the number of homes, so these need not be powers of two, and homes keep
// their order when the table grows: it grows in its place, from the end on. Linear probing without wrapping around, into
// some slots more than homes; deletion shifts the entries behind back, so that no tombstones pile up.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

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

inline uint32_t tag_of(uint64_t key, uint64_t secret) {
  return static_cast<uint32_t>((key ^ key >> 32) * secret >> 32);
}
inline uint32_t tag_of(uint64_t key) { return tag_of(key, secret_multiplier()); }

class Table {
 public:
  explicit Table(size_t* account) : slots_(account) {}

  size_t count() const { return count_; }
  size_t bytes() const { return slots_.bytes(); }
  bool has_room(size_t more) const { return count_ + more <= limit(homes_); }
  static size_t bytes_for(size_t count) { return Array<Slot>::bytes_for(slots_for(homes_for(count))); }

  // How many entries to make room for when `needed` do not fit.
  size_t grown_for(size_t needed) const { return std::max(needed, limit(homes_) * 2); }

  void prefetch(uint32_t tag) const { __builtin_prefetch(slots_.data() + home(tag)); }

  // The number with this tag for which `equal` holds, or kNone; then `free` is where it can be inserted.
  template <typename Equal>
  uint32_t find(uint32_t tag, const Equal& equal, size_t* free = nullptr) const {
    if (homes_ == 0) return kNone;
    size_t slot = home(tag);
    for (;; ++slot) {
      const Slot entry = slots_[slot];
      if (entry.number == kNone) break;
      if (entry.tag == tag && equal(entry.number)) return entry.number;
    }
    if (free != nullptr) *free = slot;
    return kNone;
  }

  // There must be room. Throws bad_alloc only where entries crowd at the very end.
  void insert(uint32_t tag, uint32_t number) {
    size_t slot = home(tag);
    while (slots_[slot].number != kNone) ++slot;
    insert_at(slot, tag, number);
  }
  void insert_at(size_t slot, uint32_t tag, uint32_t number) {
    if (slot + 1 == end_) extend(end_ + kSpill);  // the last slot stays empty
    slots_[slot] = {tag, number};
    ++count_;
  }

  // The entry must be there.
  void renumber(uint32_t tag, uint32_t number, uint32_t now) { slots_[slot_of(tag, number)].number = now; }

  // The entry must be there.
  void erase(uint32_t tag, uint32_t number) {
    size_t hole = slot_of(tag, number);
    for (size_t slot = hole + 1; slots_[slot].number != kNone; ++slot) {
      if (home(slots_[slot].tag) > hole) continue;
      slots_[hole] = slots_[slot];
      hole = slot;
    }
    slots_[hole].number = kNone;
    --count_;
  }

  // Gives every number another one.
  template <typename Rename>
  void rename(const Rename& renamed) {
    for (size_t slot = 0; slot < end_; ++slot)
      if (slots_[slot].number != kNone) slots_[slot].number = renamed(slots_[slot].number);
  }

  // Makes room for `count` entries and no more; not fewer than there are.
  void resize(size_t count);

 private:
  struct Slot {
    uint32_t tag;
    uint32_t number;
  };
  static constexpr size_t kSpill = 64;

  static size_t homes_for(size_t count) { return count == 0 ? 0 : std::max<size_t>(8, count * 4 / 3 + 2); }
  static size_t limit(size_t homes) { return homes == 0 ? 0 : (homes - 1) * 3 / 4; }
  static size_t slots_for(size_t homes) { return homes == 0 ? 0 : homes + std::min(homes, kSpill) + 1; }
  size_t home(uint32_t tag) const { return static_cast<uint64_t>(tag) * homes_ >> 32; }
  size_t slot_of(uint32_t tag, uint32_t number) const {
    size_t slot = home(tag);
    while (slots_[slot].number != number) ++slot;
    return slot;
  }
  Table(const Table& larger, size_t homes) : slots_(larger.slots_.account()), homes_(homes) { extend(slots_for(homes)); }
  void extend(size_t end);
  void spread(size_t end);

  Array<Slot> slots_;
  size_t homes_ = 0;
  size_t end_ = 0;  // slots in use, of which the last is empty
  size_t count_ = 0;
  std::vector<Slot> moving_;  // empty but while the table grows
};

}  // namespace kvmesh::index
