// The blocks that one source holds in one tier: the engine's hash of each and its node, in the order in which they came.
#pragma once

#include <cstdint>
#include <vector>

#include "index_memory.h"
#include "index_table.h"

namespace kvmesh::index {

class Held {
 public:
  struct Entry {
    uint64_t hash;
    uint32_t node;
  };

  // Only the bits of `mask` tell entries apart; the others are free for the caller.
  explicit Held(size_t* account, uint64_t mask = UINT64_MAX)
      : mask_(mask), hashes_(account), nodes_(account), table_(account) {}

  size_t count() const { return table_.count(); }
  bool empty() const { return count() == 0; }
  uint32_t end() const { return end_; }

  // Its position, or kNone.
  uint32_t find(uint64_t hash) const { return find_tagged(tag(hash), hash); }
  // With a tag that the caller has from `tag`, as below. Where there is none, `free` is where append_at may put it.
  uint32_t find_tagged(uint32_t tag, uint64_t hash, size_t* free = nullptr) const {
    return table_.find(tag, [&](uint32_t at) { return ((hashes_[at] ^ hash) & mask_) == 0; }, free);
  }
  uint32_t tag(uint64_t hash) const { return tag_of(hash & mask_); }
  void prefetch_slot(uint32_t tag) const { table_.prefetch(tag); }
  // Once the slot is there: the entry that it most likely names.
  void prefetch_tagged(uint32_t tag) const {
    const uint32_t at = table_.peek(tag);
    if (at == kNone) return;
    __builtin_prefetch(hashes_.data() + at);
    __builtin_prefetch(nodes_.data() + at);
  }
  uint64_t hash(uint32_t at) const { return hashes_[at]; }
  uint32_t node(uint32_t at) const { return nodes_[at]; }  // kNone where an entry has been erased
  bool holds(uint32_t at) const { return at < end_ && nodes_[at] != kNone; }

  // As the newest; there must be room.
  void append(uint64_t hash, uint32_t node) {
    table_.insert(tag(hash), end_);
    hashes_[end_] = hash;
    nodes_[end_++] = node;
  }
  void append_at(size_t free, uint32_t tag, uint64_t hash, uint32_t node) {
    table_.insert_at(free, tag, end_);
    hashes_[end_] = hash;
    nodes_[end_++] = node;
  }
  // The other positions stay as they are.
  void erase(uint32_t at) {
    table_.erase(tag(hashes_[at]), at);
    nodes_[at] = kNone;
    while (end_ > 0 && nodes_[end_ - 1] == kNone) --end_;
    begin_ = std::min(begin_, end_);
  }
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
  void squeeze();
  void shrink();

  uint64_t mask_;
  Array<uint64_t> hashes_;
  Array<uint32_t> nodes_;
  Table table_;
  uint32_t begin_ = 0;  // all before it are erased
  uint32_t end_ = 0;
};

}  // namespace kvmesh::index
