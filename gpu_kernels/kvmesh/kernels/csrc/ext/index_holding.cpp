// What sources store, in its place: they hold it from now on.
#include <algorithm>

#include "index_chunk.h"
#include "index_core.h"
#include "index_plain.h"

namespace kvmesh::index {
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
  size_t duplicates = 0;
  chunk.begin(nodes, held, tree, *parent);
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
    } else if (last != kNone && step.plain && above == step.above && above == step.after) {
      const size_t known = hold_known(source, held, tree, last, chunk, i, &plain);
      if (known > 0) *parent = last += static_cast<uint32_t>(known);
      i += known;
      if (i == count) break;
    }
    Table::Place node_free{}, held_free{};
    // A chain mostly lies in the order in which it came.
    uint32_t node = kNone;
    if (last != kNone && nodes.is(last + 1, tree, chunk.key(i))) {
      node = last + 1;
    } else {
      chunk.tag(nodes, tree, i);
      node = nodes.find_tagged(chunk.node_tags[i], tree, chunk.key(i), &node_free);
    }
    if (node == kNone) {
      node = nodes.add_at(node_free, chunk.node_tags[i], tree, chunk.key(i), *parent);
      if (!below_new) chunk.expect_new(nodes, tree, i);
      last = kNone;
      below_new = true;
    } else {
      if (last == kNone) nodes.prefetch_from(node, count - i);
      last = node;
      below_new = false;
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

// Blocks from `begin` on, below a node that is new: so these are mostly new, too. Up to one whose hash the source may
// have given to other tokens, or whose node may be there: who chooses tokens can choose keys that come again. How many.
size_t Core::hold_new(Held& held, uint32_t tree, uint32_t* parent, Chunk& chunk, size_t begin, Plain* plain) {
  Nodes::Adding adding(nodes, tree, plain->step.to);
  Held::Appending appending(held);
  const size_t last = chunk.count - 1;
  uint64_t sum = 0;
  uint32_t node = *parent;
  size_t i = begin;
  for (; i <= last; ++i) {
    chunk.tag_up_to(nodes, tree, i + 2 * Chunk::kAhead);
    const size_t ahead = std::min(i + Chunk::kAhead, last);
    adding.filling.prefetch_spill(chunk.node_tags[ahead]);
    appending.filling.prefetch_spill(chunk.held_tags[ahead]);
    const uint32_t node_tag = chunk.node_tags[i], held_tag = chunk.held_tags[i];
    if (!(adding.filling.find(node_tag) & appending.filling.find(held_tag))) break;
    node = adding.add(node_tag, chunk.key(i), node);
    const uint64_t hash = chunk.hashes[i];
    appending.append(held_tag, hash, node);
    sum += mixed(hash);
  }
  *parent = node;
  plain->add(i - begin, sum);
  return i - begin;
}

// Blocks from `begin` on whose nodes are there and follow `last`, as those of a chain that came at once do, with what
// the step changes. How many.
size_t Core::hold_known(Source& source, Held& held, uint32_t tree, uint32_t last, Chunk& chunk, size_t begin,
                        Plain* plain) {
  Held::Appending appending(held);
  const Step step = plain->step;
  const bool any_child = !step.changes_ready || source.unready == 0;
  uint64_t sum = 0;
  size_t i = begin;
  for (; i < chunk.count && nodes.is(last + 1, tree, chunk.key(i)); ++i) {
    appending.filling.prefetch_spill(chunk.held_tags[std::min(i + Chunk::kAhead, chunk.count - 1)]);
    Node& node = nodes[last + 1];
    const uint32_t tag = chunk.held_tags[i];
    if (node.state != step.from || !(any_child || node.first_child == kNone) || !appending.filling.find(tag)) break;
    node.state = step.to;
    const uint64_t hash = chunk.hashes[i];
    appending.append(tag, hash, ++last);
    sum += mixed(hash);
  }
  plain->add(i - begin, sum);
  return i - begin;
}

}  // namespace kvmesh::index
