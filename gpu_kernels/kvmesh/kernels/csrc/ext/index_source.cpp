// One source: parked runs, twins, digests.
#include "index_source.h"

#include <algorithm>

namespace kvmesh::index {

void Parked::park(ParkedRun&& run) {
  if (order_.size() >= 4 * kMaxRuns) {
    order_.erase(std::remove_if(order_.begin(), order_.end(),
                                [&](uint64_t parent) { return by_parent_.count(parent) == 0; }),
                 order_.end());
  }
  order_.push_back(run.parent);
  auto& runs = by_parent_[run.parent];
  runs.push_back(std::make_unique<ParkedRun>(std::move(run)));
  ++count_;
  for (const uint64_t hash : runs.back()->hashes) by_hash_.emplace(hash, runs.back().get());
  for (const uint64_t hash : runs.back()->removed) forget(hash, *runs.back());
}

std::vector<ParkedRun> Parked::adopt(uint64_t parent) {
  const auto found = by_parent_.find(parent);
  if (found == by_parent_.end()) return {};
  std::vector<ParkedRun> runs;
  for (const auto& run : found->second) {
    for (const uint64_t hash : run->hashes) forget(hash, *run);
    runs.push_back(std::move(*run));
  }
  by_parent_.erase(found);
  count_ -= runs.size();
  if (count_ == 0) order_.clear();
  return runs;
}

std::vector<ParkedRun> Parked::oldest() {
  while (!order_.empty()) {
    const uint64_t parent = order_.front();
    order_.pop_front();
    std::vector<ParkedRun> runs = adopt(parent);
    if (!runs.empty()) return runs;
  }
  return {};
}

bool Parked::remove(uint64_t hash, int tier) {
  bool found = false;
  auto [at, end] = by_hash_.equal_range(hash);
  while (at != end) {
    ParkedRun& run = *at->second;
    if (run.tier != tier) {
      ++at;
      continue;
    }
    run.removed.push_back(hash);
    at = by_hash_.erase(at);
    found = true;
  }
  return found;
}

void Parked::forget(uint64_t hash, const ParkedRun& run) {
  const auto [begin, end] = by_hash_.equal_range(hash);
  const auto found = std::find_if(begin, end, [&](const auto& entry) { return entry.second == &run; });
  if (found != end) by_hash_.erase(found);
}

uint32_t Source::find(uint64_t hash) const {
  if (doubts_all || (!doubtful.empty() && doubtful.count(hash) > 0)) return kNone;
  uint32_t node = kNone;
  for (int tier = 0; tier < kTiers; ++tier) {
    if (tables[tier].empty()) continue;
    const uint32_t at = tables[tier].find(hash);
    if (at == kNone) continue;
    if (node != kNone && tables[tier].node(at) != node) return kNone;
    node = tables[tier].node(at);
  }
  return node;
}

void Source::doubt(uint64_t hash) {
  if (doubts_all) return;
  if (doubtful.size() < kMaxDoubtful) {
    doubtful.insert(hash);
    return;
  }
  doubtful.clear();
  doubts_all = true;
}

bool Source::drop_twin(int tier, uint32_t node) {
  const auto found = twins.find(twin_key(tier, node));
  if (found == twins.end()) return false;
  if (--found->second == 0) twins.erase(found);
  return true;
}

Digest& Source::digest(uint64_t key) {
  if (last_digest_ == nullptr || last_digest_key_ != key) {
    last_digest_ = &digests[key];
    last_digest_key_ = key;
  }
  return *last_digest_;
}

void Source::tell(int tier, uint32_t scope, uint64_t num_blocks, uint64_t sum) {
  Digest& digest = this->digest(digest_key(tier, scope));
  digest.num_blocks += num_blocks;
  digest.sum += sum;
}

void Source::take_back(int tier, uint32_t scope, uint64_t num_blocks, uint64_t sum) {
  Digest& digest = this->digest(digest_key(tier, scope));
  digest.num_blocks -= num_blocks;
  digest.sum -= sum;
  if (digest.num_blocks > 0) return;
  digests.erase(last_digest_key_);
  last_digest_ = nullptr;
}

bool Source::ignores(int64_t group) const {
  return std::find(ignored_groups.begin(), ignored_groups.end(), group) != ignored_groups.end();
}

void Source::rename(const std::vector<uint32_t>& moved) {
  for (Held& held : tables) held.rename(moved);
  Map<uint32_t> renamed(twins.get_allocator());
  for (const auto& [key, count] : twins)
    renamed.emplace(twin_key(static_cast<int>(key >> 32), moved[static_cast<uint32_t>(key)]), count);
  twins.swap(renamed);
  // The nodes are the keys of the predicted blocks.
  Held& predicted = tables[kPredicted];
  std::vector<Held::Entry> entries;
  std::vector<uint32_t> positions;
  predicted.oldest(predicted.count(), positions);
  for (const uint32_t at : positions) {
    const uint32_t node = predicted.node(at);
    entries.push_back({(predicted.hash(at) & ~uint64_t{UINT32_MAX}) | node, node});
  }
  for (auto at = positions.rbegin(); at != positions.rend(); ++at) predicted.erase(*at);
  predicted.put_back(entries);
}

}  // namespace kvmesh::index
