// What one source holds, in all tiers, and what it has told that does not fit in yet.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "index_held.h"
#include "index_nodes.h"
#include "index_states.h"

namespace kvmesh::index {

// A stored event whose parent has not been heard of, and which of its blocks have been removed meanwhile. Where such a
// block belongs is unknown; to take it for the start of a sequence would promise a prefix that is not there.
struct ParkedRun {
  uint64_t parent;
  uint32_t scope;  // of which it is a user
  Cut cut;
  int tier;
  std::optional<int64_t> group;
  std::vector<uint64_t> hashes;
  std::vector<uint64_t> locals;
  std::vector<uint64_t> removed;

  size_t bytes() const {
    return sizeof(ParkedRun) + 64 + hashes.size() * kIndexedBytes + locals.size() * sizeof(uint64_t);
  }
  static constexpr size_t kIndexedBytes = 56;  // a hash, where it is found by, and that it is gone
};

// Engines choose their hashes: without a secret they could choose many for one place.
struct SecretHash {
  size_t operator()(uint64_t key) const {
    key = (key ^ secret_multiplier()) * 0x9E3779B97F4A7C15u;
    return (key ^ key >> 32) * secret_multiplier() >> 16;
  }
};

// The parked runs of one source.
class Parked {
 public:
  // For each source. Orphans follow a loss or a reordering; a source with more of them than this is not understood.
  static constexpr size_t kMaxRuns = 256;

  bool empty() const { return count_ == 0; }
  bool full() const { return count_ >= kMaxRuns; }
  size_t count() const { return count_; }

  void park(ParkedRun&& run);
  // Gives out the runs that waited for `parent`, in the order in which they came.
  std::vector<ParkedRun> adopt(uint64_t parent);
  // Gives out those that wait longest for one parent.
  std::vector<ParkedRun> oldest();
  // Notes that a parked block is gone; false when none has this hash.
  bool remove(uint64_t hash, int tier);
  template <typename Visit>
  void each(const Visit& visit) const {
    for (const auto& [parent, runs] : by_parent_)
      for (const auto& run : runs) visit(*run);
  }

 private:
  void forget(uint64_t hash, const ParkedRun& run);

  std::unordered_map<uint64_t, std::vector<std::unique_ptr<ParkedRun>>, SecretHash> by_parent_;
  std::unordered_multimap<uint64_t, ParkedRun*, SecretHash> by_hash_;  // of blocks that are not gone
  std::deque<uint64_t> order_;  // parents; some may have been adopted since
  size_t count_ = 0;
};

// Number and sum of a set of hashes, each mixed so that equal sums mean equal sets.
struct Digest {
  uint64_t num_blocks = 0;
  uint64_t sum = 0;
};

// The finaliser of splitmix64 (Steele, Lea and Flood 2014).
inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

struct Source {
  template <typename Value>
  using Map = std::unordered_map<uint64_t, Value, std::hash<uint64_t>, std::equal_to<>,
                                 CountedAllocator<std::pair<const uint64_t, Value>>>;
  using Hashes = std::unordered_set<uint64_t, SecretHash, std::equal_to<>, CountedAllocator<uint64_t>>;

  static constexpr int kPredicted = kTiers;  // the table of predicted blocks follows those of the tiers
  static constexpr int kTables = kTiers + 1;

  Source(size_t* account, Table& table, uint32_t number, uint32_t stream, uint32_t scope)
      : number(number), stream(stream), scope(scope), tables{
          {account, table, table_id(number, 0)}, {account, table, table_id(number, 1)},
          {account, table, table_id(number, 2)},
          // Predicted blocks have no hash: the low half is the node, the high half when they cease to count.
          {account, table, table_id(number, kPredicted), UINT32_MAX}},
        twins(Map<uint32_t>::allocator_type(account)), digests(Map<Digest>::allocator_type(account)),
        doubtful(Hashes::allocator_type(account)) {}

  size_t num_held() const {
    size_t sum = 0;
    for (const Held& held : tables) sum += held.count();
    return sum;
  }
  // The node of an engine's hash in whichever tier; kNone, too, where it is doubtful which block is meant.
  uint32_t find(uint64_t hash) const;
  // The engine has given the hash of a block that is held to another one, so it may have both. Where engines hash tokens
  // alone, the two may be of different adapters or salts: what continues or moves either of them has no known place.
  void doubt(uint64_t hash);
  // How many further hashes the engine has for the same block in the same tier.
  void add_twin(int tier, uint32_t node) { ++twins[twin_key(tier, node)]; }
  bool drop_twin(int tier, uint32_t node);
  void tell(int tier, uint32_t scope, uint64_t num_blocks, uint64_t sum);
  void take_back(int tier, uint32_t scope, uint64_t num_blocks, uint64_t sum);
  static uint64_t table_id(uint32_t number, int table) { return static_cast<uint64_t>(number) * kTables + table; }
  static uint64_t digest_key(int tier, uint32_t scope) { return static_cast<uint64_t>(scope) << 2 | tier; }
  static uint64_t twin_key(int tier, uint32_t node) { return static_cast<uint64_t>(tier) << 32 | node; }
  bool ignores(int64_t group) const;
  void rename(const std::vector<uint32_t>& moved);

  uint32_t number;  // of its bit
  uint32_t stream;
  uint32_t scope;  // of blocks that name no adapter and no salt
  bool retired = false;
  bool zero_is_root = false;
  bool forgot = false;  // something that it has told and not taken back is not here
  Held tables[kTables];
  static constexpr size_t kMaxIgnoredGroups = 64;
  size_t spared[kTables] = {};  // entries in a row that the memory bound has let be
  int64_t unready = 0;             // blocks that would be ready further if the one before were
  Map<uint32_t> twins;
  Map<Digest> digests;
  static constexpr size_t kMaxDoubtful = 8192;
  Hashes doubtful;
  bool doubts_all = false;  // there were more
  std::vector<int64_t> ignored_groups;
  Parked parked;

 private:
  uint64_t last_digest_key_ = 0;
  Digest* last_digest_ = nullptr;
  Digest& digest(uint64_t key);
};

}  // namespace kvmesh::index
