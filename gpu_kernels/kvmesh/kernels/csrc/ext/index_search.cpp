// Bisection over what is ready, which is closed under "parent of".
#include "index_search.h"

namespace kvmesh::index {
namespace {

// The node with this key. Blocks that were stored together lie next to each other, so it is first looked for at the same
// distance from a block before it as in the prompt.
uint32_t find_near(const Nodes& nodes, uint32_t tree, uint64_t key, uint32_t node, size_t distance) {
  const size_t guess = node + distance;
  if (guess < nodes.end()) {
    const Node& there = nodes[static_cast<uint32_t>(guess)];
    if (there.key == key && there.tree() == tree) return static_cast<uint32_t>(guess);
  }
  return nodes.find(tree, key);
}

}  // namespace

void Search::begin() {
  for (const Match& match : found_) entry_of_[match.number] = kNone;
  found_.clear();
}

void Search::look(uint32_t tree, const uint64_t* keys, size_t count) {
  const std::vector<uint64_t>&visible = core_.visible(), &cold = core_.cold();
  reach(tree, keys, count, kDevice, visible);
  bool any = false;
  among_.resize(visible.size());
  for (size_t word = 0; word < visible.size(); ++word) any |= (among_[word] = visible[word] & cold[word]) != 0;
  if (!any) return;
  reach(tree, keys, count, kHost, among_);
  reach(tree, keys, count, kDisk, among_);
}

const std::vector<Match>& Search::finish() {
  uint64_t best = 0;
  for (Match& match : found_) {
    for (int tier = 1; tier < kTiers; ++tier) match.tokens[tier] = std::max(match.tokens[tier], match.tokens[tier - 1]);
    best = std::max(best, match.tokens[kTiers - 1]);
  }
  ++core_.counters.matches;
  core_.counters.matched_tokens += best;
  return found_;
}

void Search::reach(uint32_t tree, const uint64_t* keys, size_t count, int tier, const std::vector<uint64_t>& among) {
  uint32_t last = count == 0 ? kNone : core_.nodes.find(tree, keys[0]);
  if (last == kNone) return;
  const uint64_t block_size = core_.nodes.tree(tree).cut.block_size;
  keep_ready(last, tier, &among);
  size_t end = 0;
  while (!words_.empty()) {
    // The last block that all of them have: first try the prompt's end, then halve.
    size_t low = end, high = count;
    for (size_t probe = count - 1; high - low > 1; probe = (low + high) / 2) {
      const uint32_t node = find_near(core_.nodes, tree, keys[probe], last, probe - low);
      if (node != kNone && all_ready(node, tier)) {
        low = probe;
        last = node;
      } else {
        high = probe;
      }
    }
    end = low + 1;
    core_.nodes[last].set_asked(true);
    const uint32_t further = end < count ? find_near(core_.nodes, tree, keys[end], last, 1) : kNone;
    rest_bits_ = bits_;
    rest_words_ = words_;
    keep_ready(further, tier, nullptr);
    for (size_t i = 0, kept = 0; i < rest_words_.size(); ++i) {
      uint64_t ended = rest_bits_[i];
      if (kept < words_.size() && words_[kept] == rest_words_[i]) ended &= ~bits_[kept++];
      note(ended, rest_words_[i], tier, end * block_size);
    }
    last = further;
  }
}

bool Search::all_ready(uint32_t node, int tier) {
  const Sets::View ready = core_.states.ready(core_.nodes[node].state, tier);
  size_t at = 0;
  for (size_t i = 0; i < words_.size(); ++i) {
    while (at < ready.count && ready.places[at] < words_[i]) ++at;
    if (at == ready.count || ready.places[at] != words_[i] || (bits_[i] & ~ready.bits[at]) != 0) return false;
  }
  return true;
}

// Goes on with those that are ready at the node (nobody at kNone), of the mask `among` or else of those followed.
void Search::keep_ready(uint32_t node, int tier, const std::vector<uint64_t>* among) {
  const Sets::View ready =
      node == kNone ? Sets::View{nullptr, nullptr, 0} : core_.states.ready(core_.nodes[node].state, tier);
  bits_.clear();
  words_.clear();
  size_t followed = 0;
  for (size_t i = 0; i < ready.count; ++i) {
    uint64_t bits = 0;
    if (among != nullptr) {
      bits = (*among)[ready.places[i]];
    } else {
      while (followed < rest_words_.size() && rest_words_[followed] < ready.places[i]) ++followed;
      if (followed < rest_words_.size() && rest_words_[followed] == ready.places[i]) bits = rest_bits_[followed];
    }
    if ((bits &= ready.bits[i]) == 0) continue;
    bits_.push_back(bits);
    words_.push_back(ready.places[i]);
  }
}

void Search::note(uint64_t bits, size_t word, int tier, uint64_t tokens) {
  while (bits != 0) {
    const uint32_t number = static_cast<uint32_t>(word * 64 + __builtin_ctzll(bits));
    bits &= bits - 1;
    if (number >= entry_of_.size()) entry_of_.resize(number + 1, kNone);
    if (entry_of_[number] == kNone) {
      found_.push_back({number, {}});
      entry_of_[number] = static_cast<uint32_t>(found_.size() - 1);
    }
    uint64_t& most = found_[entry_of_[number]].tokens[tier];
    most = std::max(most, tokens);
  }
}

}  // namespace kvmesh::index
