// What ends by itself: predicted blocks when their time is over, and the oldest blocks where memory is short.
#include <algorithm>

#include "index_core.h"

namespace kvmesh::index {
namespace {

constexpr size_t kForgetAtOnce = 1024;  // blocks looked at in one go; a millisecond
// At most this part of what a source holds is looked at in one go: recent blocks must not be taken for old ones.
constexpr size_t kForgetShare = 16;
constexpr size_t kParkedShare = 8;  // parked runs may have this part of the memory before they go first
constexpr size_t kReclaimAtOnce = 4096;

uint32_t due_of(uint64_t entry) { return static_cast<uint32_t>(entry >> 32); }
uint64_t prediction(uint32_t due, uint32_t node) { return static_cast<uint64_t>(due) << 32 | node; }

}  // namespace

void Core::predict(uint32_t stream, uint32_t scope, Cut cut, const uint64_t* keys, size_t count, uint32_t due) {
  Source& source = this->source(stream);
  Held& predicted = source.tables[Source::kPredicted];
  const uint32_t tree = nodes.use_tree(scope, cut);
  for (size_t i = 0; i < count; ++i) {
    const bool room = make_room(predicted, 1);
    const uint32_t parent = i == 0 ? kNone : nodes.find(tree, keys[i - 1]);
    if (!room || (i > 0 && parent == kNone)) {
      counters.forgotten += count - i;
      break;
    }
    const uint32_t node = nodes.find_or_add(tree, keys[i], parent);
    const Status before = status(node, source);
    if ((before & held_in(kDevice)) != 0) {
      const uint32_t at = predicted.find(node);
      if (at == kNone) continue;  // it is really there
      const uint32_t until = std::max(due, due_of(predicted.hash(at)));
      predicted.erase(at);
      predicted.append(prediction(until, node), node);  // asked for again: not among the oldest any more
      continue;
    }
    hold_predicted(source, node, due);
  }
  nodes.drop_tree(tree);
  predicted.tidy();
  enforce();
}

void Core::hold_predicted(Source& source, uint32_t node, uint32_t due) {
  plan_expiry(due, source.stream, node);
  const Status held = (status(node, source) & kHeldMask) | held_in(kDevice);
  source.tables[Source::kPredicted].append(prediction(due, node), node);  // first, as in hold
  set_status(node, source, status_above(node, source), held);
  ++counters.residencies;
  ++counters.predicted;
}

// One plan for each predicted block, and now and then one for a block that is so no more.
void Core::plan_expiry(uint32_t due, uint32_t stream, uint32_t node) {
  if (due_.size() > 2 * counters.predicted + 1024) {
    bytes_ -= due_.size() * sizeof(Due);
    due_.clear();
    for (const auto& source : by_number_) {
      if (!source || source->retired) continue;
      Held& predicted = source->tables[Source::kPredicted];
      predicted.oldest(predicted.count(), positions_);
      for (const uint32_t at : positions_)
        due_.push_back({due_of(predicted.hash(at)), source->stream, predicted.node(at)});
    }
    std::make_heap(due_.begin(), due_.end());
    bytes_ += due_.size() * sizeof(Due);
  }
  due_.push_back({due, stream, node});
  std::push_heap(due_.begin(), due_.end());
  bytes_ += sizeof(Due);
}

// Forgets that a block is predicted, if it is; its holding is somebody else's then.
bool Core::drop_prediction(Source& source, uint32_t node) {
  Held& predicted = source.tables[Source::kPredicted];
  const uint32_t at = predicted.find(node);
  if (at == kNone) return false;
  predicted.erase(at);
  --counters.residencies;
  --counters.predicted;
  return true;
}

size_t Core::expire(uint32_t now) {
  size_t expired = 0;
  while (!due_.empty() && due_.front().tick <= now) {
    std::pop_heap(due_.begin(), due_.end());
    const Due due = due_.back();
    due_.pop_back();
    bytes_ -= sizeof(Due);
    // It may have become real, been forgotten, or its source may be gone: the entry says what is so.
    if (!known(due.stream)) continue;
    Source& source = this->source(due.stream);
    Held& predicted = source.tables[Source::kPredicted];
    const uint32_t at = predicted.find(due.node);
    if (at == kNone) continue;
    const uint32_t tick = due_of(predicted.hash(at));
    if (tick > now) {  // predicted again since
      plan_expiry(tick, due.stream, due.node);
      continue;
    }
    drop_prediction(source, due.node);
    clear_held(source, kDevice, due.node);
    predicted.tidy();
    ++expired;
  }
  counters.expired += expired;
  if (states.worth_sweeping()) states.sweep();
  return expired;
}

bool Core::make_room(Held& held, size_t count) {
  while (true) {
    const size_t more = nodes.growth(count) + held.growth(count);
    if (more == 0 || bytes_ + more <= max_bytes_) {
      nodes.reserve(count);
      held.reserve(count);
      return true;
    }
    if (!shed()) return false;
  }
}

void Core::enforce() {
  if (states.worth_sweeping()) states.sweep();
  while (bytes_ > max_bytes_ && shed()) {
  }
}

// Gives something up for memory; false when there is nothing left. Parked runs of a source that is not understood go
// first, and last what remains of the others.
bool Core::shed() {
  ++sheds_;
  if (reclaimable()) {
    reclaim(kReclaimAtOnce);
    return true;
  }
  if (nodes.worth_compacting()) {
    compact();
    return true;
  }
  if (parked_bytes_ <= max_bytes_ / kParkedShare && forget_oldest()) return true;
  for (const auto& source : by_number_) {
    if (!source || source->parked.empty()) continue;
    drop_parked(*source);
    return true;
  }
  return forget_oldest();
}

// Looks at the oldest blocks of the largest table and forgets those that nobody asked for; false when there are none.
// Blocks with others below them are spared, those in use get another round; both become the newest.
bool Core::forget_oldest() {
  Source* source = nullptr;
  int table = 0;
  size_t most = 0;
  for (const auto& other : by_number_) {
    for (int i = 0; other && !other->retired && i < Source::kTables; ++i) {
      if (other->tables[i].count() <= most) continue;
      most = other->tables[i].count();
      source = other.get();
      table = i;
    }
  }
  if (source == nullptr) return false;
  Held& held = source->tables[table];
  held.oldest(std::clamp(most / kForgetShare, size_t{1}, kForgetAtOnce), positions_);
  // Those that are spared stay where they are until nothing can fail any more.
  size_t spared = positions_.size();
  spared_.clear();
  spared_.reserve(positions_.size());
  for (auto at = positions_.rbegin(); at != positions_.rend(); ++at) {  // children before their parents
    const uint32_t node = held.node(*at), parent = nodes[node].parent;
    const bool asked = nodes[node].asked();
    // Where blocks below are held in other tables only, none would ever go: after three rounds in vain, any may.
    const bool spare = asked || (source->spared[table] <= 3 * most + kForgetAtOnce && holds_below(*source, node));
    if (asked && parent != kNone) nodes[parent].set_asked(true);
    nodes[node].set_asked(false);
    if (spare) {
      ++source->spared[table];
      positions_[--spared] = *at;
      continue;
    }
    source->spared[table] = 0;
    ++counters.forgotten;
    if (table == Source::kPredicted) {
      drop_prediction(*source, node);
      clear_held(*source, kDevice, node);
    } else {
      release(*source, table, *at);
      source->forgot = true;
    }
  }
  for (size_t i = spared; i < positions_.size(); ++i) spared_.push_back({held.hash(positions_[i]), held.node(positions_[i])});
  for (size_t i = positions_.size(); i-- > spared;) held.erase(positions_[i]);
  held.put_back(spared_);
  held.trim();
  return true;
}

bool Core::holds_below(const Source& source, uint32_t node) const {
  for (uint32_t child = nodes[node].first_child; child != kNone; child = nodes[child].next)
    if ((status(child, source) & kHeldMask) != 0) return true;
  return false;
}

void Core::compact() {
  const std::vector<uint32_t> moved = nodes.compact();
  for (const auto& source : by_number_)
    if (source) source->rename(moved);
  size_t kept = 0;
  for (const Due& due : due_) {
    const uint32_t node = due.node < moved.size() ? moved[due.node] : kNone;
    if (node != kNone) due_[kept++] = {due.tick, due.stream, node};
  }
  bytes_ -= (due_.size() - kept) * sizeof(Due);
  due_.resize(kept);
  std::make_heap(due_.begin(), due_.end());
}

}  // namespace kvmesh::index
