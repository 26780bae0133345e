// Sources that come and go.
#include "index_core.h"

#include <algorithm>

namespace kvmesh::index {
namespace {

constexpr size_t kDissolvedAtOnce = 4096;

}  // namespace

Core::Core(size_t max_bytes) : states(&bytes_), nodes(&bytes_, states), max_bytes_(max_bytes), held_(&bytes_) {
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
  by_number_[number] = std::make_unique<Source>(&bytes_, held_, number, stream, scope);
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
    held_.tidy();
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
