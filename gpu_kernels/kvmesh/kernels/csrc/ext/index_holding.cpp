// What sources store, in its place: they hold it from now on.
#include <algorithm>

#include "index_chunk.h"
#include "index_core.h"
#include "index_plain.h"

namespace kvmesh::index {
namespace {

constexpr size_t kAhead = 8;  // blocks from one whose slot has been fetched to one whose slot is needed

}  // namespace

void Core::hold_run(Source& source, uint32_t tree, uint32_t parent, const Run& run, Chunk& chunk) {
  const bool rooted = parent == kNone;
  uint64_t key = rooted ? 0 : nodes[parent].key;
  if (!rooted) nodes[parent].set_asked(true);  // so that making room spares it
  for (size_t begin = 0; begin < run.count; begin += Chunk::kBlocks) {
    const size_t count = std::min(Chunk::kBlocks, run.count - begin);
    const uint64_t sheds = sheds_;
    const bool room = make_room(source.tables[run.tier], count);
    // Shedding may have renumbered the parent, or, where memory is very short, taken it.
    if ((!rooted || begin > 0) && sheds_ != sheds) parent = nodes.find(tree, key);
    if (!room || (parent == kNone && !(rooted && begin == 0))) {
      counters.forgotten += run.count - begin;
      source.forgot = true;
      break;
    }
    if (begin > 0) chunk.take(source.tables[run.tier], run, begin);
    hold_chunk(source, tree, &parent, run, chunk);
    key = nodes[parent].key;
    const uint64_t before = sheds_;
    enforce();
    if (sheds_ != before) parent = nodes.find(tree, key);
  }
}

void Core::hold_chunk(Source& source, uint32_t tree, uint32_t* parent, const Run& run, Chunk& chunk) {
  Held& held = source.tables[run.tier];
  const size_t count = chunk.count;
  size_t tagged = chunk.find_keys(nodes, held, tree, *parent), duplicates = 0;
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
    const uint32_t at = held.place_for_new(chunk.held_tags[i], &held_free)
                            ? kNone
                            : held.find_tagged(chunk.held_tags[i], hash, &held_free);
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
    nodes.prefetch_spill_tagged(chunk.node_tags[std::min(i + kAhead, chunk.count - 1)]);
    Table::Place node_free, free;
    const bool plainly_new = nodes.place_for_new(chunk.node_tags[i], &node_free) &
                             held.place_for_new(chunk.held_tags[i], &free);
    if (!plainly_new && (nodes.find_tagged(chunk.node_tags[i], tree, chunk.keys[i], &node_free) != kNone ||
                         held.find_tagged(chunk.held_tags[i], hash, &free) != kNone))
      break;
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
