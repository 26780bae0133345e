// Sets and states that exist once each.
#include "index_states.h"

#include "xxh3.h"

namespace kvmesh::index {
namespace {

constexpr int kWordBits = 64;

uint32_t hash_of(const void* data, size_t bytes, uint64_t seed) {
  return tag_of(xxh3_64(static_cast<const uint8_t*>(data), bytes, seed));
}

}  // namespace

Sets::~Sets() {
  for (uint32_t set = 1; set < end_; ++set)
    if (sets_[set] != nullptr) release(set);
}

Sets::View Sets::view(uint32_t set) const {
  if (set == kEmpty) return {nullptr, nullptr, 0};
  const Header* header = sets_[set];
  const auto* bits = reinterpret_cast<const uint64_t*>(header + 1);
  return {bits, reinterpret_cast<const uint16_t*>(bits + header->count), header->count};
}

bool Sets::contains(uint32_t set, uint32_t member) const {
  const View words = view(set);
  const uint16_t place = static_cast<uint16_t>(member / kWordBits);
  const uint16_t* found = std::lower_bound(words.places, words.places + words.count, place);
  return found != words.places + words.count && *found == place &&
         (words.bits[found - words.places] >> (member % kWordBits) & 1) != 0;
}

uint32_t Sets::changed(uint32_t set, uint32_t member, bool present) {
  const View words = view(set);
  const uint16_t place = static_cast<uint16_t>(member / kWordBits);
  const uint64_t bit = uint64_t{1} << (member % kWordBits);
  bits_.assign(words.bits, words.bits + words.count);
  places_.assign(words.places, words.places + words.count);
  const size_t at = std::lower_bound(places_.begin(), places_.end(), place) - places_.begin();
  const bool has_word = at < places_.size() && places_[at] == place;
  if (has_word ? ((bits_[at] & bit) != 0) == present : !present) return set;
  if (!has_word) {
    bits_.insert(bits_.begin() + at, bit);
    places_.insert(places_.begin() + at, place);
  } else if ((bits_[at] ^= bit) == 0) {
    bits_.erase(bits_.begin() + at);
    places_.erase(places_.begin() + at);
  }
  return interned();
}

uint32_t Sets::interned() {
  const uint32_t count = static_cast<uint32_t>(bits_.size());
  if (count == 0) return kEmpty;
  const uint32_t tag =
      hash_of(bits_.data(), count * sizeof bits_[0], hash_of(places_.data(), count * sizeof places_[0], 0));
  const uint32_t known = table_.find(tag, [&](uint32_t set) {
    const View other = view(set);
    return other.count == count && std::equal(bits_.begin(), bits_.end(), other.bits) &&
           std::equal(places_.begin(), places_.end(), other.places);
  });
  if (known != kNone) return known;
  if (!table_.has_room(1)) table_.resize(table_.grown_for(table_.count() + 1));
  const bool reused = !free_.empty();
  if (!reused) {
    if (end_ >= sets_.capacity()) sets_.set_capacity(grown(end_ + 1, end_, sizeof(Header*)));
    free_.reserve(sets_.capacity());  // so that freeing never needs memory
  }
  auto* header = static_cast<Header*>(std::malloc(bytes_of(count)));
  if (header == nullptr) throw std::bad_alloc();
  const uint32_t set = reused ? free_.back() : end_++;
  if (reused) free_.pop_back();
  *header = {tag, count};
  auto* bits = reinterpret_cast<uint64_t*>(header + 1);
  std::copy(bits_.begin(), bits_.end(), bits);
  std::copy(places_.begin(), places_.end(), reinterpret_cast<uint16_t*>(bits + count));
  sets_[set] = header;
  *account_ += bytes_of(count);
  table_.insert(tag, set);
  return set;
}

void Sets::release(uint32_t set) {
  *account_ -= bytes_of(sets_[set]->count);
  std::free(sets_[set]);
  sets_[set] = nullptr;
}

void Sets::keep(const std::vector<bool>& wanted) {
  for (uint32_t set = 1; set < end_; ++set) {
    if (wanted[set] || sets_[set] == nullptr) continue;
    table_.erase(sets_[set]->tag, set);
    release(set);
    free_.push_back(set);
  }
}

Status States::computed(uint32_t state, uint32_t source) const {
  if (state == kNobody) return 0;
  // Usually the device's set and the ready sets are one and the same, and the others empty.
  constexpr int kOrder[kSets] = {kDevice, kTiers, kTiers + 1, kTiers + 2, kHost, kDisk};
  Status status = 0;
  uint32_t last = Sets::kEmpty;
  bool in_last = false;
  for (const int which : kOrder) {
    const uint32_t set = states_[state].sets[which];
    if (set != last) in_last = sets_.contains(last = set, source);
    if (in_last && set != Sets::kEmpty) status |= static_cast<Status>(1 << which);
  }
  return status;
}

uint32_t States::changed(uint32_t state, uint32_t source, Status status) {
  const uint32_t mixed = state * 0x9E3779B1u ^ source * 0x85EBCA77u ^ status * 0xC2B2AE3Du;
  Change& cached = cache_[(mixed ^ mixed >> 15) % kCached];
  if (cached.state == state && cached.source == source && cached.status == status) return cached.result;
  State made = state == kNobody ? State{} : states_[state];
  // Mostly some of the sets are the same.
  struct { uint32_t set, changed; bool present; } last{kNone, kNone, false};
  for (int which = 0; which < kSets; ++which) {
    const uint32_t set = made.sets[which];
    const bool present = (status >> which & 1) != 0;
    if (set != last.set || present != last.present)
      last = {set, present ? sets_.with(set, source) : sets_.without(set, source), present};
    made.sets[which] = last.changed;
  }
  const uint32_t result = interned(made);
  cached = {state, source, status, result};
  return result;
}

uint32_t States::interned(const State& state) {
  if (std::all_of(state.sets, state.sets + kSets, [](uint32_t set) { return set == Sets::kEmpty; })) return kNobody;
  const uint32_t tag = hash_of(state.sets, sizeof state.sets, 0);
  const uint32_t known = table_.find(
      tag, [&](uint32_t other) { return std::equal(state.sets, state.sets + kSets, states_[other].sets); });
  if (known != kNone) return known;
  if (!table_.has_room(1)) table_.resize(table_.grown_for(table_.count() + 1));
  const bool reused = !free_.empty();
  if (!reused) {
    if (end_ >= states_.capacity()) states_.set_capacity(grown(end_ + 1, end_, sizeof(State)));
    free_.reserve(states_.capacity());
  }
  const uint32_t made = reused ? free_.back() : end_++;
  if (reused) free_.pop_back();
  states_[made] = state;
  states_[made].users = 0;
  ++unused_;
  table_.insert(tag, made);
  return made;
}

void States::sweep() {
  cache_.fill({});
  known_.fill({});
  std::vector<bool> wanted(sets_.end());
  for (uint32_t state = 1; state < end_; ++state) {
    State& entry = states_[state];
    if (entry.users == kUnallocated) continue;
    if (entry.users > 0) {
      for (const uint32_t set : entry.sets) wanted[set] = true;
      continue;
    }
    table_.erase(hash_of(entry.sets, sizeof entry.sets, 0), state);
    entry.users = kUnallocated;
    free_.push_back(state);
  }
  unused_ = 0;
  sets_.keep(wanted);
}

}  // namespace kvmesh::index
