// Who holds a block: sets of sources, shared by all nodes that have the same ones.
//
// A node would need a mask of all sources for each tier. But neighbours in a chain nearly always have the same holders,
// so a node keeps the 4-byte number of a *state*, and each different state, and each different set in it, exists once.
// That makes the width of a mask irrelevant: 8 sources or 4096, a node is as large.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "index_memory.h"
#include "index_table.h"

namespace kvmesh::index {

constexpr int kTiers = 3;  // device, host, disk
enum Tier : int { kDevice = 0, kHost = 1, kDisk = 2 };

// What one source has of one block. Bits 0..2: it holds the block in this tier. Bits 3..5: it is ready up to this tier,
// that is, the block and all before it are held in this tier or warmer ones.
using Status = uint8_t;
constexpr Status kHeldMask = 7;

constexpr Status held_in(int tier) { return static_cast<Status>(1 << tier); }

// The status of a block held in the tiers `held` below one whose status is `parent` (all ready at a root).
inline Status status_below(Status parent, Status held) {
  const bool up_to[kTiers] = {(held & 1) != 0, (held & 3) != 0, held != 0};
  Status ready = 0;
  for (int tier = 0; tier < kTiers; ++tier)
    if (up_to[tier]) ready |= static_cast<Status>(parent & (8 << tier));
  return held | ready;
}
constexpr Status kRoot = 7 << 3;

// Sets of small numbers, as their non-zero words of 64 bits.
class Sets {
 public:
  struct View {
    const uint64_t* bits;
    const uint16_t* places;  // which word it is
    uint32_t count;
  };
  static constexpr uint32_t kEmpty = 0;
  static constexpr uint32_t kMaxMembers = 64 << 16;

  explicit Sets(size_t* account) : sets_(account), table_(account), account_(account) {}
  Sets(const Sets&) = delete;
  Sets& operator=(const Sets&) = delete;
  ~Sets();

  View view(uint32_t set) const;
  bool contains(uint32_t set, uint32_t member) const;
  uint32_t with(uint32_t set, uint32_t member) { return changed(set, member, true); }
  uint32_t without(uint32_t set, uint32_t member) { return changed(set, member, false); }

  // Frees the others.
  void keep(const std::vector<bool>& wanted);
  uint32_t end() const { return end_; }

 private:
  // Followed by the words' bits, then their places.
  struct Header {
    uint32_t tag;
    uint32_t count;
  };
  static size_t bytes_of(uint32_t count) { return sizeof(Header) + count * (sizeof(uint64_t) + sizeof(uint16_t)); }
  uint32_t changed(uint32_t set, uint32_t member, bool present);
  uint32_t interned();
  void release(uint32_t set);

  Array<Header*> sets_;
  Table table_;
  size_t* account_;
  uint32_t end_ = 1;
  std::vector<uint32_t> free_;
  std::vector<uint64_t> bits_;  // of the set that is being made
  std::vector<uint16_t> places_;
};

// What every source has of a block. Number 0 is nobody.
class States {
 public:
  static constexpr uint32_t kNobody = 0;

  explicit States(size_t* account) : sets_(account), states_(account), table_(account) {}

  Status status(uint32_t state, uint32_t source) const {
    Known& known = known_[(state ^ source * 0x9E3779B1u) % kKnown];
    if (known.state != state || known.source != source) known = {state, source, computed(state, source)};
    return known.status;
  }
  // The state that differs from `state` in one source's status only. Not yet counted as used.
  uint32_t changed(uint32_t state, uint32_t source, Status status);
  Sets::View ready(uint32_t state, int tier) const { return sets_.view(set(state, kTiers + tier)); }
  Sets::View held(uint32_t state, int tier) const { return sets_.view(set(state, tier)); }
  uint32_t ready_set(uint32_t state, int tier) const { return set(state, kTiers + tier); }

  // So many nodes more, or less, have this state; not none.
  void use(uint32_t state, uint32_t nodes = 1) {
    if (state == kNobody) return;
    if (states_[state].users == 0) --unused_;
    states_[state].users += nodes;
  }
  void drop(uint32_t state, uint32_t nodes = 1) {
    if (state != kNobody && (states_[state].users -= nodes) == 0) ++unused_;
  }

  // Frees what no node has; to be called between changes, when it is time.
  bool worth_sweeping() const { return unused_ > 256 && unused_ > table_.count() / 2; }
  void sweep();

 private:
  static constexpr int kSets = 2 * kTiers;
  static constexpr uint32_t kUnallocated = UINT32_MAX;
  static constexpr size_t kCached = 1024;
  struct State {
    uint32_t sets[kSets];
    uint32_t users;
  };
  static constexpr size_t kKnown = 512;
  struct Known {
    uint32_t state, source;
    Status status;
  };
  struct Change {
    uint32_t state, source, status, result;
  };

  uint32_t set(uint32_t state, int which) const { return state == kNobody ? Sets::kEmpty : states_[state].sets[which]; }
  uint32_t interned(const State& state);
  Status computed(uint32_t state, uint32_t source) const;

  Sets sets_;
  Array<State> states_;
  Table table_;
  uint32_t end_ = 1;
  size_t unused_ = 0;
  std::vector<uint32_t> free_;
  std::array<Change, kCached> cache_{};  // an entry of zeros is true
  mutable std::array<Known, kKnown> known_{};  // what was asked for lately; zeros are true
};

}  // namespace kvmesh::index
