// The blocks that one source holds in one tier: the engine's hash of each and its node, in the order in which they came.
//
// They are found by a table that all sources and tiers share: one large table, of huge pages, is read and grown at less
// cost than many of some hundred kilobytes. Its entries do not say whose they are. An entry that is another's is told by
// the hash at its position, and where that is the same, so are the two entries: either may be taken for the other.
#pragma once

#include <cstdint>
#include <vector>

#include "index_memory.h"
#include "index_table.h"

namespace kvmesh::index {

class Held {
  // Numbers are known: whoever knew this, too, could choose hashes that have one tag in several tables.
  static uint64_t hidden(uint64_t id) {
    const uint64_t x = ((id + 1) * 0x9E3779B97F4A7C15u ^ secret_multiplier()) * secret_multiplier();
    return (x ^ x >> 32) * secret_multiplier();
  }
  struct Equals {
    const Held& held;
    uint64_t hash;
    bool operator()(uint32_t at) const { return held.holds(at) && ((held.hashes_[at] ^ hash) & held.mask_) == 0; }
  };

 public:
  struct Entry {
    uint64_t hash;
    uint32_t node;
  };

  // `id` tells it from the others that share the table. Only the bits of `mask` tell entries apart; the others are free
  // for the caller.
  Held(size_t* account, Table& table, uint64_t id, uint64_t mask = UINT64_MAX)
      : id_(hidden(id)), mask_(mask), hashes_(account), nodes_(account), table_(table) {}

  size_t count() const { return count_; }
  bool empty() const { return count() == 0; }
  uint32_t end() const { return end_; }

  // Its position, or kNone.
  uint32_t find(uint64_t hash) const {
    // What comes next mostly continues what came last.
    if (end_ > 0 && ((hashes_[end_ - 1] ^ hash) & mask_) == 0) return end_ - 1;
    return find_tagged(tag(hash), hash);
  }
  // With a tag that the caller has from `tag`, as below.
  uint32_t find_tagged(uint32_t tag, uint64_t hash) const { return table_.find(tag, Equals{*this, hash}); }
  // Where there is room for more, and where the hash is not there, `free` is where append_at may put it.
  uint32_t find_tagged(uint32_t tag, uint64_t hash, Table::Place* free) const {
    return table_.find(tag, Equals{*this, hash}, free);
  }
  uint32_t tag(uint64_t hash) const { return tag_of((hash & mask_) ^ id_); }
  void prefetch_slot(uint32_t tag) const { table_.prefetch(tag); }
  void prefetch_spill(uint32_t tag) const { table_.prefetch_spill(tag); }
  // Once the slot is there: the entry that it most likely names.
  void prefetch_tagged(uint32_t tag) const {
    const uint32_t at = table_.peek(tag);
    if (at == kNone) return;
    fetch(hashes_.data() + at);
    fetch(nodes_.data() + at);
  }
  // The entries at a position and up to `count` before it, and the next ones.
  void prefetch_around(uint32_t at, size_t count) const {
    const size_t begin = at - std::min<size_t>(at, count), end = at + kLineBytes / sizeof(uint64_t);
    for (size_t i = begin; i <= end; i += kLineBytes / sizeof(uint64_t)) fetch(hashes_.data() + i);
    for (size_t i = begin; i <= end; i += kLineBytes / sizeof(uint32_t)) fetch(nodes_.data() + i);
  }
  // Where the next `count` entries will be written.
  void prefetch_end(size_t count) const {
    for (size_t i = 0; i < count; i += kLineBytes / sizeof(uint64_t)) fetch_to_write(hashes_.data() + end_ + i);
    for (size_t i = 0; i < count; i += kLineBytes / sizeof(uint32_t)) fetch_to_write(nodes_.data() + end_ + i);
  }
  uint64_t hash(uint32_t at) const { return hashes_[at]; }
  uint32_t node(uint32_t at) const { return nodes_[at]; }  // kNone where an entry has been erased
  bool holds(uint32_t at) const { return at < end_ && nodes_[at] != kNone; }
  // Whether that is the entry of this hash; the position may be any.
  bool is(uint32_t at, uint64_t hash) const { return holds(at) && hashes_[at] == hash; }

  // As the newest; there must be room.
  void append(uint64_t hash, uint32_t node) {
    table_.insert(tag(hash), end_);
    put(hash, node);
  }
  void append_at(Table::Place free, uint32_t tag, uint64_t hash, uint32_t node) {
    table_.insert_at(free, tag, end_);
    put(hash, node);
  }
  // Appends one after the other, for which there must be room, while it is plain that they are not there; see
  // Table::Filling.
  class Appending {
   public:
    explicit Appending(Held& held)
        : filling(held.table_), held_(held), hashes_(held.hashes_.data()), nodes_(held.nodes_.data()), end_(held.end_) {}
    Appending(const Appending&) = delete;
    Appending& operator=(const Appending&) = delete;
    ~Appending() {
      held_.count_ += end_ - held_.end_;
      held_.end_ = end_;
    }

    // Where `filling` has found a place.
    void append(uint32_t tag, uint64_t hash, uint32_t node) {
      filling.put(tag, end_);
      hashes_[end_] = hash;
      nodes_[end_++] = node;
    }

    Table::Filling filling;

   private:
    Held& held_;
    uint64_t* hashes_;
    uint32_t* nodes_;
    uint32_t end_;
  };

  // The other positions stay as they are.
  void erase(uint32_t at) {
    table_.erase(tag(hashes_[at]), at);
    --count_;
    nodes_[at] = kNone;
    trim_end();
  }
  // Erases one after the other; see Table::Emptying.
  class Erasing {
   public:
    explicit Erasing(Held& held) : held_(held), emptying_(held.table_), nodes_(held.nodes_.data()) {}
    Erasing(const Erasing&) = delete;
    Erasing& operator=(const Erasing&) = delete;
    ~Erasing() {
      held_.count_ -= count_;
      held_.trim_end();
    }

    uint32_t node(uint32_t at) const { return nodes_[at]; }
    void erase(uint32_t tag, uint32_t at) {
      emptying_.erase(tag, at);
      nodes_[at] = kNone;
      ++count_;
    }

   private:
    Held& held_;
    Table::Emptying emptying_;
    uint32_t* nodes_;
    size_t count_ = 0;
  };
  // Positions of the oldest entries, at most `count`.
  void oldest(size_t count, std::vector<uint32_t>& positions);
  // As the newest, entries that have just been erased.
  void put_back(const std::vector<Entry>& entries);
  void rename(const std::vector<uint32_t>& moved);

  // Bytes more that `count` new entries may need, at the worst moment.
  size_t growth(size_t count) const;
  void reserve(size_t count);
  // Closes gaps and gives memory back where that is worth it. Positions change.
  void tidy();
  // As tidy, and gives back all but an eighth of what is not in use, where there is more.
  void trim();

 private:
  size_t capacity() const { return std::min(hashes_.capacity(), nodes_.capacity()); }
  size_t gaps() const { return end_ - count(); }
  bool squeezing_will_do(size_t count) const { return gaps() >= count + this->count() / 8; }
  void trim_end() {
    while (end_ > 0 && nodes_[end_ - 1] == kNone) --end_;
    begin_ = std::min(begin_, end_);
  }
  void squeeze();
  void shrink();
  void put(uint64_t hash, uint32_t node) {
    hashes_[end_] = hash;
    nodes_[end_++] = node;
    ++count_;
  }

  uint64_t id_, mask_;
  Array<uint64_t> hashes_;
  Array<uint32_t> nodes_;
  Table& table_;
  size_t count_ = 0;
  uint32_t begin_ = 0;  // all before it are erased
  uint32_t end_ = 0;
};

}  // namespace kvmesh::index
