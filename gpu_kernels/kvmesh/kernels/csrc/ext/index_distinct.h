// Whether the hashes of a stored event differ from each other and from their parent's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "index_table.h"

namespace kvmesh::index {

// Publishers choose the hashes: without a secret they could choose many for one place. An object is kept by callers that
// ask often.
class Distinct {
 public:
  bool operator()(const std::optional<uint64_t>& parent, const uint64_t* hashes, size_t count) {
    if (count == 1) return parent != hashes[0];
    if (count >= kNone) throw std::bad_alloc();
    // Few hashes find their place taken. They are then looked for among all.
    const unsigned bits = bits_for(kPlaces * count);
    taken_.assign(size_t{1} << bits, 0);
    uint8_t* const taken = taken_.data();
    const uint64_t secret = secret_multiplier();
    uint64_t late[kLate];
    size_t num_late = 0;
    // Without a branch, which could not be guessed.
    const auto take = [&](uint64_t hash) {
      uint8_t& place = taken[hash * secret >> (64 - bits)];
      late[num_late % kLate] = hash;
      num_late += place;
      place = 1;
    };
    if (parent) take(*parent);
    for (size_t i = 0; i < count; ++i) take(hashes[i]);
    if (num_late > kLate || num_late * count > kCompared) return all_different(parent, hashes, count);
    for (size_t i = 0; i < num_late; ++i) {
      const auto same = std::count(hashes, hashes + count, late[i]) + (parent == late[i]);
      if (same > 1) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kPlaces = 16, kLate = 16, kCompared = 4096;

  static unsigned bits_for(size_t places) {
    unsigned bits = 3;
    while (size_t{1} << bits < places) ++bits;
    return bits;
  }
  // By a table of places, four for each hash, where 0 is none; two hashes of 0 are caught by counting.
  bool all_different(const std::optional<uint64_t>& parent, const uint64_t* hashes, size_t count) {
    for (size_t i = 0; i < count; ++i)
      if (hashes[i] == parent) return false;
    const unsigned bits = bits_for(4 * count);
    table_.assign(size_t{1} << bits, 0);
    bool zero = false;
    const uint64_t secret = secret_multiplier();
    return std::all_of(hashes, hashes + count, [&](uint64_t hash) {
      if (hash == 0) return !std::exchange(zero, true);
      const uint64_t mixed = (hash ^ secret) * 0x9E3779B97F4A7C15u;
      size_t place = (mixed ^ mixed >> 32) * secret >> (64 - bits);
      for (; table_[place] != 0; place = (place + 1) & (table_.size() - 1))
        if (table_[place] == hash) return false;
      table_[place] = hash;
      return true;
    });
  }

  std::vector<uint8_t> taken_;
  std::vector<uint64_t> table_;
};

}  // namespace kvmesh::index
