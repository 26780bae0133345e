// Who holds a block, and who is ready there.
#include <algorithm>

#include "index_core.h"
#include "index_plain.h"

namespace kvmesh::index {
namespace {

constexpr size_t kRemovedAtOnce = 64;

// Whether a block is held but would be ready further if the one before it were.
int unready(Status status) { return status != status_below(kRoot, status & kHeldMask); }

}  // namespace

void Core::hold(Source& source, int tier, uint64_t hash, uint32_t node, Status above, Step* step) {
  const uint32_t state = nodes[node].state;
  if (state != step->from || above != step->above) {
    const Status before = status(node, source), after = status_below(above, before | held_in(tier));
    const bool plain = (before & held_in(tier)) == 0 && unready(before) == 0 && unready(after) == 0;
    *step = {state, above, before, after, states.changed(state, source.number, after), plain,
             (before ^ after) >> kTiers != 0};
  }
  // First, since it may fail: a block that is held but in no table could never be taken back.
  source.tables[tier].append(hash, node);
  if ((step->before & held_in(tier)) == 0) {
    set_state(node, source, *step);
  } else if (tier != kDevice || !drop_prediction(source, node)) {
    source.add_twin(tier, node);
  }
  source.tell(tier, nodes.scope_of(node), 1, mixed(hash));
  ++counters.residencies;
}

void Core::set_status(uint32_t node, Source& source, Status above, Status held) {
  const uint32_t state = nodes[node].state;
  const Status before = status(node, source), after = status_below(above, held);
  if (before != after) set_state(node, source, {state, above, before, after, states.changed(state, source.number, after)});
}

void Core::set_state(uint32_t node, Source& source, const Step& step) {
  const Status before = step.before, after = step.after;
  nodes.set_state(node, step.to);
  source.unready += unready(after) - unready(before);
  if ((before ^ after) >> kTiers == 0 || nodes[node].first_child == kNone) return;
  // Where nothing waits to become ready, the children, of which there may be very many, need not be looked at.
  const bool gained = (before & ~after) >> kTiers == 0;
  if (!gained || source.unready > 0) spread(node, source);
}

// Carries readiness down to the descendants.
void Core::spread(uint32_t node, Source& source) {
  spreading_.assign(1, node);
  while (!spreading_.empty()) {
    const uint32_t above = spreading_.back();
    spreading_.pop_back();
    const Status parent = status(above, source);
    for (uint32_t child = nodes[above].first_child; child != kNone; child = nodes[child].next) {
      const Status before = status(child, source);
      const Status after = before == 0 ? before : status_below(parent, before & kHeldMask);
      if (before == after) continue;
      nodes.set_state(child, states.changed(nodes[child].state, source.number, after));
      source.unready += unready(after) - unready(before);
      if (nodes[child].first_child != kNone) spreading_.push_back(child);
    }
  }
}

Status Core::status_above(uint32_t node, const Source& source) const {
  const uint32_t parent = nodes[node].parent;
  return parent == kNone ? kRoot : status(parent, source);
}

void Core::unset_held(Source& source, int tier, uint32_t node) {
  const Status held = status(node, source) & kHeldMask & ~held_in(tier);
  set_status(node, source, held == 0 ? Status{0} : status_above(node, source), held);
}

void Core::clear_held(Source& source, int tier, uint32_t node) {
  unset_held(source, tier, node);
  nodes.prune(node);
}

void Core::release(Source& source, int tier, uint32_t at) { nodes.prune(let_go(source, tier, at)); }

// The block's node, which is for the caller to prune.
uint32_t Core::let_go(Source& source, int tier, uint32_t at) {
  Held& held = source.tables[tier];
  const uint32_t node = held.node(at);
  // First, since it may fail: see hold.
  if (source.twins.empty() || !source.drop_twin(tier, node)) unset_held(source, tier, node);
  source.take_back(tier, nodes.scope_of(node), 1, mixed(held.hash(at)));
  held.erase(at);
  --counters.residencies;
  return node;
}

void Core::move(uint32_t stream, int tier, const uint64_t* hashes, size_t count) {
  Source& source = this->source(stream);
  if (tier != kDevice) set_bit(cold_, source.number, true);
  Held& held = source.tables[tier];
  for (size_t i = 0; i < count; ++i) {
    if (source.find(hashes[i]) == kNone) {
      ++counters.unknown_moves;
      continue;
    }
    if (held.find(hashes[i]) != kNone) continue;
    const bool room = make_room(held, 1);
    const uint32_t node = source.find(hashes[i]);
    if (!room || node == kNone) {
      ++counters.forgotten;
      source.forgot = true;
      continue;
    }
    Step step;
    hold(source, tier, hashes[i], node, status_above(node, source), &step);
    ++counters.stored;
  }
  enforce();
}

// The step of a block that leaves the only tier that it is held in; one that is not plain where it is held elsewhere.
Core::Step Core::step_of_removal(const Source& source, int tier, uint32_t node) {
  const uint32_t state = nodes[node].state;
  const Status before = status(node, source);
  if ((before & kHeldMask) != held_in(tier)) return {};
  return {state, 0, before, 0, states.changed(state, source.number, 0), unready(before) == 0, before >> kTiers != 0};
}

void Core::remove(uint32_t stream, int tier, const uint64_t* hashes, size_t count) {
  Source& source = this->source(stream);
  Held& held = source.tables[tier];
  for (size_t begin = 0; begin < count; begin += kRemovedAtOnce)
    remove_chunk(source, tier, hashes + begin, std::min(kRemovedAtOnce, count - begin));
  held.tidy();
  if (states.worth_sweeping()) states.sweep();
}

// Where the hashes are, and what their nodes are; everything that is read then is fetched before any of it is needed.
struct Core::Removal {
  const uint64_t* hashes;
  size_t count;
  uint32_t tags[kRemovedAtOnce], at[kRemovedAtOnce];

  void find(const Held& held, const Nodes& nodes) {
    if (held.empty()) {
      std::fill_n(at, count, kNone);
      return;
    }
    for (size_t i = 0; i < count; ++i) held.prefetch_slot(tags[i] = held.tag(hashes[i]));
    at[0] = held.find_tagged(tags[0], hashes[0]);
    // What goes together mostly came together, and goes in the opposite order or in the same one.
    size_t followed = 1;
    if (at[0] != kNone) {
      held.prefetch_around(at[0], count);
      const uint32_t step = count > 1 && held.is(at[0] + 1, hashes[1]) ? 1 : UINT32_MAX;
      for (uint32_t next = at[0] + step; followed < count && held.is(next, hashes[followed]); next += step) {
        nodes.prefetch(held.node(next));
        at[followed++] = next;
      }
    }
    for (size_t i = 0; i < count; ++i) held.prefetch_spill(tags[i]);
    for (size_t i = followed; i < count; ++i) held.prefetch_tagged(tags[i]);
    for (size_t i = followed; i < count; ++i) {
      at[i] = held.find_tagged(tags[i], hashes[i]);
      if (at[i] != kNone) nodes.prefetch(held.node(at[i]));
    }
  }
  // The slots of nodes that leave their table: those that nobody else holds, as the step of the others says.
  void fetch_slots(const Nodes& nodes, const Held& held, const Step& step) {
    uint32_t leaving[kRemovedAtOnce];
    size_t num_leaving = 0;
    for (size_t i = 0; i < count; ++i) {
      if (at[i] == kNone) continue;
      const uint32_t node = held.node(at[i]);
      if (nodes[node].state != step.from || step.to == States::kNobody) leaving[num_leaving++] = nodes.tag(node);
    }
    for (size_t i = 0; i < num_leaving; ++i) nodes.prefetch_slot_tagged(leaving[i]);
    for (size_t i = 0; i < num_leaving; ++i) nodes.prefetch_spill_tagged(leaving[i]);
  }
};

void Core::remove_chunk(Source& source, int tier, const uint64_t* hashes, size_t count) {
  Held& held = source.tables[tier];
  Removal removal;
  removal.hashes = hashes;
  removal.count = count;
  removal.find(held, nodes);
  Step step;
  uint32_t tree = kNone, scope = kNone;
  const auto take_step = [&](uint32_t node) {
    tree = nodes[node].tree();
    scope = nodes.scope_of(node);
    step = step_of_removal(source, tier, node);
  };
  const uint32_t* first = std::find_if(removal.at, removal.at + count, [](uint32_t at) { return at != kNone; });
  if (first != removal.at + count) take_step(held.node(*first));
  removal.fetch_slots(nodes, held, step);
  Plain plain{states, counters, step, -1};
  const auto settle = [&] {
    plain.settle();
    if (plain.num_blocks > 0) source.take_back(tier, scope, plain.num_blocks, plain.sum);
    plain.num_blocks = plain.sum = 0;
  };
  for (size_t i = 0; i < count;) {
    if (step.plain && source.twins.empty()) {
      i += remove_plain(source, held, tree, removal, i, &plain);
      if (i == count) break;
    }
    const uint32_t at = removal.at[i], node = at == kNone ? kNone : held.node(at);
    if (node == kNone) {  // it was not there, or has been named before
      if (source.parked.empty() || !source.parked.remove(hashes[i], tier)) ++counters.unknown_removals;
      ++i;
      continue;
    }
    settle();
    if (nodes[node].state != step.from || nodes[node].tree() != tree) {
      take_step(node);
      if (step.plain) continue;
    }
    release(source, tier, at);
    ++counters.removed;
    step = Step{};
    ++i;
  }
  settle();
}

// Blocks from `begin` on that the step changes, below which the source holds none. How many.
size_t Core::remove_plain(Source& source, Held& held, uint32_t tree, const Removal& removal, size_t begin, Plain* plain) {
  Held::Erasing erasing(held);
  const Step step = plain->step;
  uint32_t unused = kNone, last = kNone;
  uint64_t sum = 0;
  size_t i = begin;
  {
    Nodes::Removing removing(nodes, tree);
    for (; i < removal.count && unused == kNone; ++i) {
      const uint32_t at = removal.at[i], node = at == kNone ? kNone : erasing.node(at);
      if (node == kNone) break;
      Node& there = nodes[node];
      if (there.state != step.from || there.tree() != tree) break;
      const uint32_t child = there.first_child;
      // What has just been removed is not held any more.
      const bool may_hold = child != kNone && !(child == last && nodes[child].next == kNone);
      if (may_hold && step.changes_ready && holds_below(source, node)) break;
      erasing.erase(removal.tags[i], at);
      there.state = step.to;
      sum += mixed(removal.hashes[i]);
      last = node;
      if (step.to == States::kNobody && child == kNone) {
        const uint32_t parent = removing.remove(node);
        if (parent != kNone && nodes.is_unused(parent)) unused = parent;
      }
    }
  }
  nodes.prune(unused);
  counters.removed += i - begin;
  plain->add(i - begin, sum);
  return i - begin;
}

}  // namespace kvmesh::index
