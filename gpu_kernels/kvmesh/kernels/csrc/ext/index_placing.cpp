// What sources store finds its place: in the trees, or parked until its parent comes.
#include <algorithm>

#include "index_core.h"
#include "index_plain.h"
#include "xxh3.h"

namespace kvmesh::index {
namespace {

constexpr uint64_t kSeed = 1337;    // of the rolling hash, as everybody's
constexpr size_t kAhead = 8;       // blocks from one whose slot has been fetched to one whose slot is needed
constexpr uint64_t kRootZero = 0;  // some engines write 0 where others write nil: no parent

uint64_t rolled(uint64_t parent, uint64_t local) { return xxh3_64_of_pair(parent, local, kSeed); }

}  // namespace

void Core::store(uint32_t stream, const Run& run) {
  if (run.count == 0) return;
  Source& source = this->source(stream);
  if (run.tier != kDevice) set_bit(cold_, source.number, true);
  if (!place(source, run)) {
    enforce();  // it may be parked, which takes memory, too
    return;
  }
  if (source.parked.empty()) return;
  std::vector<Work> waiting;
  adopted(source, run.hashes, run.count, waiting);
  while (!waiting.empty()) {
    Work work = std::move(waiting.back());
    waiting.pop_back();
    ParkedRun& parked = work.run;
    if (work.removal) {
      if (!parked.group || !source.ignores(*parked.group))
        remove(stream, parked.tier, parked.removed.data(), parked.removed.size());
      continue;
    }
    const bool placed = place(source, {parked.parent, parked.scope, parked.cut, parked.tier, parked.group,
                                       parked.hashes.data(), parked.locals.data(), parked.hashes.size()});
    nodes.scopes.drop(parked.scope);
    if (!parked.removed.empty()) {
      ParkedRun removal = parked;
      waiting.push_back({std::move(removal), true});
    }
    if (placed) adopted(source, parked.hashes.data(), parked.hashes.size(), waiting);
  }
}

// Appends the runs that waited for these blocks, last first: to be popped in order.
void Core::adopted(Source& source, const uint64_t* hashes, size_t count, std::vector<Work>& waiting) {
  const size_t begin = waiting.size();
  for (size_t i = 0; i < count && !source.parked.empty(); ++i) {
    if (source.find(hashes[i]) == kNone) continue;
    for (ParkedRun& run : source.parked.adopt(hashes[i])) {
      parked_bytes_ -= run.bytes();
      bytes_ -= run.bytes();
      waiting.push_back({std::move(run), false});
    }
  }
  std::reverse(waiting.begin() + begin, waiting.end());
}

// Whether the blocks have found their place.
bool Core::place(Source& source, const Run& run) {
  uint32_t parent = kNone;
  if (run.parent) {
    parent = source.find(*run.parent);
    if (parent == kNone && !starts_a_sequence(source, *run.parent)) {
      park(source, run);
      return false;
    }
  }
  if (parent == kNone) {
    const uint32_t tree = nodes.use_tree(run.scope, run.cut);
    hold_run(source, tree, parent, run);
    nodes.drop_tree(tree);
    return true;
  }
  const uint32_t tree = nodes[parent].tree();
  if (!(nodes.tree(tree).cut == run.cut)) {
    ++counters.block_size_changes;
    return false;
  }
  // To take its word for its parent's would promise one adapter's or salt's blocks to requests of another.
  if (!nodes.scopes.continues(run.scope, nodes.tree(tree).scope, source.scope)) {
    ++counters.scope_changes;
    return false;
  }
  nodes.use_tree(tree);
  hold_run(source, tree, parent, run);
  nodes.drop_tree(tree);
  return true;
}

// Whether an unknown parent stands for none: 0 does for some engines, which show it with their first block.
bool Core::starts_a_sequence(Source& source, uint64_t parent) {
  if (parent == kRootZero && source.num_held() == source.tables[Source::kPredicted].count()) source.zero_is_root = true;
  return parent == kRootZero && source.zero_is_root;
}

void Core::park(Source& source, const Run& run) {
  counters.orphans += run.count;
  if (source.parked.full()) drop_parked(source);
  ParkedRun parked{*run.parent, run.scope, run.cut, run.tier, run.group,
                   {run.hashes, run.hashes + run.count}, {run.locals, run.locals + run.count}, {}};
  nodes.scopes.use(run.scope);
  keep_parked(source, std::move(parked));
}

void Core::keep_parked(Source& source, ParkedRun&& run) {
  const size_t bytes = run.bytes();
  source.parked.park(std::move(run));
  parked_bytes_ += bytes;
  bytes_ += bytes;
}

void Core::drop_parked(Source& source) {
  for (const ParkedRun& run : source.parked.oldest()) {
    if (!source.retired) counters.dropped_orphans += run.hashes.size();
    source.forgot = true;
    parked_bytes_ -= run.bytes();
    bytes_ -= run.bytes();
    nodes.scopes.drop(run.scope);
  }
}

void Core::hold_run(Source& source, uint32_t tree, uint32_t parent, const Run& run) {
  const bool rooted = parent == kNone;
  uint64_t key = rooted ? 0 : nodes[parent].key;
  if (!rooted) nodes[parent].set_asked(true);  // so that making room spares it
  for (size_t begin = 0; begin < run.count; begin += kChunk) {
    const size_t count = std::min(kChunk, run.count - begin);
    const uint64_t sheds = sheds_;
    const bool room = make_room(source.tables[run.tier], count);
    // Shedding may have renumbered the parent, or, where memory is very short, taken it.
    if ((!rooted || begin > 0) && sheds_ != sheds) parent = nodes.find(tree, key);
    if (!room || (parent == kNone && !(rooted && begin == 0))) {
      counters.forgotten += run.count - begin;
      source.forgot = true;
      break;
    }
    hold_chunk(source, tree, &parent, run, begin, count);
    key = nodes[parent].key;
    const uint64_t before = sheds_;
    enforce();
    if (sheds_ != before) parent = nodes.find(tree, key);
  }
}

// What is looked for in the tables for the blocks of a part of a run. Fetches of what will be read are in loops so short
// that many of them overlap.
struct Core::Chunk {
  const uint64_t* hashes;
  size_t count;
  uint64_t keys[kChunk];
  uint32_t node_tags[kChunk], held_tags[kChunk];

  void prepare(const Nodes& nodes, const Held& held, uint32_t tree, uint32_t parent, const uint64_t* locals) {
    keys[0] = parent == kNone ? locals[0] : rolled(nodes[parent].key, locals[0]);
    nodes.prefetch_slot_tagged(node_tags[0] = Nodes::tag(tree, keys[0]));
    for (size_t i = 0; i < count; ++i) held.prefetch_slot(held_tags[i] = held.tag(hashes[i]));
    for (size_t i = 1; i < count; ++i) keys[i] = rolled(keys[i - 1], locals[i]);
    for (size_t i = 0; i < count; ++i) held.prefetch_spill(held_tags[i]);
    held.prefetch_end(count);
  }
  // The slots that new blocks go to, from `begin` on.
  void fetch_slots(const Nodes& nodes, uint32_t tree, size_t begin) {
    for (size_t i = begin; i < count; ++i) nodes.prefetch_slot_tagged(node_tags[i] = Nodes::tag(tree, keys[i]));
    nodes.prefetch_end(count - begin);
  }
};

void Core::hold_chunk(Source& source, uint32_t tree, uint32_t* parent, const Run& run, size_t begin, size_t count) {
  Held& held = source.tables[run.tier];
  Chunk chunk;
  chunk.hashes = run.hashes + begin;
  chunk.count = count;
  chunk.prepare(nodes, held, tree, *parent, run.locals + begin);
  size_t duplicates = 0, tagged = 1;
  Status above = *parent == kNone ? kRoot : status(*parent, source);
  Step step;
  Plain plain{states, counters, step, 1};
  const auto settle = [&] {
    plain.settle();
    if (plain.num_blocks > 0) source.tell(run.tier, nodes.tree(tree).scope, plain.num_blocks, plain.sum);
    plain.num_blocks = plain.sum = 0;
  };
  uint32_t last = kNone;  // the node of the block before, if that is of this chunk and not new
  bool below_new = false;
  for (size_t i = 0; i < count; ++i) {
    if (below_new && step.plain && step.from == States::kNobody && above == step.above) {
      i += hold_new(held, tree, parent, chunk, i, &plain);
      if (i == count) break;
    }
    Table::Place node_free{}, held_free{};
    // A chain mostly lies in the order in which it came.
    uint32_t node = kNone;
    if (last != kNone && nodes.is(last + 1, tree, chunk.keys[i])) {
      node = last + 1;
    } else {
      if (tagged <= i) {
        chunk.fetch_slots(nodes, tree, i);
        tagged = count;
      }
      node = nodes.find_tagged(chunk.node_tags[i], tree, chunk.keys[i], &node_free);
    }
    below_new = node == kNone;
    if (below_new) {
      node = nodes.add_at(node_free, chunk.node_tags[i], tree, chunk.keys[i], *parent);
      last = kNone;
      if (tagged < count) {
        chunk.fetch_slots(nodes, tree, i + 1);
        tagged = count;
      }
    } else {
      if (last == kNone) nodes.prefetch_from(node, count - i);
      last = node;
    }
    const uint64_t hash = chunk.hashes[i];
    const uint32_t at = held.find_tagged(chunk.held_tags[i], hash, &held_free);
    const Node& there = nodes[node];
    if (at == kNone && step.plain && there.state == step.from && above == step.above &&
        (there.first_child == kNone || !step.changes_ready || source.unready == 0)) {
      try {
        held.append_at(held_free, chunk.held_tags[i], hash, node);
      } catch (...) {
        nodes.prune(node);
        throw;
      }
      nodes[node].state = step.to;
      plain.add(hash);
      above = step.after;
      *parent = node;
      continue;
    }
    settle();
    if (at != kNone && held.node(at) == node) {
      ++duplicates;
    } else {
      uint32_t released = kNone;
      if (at != kNone) {  // the engine gives the hash to other tokens
        source.doubt(hash);
        released = let_go(source, run.tier, at);
        above = *parent == kNone ? kRoot : status(*parent, source);
      }
      try {
        hold(source, run.tier, hash, node, above, &step);
      } catch (...) {
        nodes.prune(node);
        if (released != kNone && !nodes.is_free(released)) nodes.prune(released);
        throw;
      }
      // Not before: the parent and the node may have been there for what has been released below them only.
      if (released != kNone) {
        nodes.prune(released);
        below_new = false;
        last = kNone;
      }
    }
    above = nodes[node].state == step.to ? step.after : status(node, source);
    *parent = node;
  }
  settle();
  counters.stored += count - duplicates;
  counters.duplicates += duplicates;
}

// Blocks from `begin` on, below a node that is new: so these are mostly new, too. Up to one whose hash the source has
// given to other tokens, or whose node is there: who chooses the tokens can choose keys that come again. How many.
size_t Core::hold_new(Held& held, uint32_t tree, uint32_t* parent, const Chunk& chunk, size_t begin, Plain* plain) {
  size_t i = begin;
  for (; i < chunk.count; ++i) {
    const uint64_t hash = chunk.hashes[i];
    if (i + kAhead < chunk.count) nodes.prefetch_spill_tagged(chunk.node_tags[i + kAhead]);
    Table::Place node_free{}, free{};
    if (nodes.find_tagged(chunk.node_tags[i], tree, chunk.keys[i], &node_free) != kNone) break;
    if (held.find_tagged(chunk.held_tags[i], hash, &free) != kNone) break;
    const uint32_t node =
        nodes.add_only_child(node_free, chunk.node_tags[i], tree, chunk.keys[i], *parent, plain->step.to);
    try {
      held.append_at(free, chunk.held_tags[i], hash, node);
    } catch (...) {
      nodes[node].state = States::kNobody;
      nodes.prune(node);
      throw;
    }
    plain->add(hash);
    *parent = node;
  }
  return i - begin;
}

}  // namespace kvmesh::index
