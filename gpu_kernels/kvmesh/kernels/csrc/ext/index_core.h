// The prefix index: who holds which prefix, fed with the records of many sources. Nothing here knows of Python.
//
// index_table.h   finds numbers by hash, in lines of index_line.h
// index_nodes.h   blocks in their places
// index_states.h  who holds a block            index_held.h    a source's blocks in one tier
// index_source.h  a source                     index_search.h  how far each source reaches along a prompt
// index_plain.h   runs of blocks that change alike
// index_chunk.h   blocks of a run that is stored, and what is fetched for them
//
// *Ready* is closed under "parent of": a source is ready at a block when it holds that block and all before it. Storing
// below and removing from the end, which is what engines do, touches one node a block; when an engine drops the middle
// of a chain, readiness is taken from everything below, once, and every match stays exact.
//
// Any call may throw std::bad_alloc. Memory stays safe then, but what the source holds may be half told: its caller
// clears it.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "index_nodes.h"
#include "index_source.h"

namespace kvmesh::index {

struct Counters {
  uint64_t residencies = 0, predicted = 0;  // now
  uint64_t stored = 0, removed = 0, duplicates = 0, unknown_removals = 0, unknown_moves = 0, orphans = 0;
  uint64_t dropped_orphans = 0, block_size_changes = 0, scope_changes = 0, ignored_group_blocks = 0, forgotten = 0, expired = 0;
  uint64_t matches = 0, matched_tokens = 0;
};

// Consecutive blocks that a source stored. The caller keeps the arrays.
struct Run {
  std::optional<uint64_t> parent;  // engine hash
  uint32_t scope;                  // of blocks without a parent
  Cut cut;
  int tier;
  std::optional<int64_t> group;
  const uint64_t* hashes;
  const uint64_t* locals;  // hash of each block's own tokens, and of what else identifies it
  size_t count;
};

class Core {
 public:
  explicit Core(size_t max_bytes);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Streams are the numbers by which callers know sources; a source that is cleared keeps its stream.
  uint32_t admit(uint32_t scope);
  void remove(uint32_t stream);
  void clear(uint32_t stream);
  void set_hidden(uint32_t stream, bool hidden);

  void store(uint32_t stream, const Run& run);
  void move(uint32_t stream, int tier, const uint64_t* hashes, size_t count);
  void remove(uint32_t stream, int tier, const uint64_t* hashes, size_t count);
  void ignore(uint32_t stream, std::optional<int64_t> group, size_t count);
  bool ignores(uint32_t stream, int64_t group) { return source(stream).ignores(group); }

  // Blocks from the root are held on the device until tick `due`, unless the source stores them before.
  void predict(uint32_t stream, uint32_t scope, Cut cut, const uint64_t* keys, size_t count, uint32_t due);
  // Lets go of what was due at tick `now` or before; how many blocks.
  size_t expire(uint32_t now);

  // Takes departed sources out of at most `limit` blocks; whether there is more to do.
  bool reclaim(size_t limit);
  bool reclaimable() const { return !retired_.empty(); }
  // Forgets until the bound is kept.
  void enforce();

  Source& source(uint32_t stream) { return *by_number_[streams_[stream].number]; }
  Source* source_numbered(uint32_t number) { return by_number_[number].get(); }
  bool known(uint32_t stream) const { return stream < streams_.size() && streams_[stream].number != kNone; }
  bool hidden(uint32_t stream) const { return streams_[stream].hidden; }
  size_t num_streams() const { return streams_.size(); }
  size_t num_parked() const;
  size_t memory_bytes() const { return bytes_; }
  const std::vector<uint64_t>& visible() const { return visible_; }
  const std::vector<uint64_t>& cold() const { return cold_; }  // those that hold, or held, blocks off the device

 private:
  size_t bytes_ = 0;  // first: the arrays below are counted in it

 public:
  States states;
  Nodes nodes;
  Counters counters;

 private:
  friend class Restorer;
  struct Stream {
    uint32_t number;
    bool hidden;
  };
  struct Due {
    uint32_t tick, stream, node;
    bool operator<(const Due& other) const { return tick > other.tick; }  // the heap's top is the earliest
  };
  struct Work {
    ParkedRun run;
    bool removal;
  };

  // How one source's status of a node with the state `from` changes; the same for all blocks of most runs.
  struct Step {
    uint32_t from = kNone;
    Status above = 0, before = 0, after = 0;
    uint32_t to = kNone;
    // It begins to hold the block, or holds it no more, and was and is as ready as what it holds allows.
    bool plain = false;
    bool changes_ready = false;
  };

  struct Plain;
  struct Removal;
  struct Chunk;

  static void set_bit(std::vector<uint64_t>& mask, uint32_t number, bool value);
  uint32_t new_number();
  void create(uint32_t stream, uint32_t scope);
  void retire(uint32_t stream);
  void destroy(Source& source);

  bool place(Source& source, const Run& run);
  void hold_run(Source& source, uint32_t tree, uint32_t parent, const Run& run, Chunk& chunk);
  void hold_chunk(Source& source, uint32_t tree, uint32_t* parent, const Run& run, Chunk& chunk);
  size_t hold_new(Held& held, uint32_t tree, uint32_t* parent, Chunk& chunk, size_t begin, Plain* plain);
  size_t hold_known(Source& source, Held& held, uint32_t tree, uint32_t last, Chunk& chunk, size_t begin,
                    Plain* plain);
  void adopted(Source& source, const uint64_t* hashes, size_t count, std::vector<Work>& waiting);
  void park(Source& source, const Run& run);
  void keep_parked(Source& source, ParkedRun&& run);  // takes over its use of its scope
  void drop_parked(Source& source);
  bool starts_a_sequence(Source& source, uint64_t parent);

  Status status(uint32_t node, const Source& source) const { return states.status(nodes[node].state, source.number); }
  Status status_above(uint32_t node, const Source& source) const;
  void hold(Source& source, int tier, uint64_t hash, uint32_t node, Status above, Step* step);
  void set_status(uint32_t node, Source& source, Status above, Status held);
  void set_state(uint32_t node, Source& source, const Step& step);
  void spread(uint32_t node, Source& source);
  void unset_held(Source& source, int tier, uint32_t node);
  void clear_held(Source& source, int tier, uint32_t node);
  uint32_t let_go(Source& source, int tier, uint32_t at);
  void release(Source& source, int tier, uint32_t at);
  void remove_chunk(Source& source, int tier, const uint64_t* hashes, size_t count);
  size_t remove_plain(Source& source, Held& held, uint32_t tree, const Removal& removal, size_t begin, Plain* plain);
  Step step_of_removal(const Source& source, int tier, uint32_t node);
  void hold_predicted(Source& source, uint32_t node, uint32_t due);
  bool drop_prediction(Source& source, uint32_t node);
  void plan_expiry(uint32_t due, uint32_t stream, uint32_t node);
  size_t dissolve(Source& source, size_t limit);

  bool make_room(Held& held, size_t count);
  bool shed();
  bool forget_oldest();
  bool holds_below(const Source& source, uint32_t node) const;
  void compact();

  size_t max_bytes_;
  Table held_;  // of all sources and tiers
  std::vector<Stream> streams_;
  std::vector<uint32_t> free_streams_;
  std::vector<std::unique_ptr<Source>> by_number_;
  std::vector<uint32_t> free_numbers_;
  std::vector<uint64_t> visible_, cold_;
  std::deque<uint32_t> retired_;  // numbers
  std::vector<Due> due_;          // a heap
  size_t parked_bytes_ = 0;
  uint64_t sheds_ = 0;  // times that something was given up for memory: nodes may have other numbers since
  std::vector<uint32_t> spreading_, positions_;
  std::vector<Held::Entry> spared_;
};

}  // namespace kvmesh::index
