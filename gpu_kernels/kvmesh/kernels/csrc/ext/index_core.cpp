// Sources that come and go, and their records.
#include "index_core.h"

#include <algorithm>

#include "xxh3.h"

namespace kvmesh::index {
namespace {

constexpr uint64_t kSeed = 1337;  // of the rolling hash, as everybody's
constexpr size_t kChunk = 256;    // blocks for which there is room, or none is stored
constexpr size_t kRemovedAtOnce = 64;
constexpr uint64_t kRootZero = 0;  // some engines write 0 where others write nil: no parent
constexpr size_t kDissolvedAtOnce = 4096;

// Whether a block is held but would be ready further if the one before it were.
int unready(Status status) { return status != status_below(kRoot, status & kHeldMask); }

uint64_t rolled(uint64_t parent, uint64_t local) {
  const uint64_t pair[2] = {parent, local};
  return xxh3_64(reinterpret_cast<const uint8_t*>(pair), sizeof pair, kSeed);
}

}  // namespace

// Blocks of a run that one step has changed, and which are yet to be counted.
struct Core::Plain {
  States& states;
  Counters& counters;
  const Step& step;
  uint32_t uncounted = 0;
  uint64_t num_blocks = 0, sum = 0;

  ~Plain() { settle(); }
  void add(uint64_t hash) {
    ++uncounted;
    ++num_blocks;
    sum += mixed(hash);
  }
  // Before the step, or a state's number of users, is looked at.
  void settle() {
    if (uncounted == 0) return;
    states.use(step.to, uncounted);
    states.drop(step.from, uncounted);
    counters.residencies += uncounted;
    uncounted = 0;
  }
};

Core::Core(size_t max_bytes) : states(&bytes_), nodes(&bytes_, states), max_bytes_(max_bytes) {
  bytes_ += sizeof(Core);
}

void Core::set_bit(std::vector<uint64_t>& mask, uint32_t number, bool value) {
  if (mask.size() <= number / 64) mask.resize(number / 64 + 1);
  const uint64_t bit = uint64_t{1} << (number % 64);
  mask[number / 64] = value ? mask[number / 64] | bit : mask[number / 64] & ~bit;
}

uint32_t Core::new_number() {
  if (free_numbers_.empty()) {
    if (by_number_.size() >= Sets::kMaxMembers) throw std::bad_alloc();
    by_number_.emplace_back();
    free_numbers_.push_back(static_cast<uint32_t>(by_number_.size() - 1));
    free_numbers_.reserve(by_number_.capacity());
  }
  return free_numbers_.back();
}

void Core::create(uint32_t stream, uint32_t scope) {
  const uint32_t number = new_number();
  set_bit(cold_, number, false);
  set_bit(visible_, number, !streams_[stream].hidden);
  by_number_[number] = std::make_unique<Source>(&bytes_, number, stream, scope);
  free_numbers_.pop_back();
  nodes.scopes.use(scope);
  bytes_ += sizeof(Source);
  streams_[stream].number = number;
}

uint32_t Core::admit(uint32_t scope) {
  if (free_streams_.empty()) {
    streams_.push_back({kNone, false});
    free_streams_.push_back(static_cast<uint32_t>(streams_.size() - 1));
    free_streams_.reserve(streams_.capacity());
  }
  const uint32_t stream = free_streams_.back();
  streams_[stream] = {kNone, false};
  create(stream, scope);
  free_streams_.pop_back();
  return stream;
}

void Core::remove(uint32_t stream) {
  retire(stream);
  streams_[stream].number = kNone;
  free_streams_.push_back(stream);
  reclaim(kDissolvedAtOnce);
}

void Core::clear(uint32_t stream) {
  const uint32_t scope = source(stream).scope;
  nodes.scopes.use(scope);
  retire(stream);
  create(stream, scope);
  nodes.scopes.drop(scope);
  reclaim(kDissolvedAtOnce);
}

void Core::set_hidden(uint32_t stream, bool hidden) {
  streams_[stream].hidden = hidden;
  set_bit(visible_, streams_[stream].number, !hidden);
}

// The bit stays taken until it has been removed from every block.
void Core::retire(uint32_t stream) {
  Source& gone = source(stream);
  gone.retired = true;
  set_bit(visible_, gone.number, false);
  set_bit(cold_, gone.number, false);
  while (!gone.parked.empty()) drop_parked(gone);
  retired_.push_back(gone.number);
}

bool Core::reclaim(size_t limit) {
  while (!retired_.empty() && limit > 0) {
    Source& gone = *by_number_[retired_.front()];
    limit -= std::min(limit, dissolve(gone, limit));
    if (gone.num_held() > 0) continue;
    retired_.pop_front();
    destroy(gone);
  }
  if (states.worth_sweeping()) states.sweep();
  return !retired_.empty();
}

void Core::destroy(Source& source) {
  const uint32_t number = source.number;
  nodes.scopes.drop(source.scope);
  bytes_ -= sizeof(Source);
  by_number_[number].reset();
  free_numbers_.push_back(number);
}

// For a source that is no longer matched: nothing is kept exact on the way.
size_t Core::dissolve(Source& source, size_t limit) {
  size_t done = 0;
  for (int tier = 0; tier < Source::kTables; ++tier) {
    Held& held = source.tables[tier];
    for (; !held.empty() && done < limit; ++done) {
      const uint32_t at = held.end() - 1, node = held.node(at);
      held.erase(at);
      if (tier < kTiers && source.drop_twin(tier, node)) continue;
      const int bit = tier == Source::kPredicted ? kDevice : tier;
      const Status before = status(node, source), after = before & kHeldMask & ~held_in(bit);
      if (after != before) nodes.set_state(node, states.changed(nodes[node].state, source.number, after));
      nodes.prune(node);
      if (tier == Source::kPredicted) --counters.predicted;
    }
  }
  counters.residencies -= done;
  return done;
}

void Core::store(uint32_t stream, const Run& run) {
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
    const bool room = make_room(source.tables[run.tier], count);
    // Making room may have renumbered the parent, or, where memory is very short, taken it.
    if (!rooted || begin > 0) parent = nodes.find(tree, key);
    if (!room || (parent == kNone && !(rooted && begin == 0))) {
      counters.forgotten += run.count - begin;
      source.forgot = true;
      break;
    }
    hold_chunk(source, tree, &parent, run, begin, count);
    key = nodes[parent].key;
    enforce();
  }
}

void Core::hold_chunk(Source& source, uint32_t tree, uint32_t* parent, const Run& run, size_t begin, size_t count) {
  Held& held = source.tables[run.tier];
  const uint64_t *hashes = run.hashes + begin, *locals = run.locals + begin;
  uint64_t keys[kChunk];
  uint32_t node_tags[kChunk], held_tags[kChunk];
  // All slots and nodes that will be read are fetched first, in loops so short that many fetches overlap.
  for (size_t i = 0; i < count; ++i) held.prefetch_slot(held_tags[i] = held.tag(hashes[i]));
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) {
      keys[i] = rolled(keys[i - 1], locals[i]);
    } else {
      keys[i] = *parent == kNone ? locals[i] : rolled(nodes[*parent].key, locals[i]);
    }
    nodes.prefetch_slot_tagged(node_tags[i] = Nodes::tag(tree, keys[i]));
  }
  for (size_t i = 0; i < count; ++i) nodes.prefetch_tagged(node_tags[i]);
  size_t duplicates = 0;
  Status above = *parent == kNone ? kRoot : status(*parent, source);
  Step step;
  Plain plain{states, counters, step};
  for (size_t i = 0; i < count; ++i) {
    size_t node_free = 0, held_free = 0;
    uint32_t node = nodes.find_tagged(node_tags[i], tree, keys[i], &node_free);
    if (node == kNone) node = nodes.add_at(node_free, node_tags[i], tree, keys[i], *parent);
    const uint32_t at = held.find_tagged(held_tags[i], hashes[i], &held_free);
    const Node& there = nodes[node];
    if (at == kNone && step.plain && there.state == step.from && above == step.above &&
        (there.first_child == kNone || !step.gains || source.unready == 0)) {
      try {
        held.append_at(held_free, held_tags[i], hashes[i], node);
      } catch (...) {
        nodes.prune(node);
        throw;
      }
      nodes[node].state = step.to;
      plain.add(hashes[i]);
      above = step.after;
      *parent = node;
      continue;
    }
    plain.settle();
    if (at != kNone && held.node(at) == node) {
      ++duplicates;
    } else {
      if (at != kNone) {  // the engine gives the hash to other tokens
        source.doubt(hashes[i]);
        release(source, run.tier, at);
        above = *parent == kNone ? kRoot : status(*parent, source);
        // The node may have been kept for what was just released below it.
        node = nodes.find_or_add(tree, keys[i], *parent);
      }
      try {
        hold(source, run.tier, hashes[i], node, above, &step);
      } catch (...) {
        nodes.prune(node);
        throw;
      }
    }
    above = nodes[node].state == step.to ? step.after : status(node, source);
    *parent = node;
  }
  plain.settle();
  if (plain.num_blocks > 0) source.tell(run.tier, nodes.tree(tree).scope, plain.num_blocks, plain.sum);
  counters.stored += count - duplicates;
  counters.duplicates += duplicates;
}

void Core::hold(Source& source, int tier, uint64_t hash, uint32_t node, Status above, Step* step) {
  const uint32_t state = nodes[node].state;
  if (state != step->from || above != step->above) {
    const Status before = status(node, source), after = status_below(above, before | held_in(tier));
    const bool plain = (before & held_in(tier)) == 0 && unready(before) == 0 && unready(after) == 0;
    *step = {state, above, before, after, states.changed(state, source.number, after), plain,
             (before ^ after) >> kTiers != 0};
  }
  if ((step->before & held_in(tier)) == 0) {
    set_state(node, source, *step);
  } else if (tier != kDevice || !drop_prediction(source, node)) {
    source.add_twin(tier, node);
  }
  source.tables[tier].append(hash, node);
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

void Core::clear_held(Source& source, int tier, uint32_t node) {
  const Status held = status(node, source) & kHeldMask & ~held_in(tier);
  set_status(node, source, held == 0 ? Status{0} : status_above(node, source), held);
  nodes.prune(node);
}

void Core::release(Source& source, int tier, uint32_t at) {
  Held& held = source.tables[tier];
  const uint32_t node = held.node(at);
  source.take_back(tier, nodes.scope_of(node), held.hash(at));
  held.erase(at);
  --counters.residencies;
  if (source.twins.empty() || !source.drop_twin(tier, node)) clear_held(source, tier, node);
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

void Core::remove(uint32_t stream, int tier, const uint64_t* hashes, size_t count) {
  Source& source = this->source(stream);
  Held& held = source.tables[tier];
  for (size_t begin = 0; begin < count; begin += kRemovedAtOnce) {
    const size_t end = std::min(count, begin + kRemovedAtOnce);
    // Everything that removal reads is fetched before any of it is needed, as in hold_chunk.
    uint32_t tags[kRemovedAtOnce], found[kRemovedAtOnce];
    for (size_t i = begin; i < end; ++i) held.prefetch_slot(tags[i - begin] = held.tag(hashes[i]));
    for (size_t i = begin; i < end; ++i) held.prefetch_tagged(tags[i - begin]);
    for (size_t i = begin; i < end; ++i)
      if ((found[i - begin] = held.find_tagged(tags[i - begin], hashes[i])) != kNone)
        nodes.prefetch(held.node(found[i - begin]));
    for (size_t i = begin; i < end; ++i)
      if (found[i - begin] != kNone) nodes.prefetch_slot(held.node(found[i - begin]));
    for (size_t i = begin; i < end; ++i) {
      const uint32_t at = found[i - begin];
      if (at != kNone && held.holds(at)) {
        release(source, tier, at);
        ++counters.removed;
      } else if (source.parked.empty() || !source.parked.remove(hashes[i], tier)) {
        ++counters.unknown_removals;
      }
    }
  }
  held.tidy();
  if (states.worth_sweeping()) states.sweep();
}

void Core::ignore(uint32_t stream, std::optional<int64_t> group, size_t count) {
  Source& source = this->source(stream);
  if (group && source.ignored_groups.size() < Source::kMaxIgnoredGroups && !source.ignores(*group))
    source.ignored_groups.push_back(*group);
  counters.ignored_group_blocks += count;
}

size_t Core::num_parked() const {
  size_t count = 0;
  for (const auto& source : by_number_)
    if (source) count += source->parked.count();
  return count;
}

}  // namespace kvmesh::index
