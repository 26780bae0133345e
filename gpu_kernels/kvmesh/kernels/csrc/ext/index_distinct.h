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
    // Nothing here is a matter of what the hashes are, so that nothing is guessed wrongly: each takes its place, or, where
    // that has been taken, is looked at later. Of two equal ones the second has the first in its place, or both are late.
    const unsigned bits = bits_for(8 * count);
    taken_.assign(size_t{1} << bits, 0);
    if (late_.size() < count) late_.resize(count);
    const uint64_t secret = secret_multiplier();
    size_t num_late = 0;
    bool equal = false;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t hash = hashes[i];
      uint32_t& by = taken_[hash * secret >> (64 - bits)];
      late_[num_late] = hash;
      const bool late = by != 0;
      by = late ? by : static_cast<uint32_t>(i + 1);
      equal |= late & (hashes[by - 1] == hash);
      num_late += late;
    }
    if (parent)
      for (size_t i = 0; i < count; ++i) equal |= hashes[i] == *parent;
    return !equal && (num_late < 2 || all_different(late_.data(), num_late));
  }

 private:
  static unsigned bits_for(size_t places) {
    unsigned bits = 3;
    while (size_t{1} << bits < places) ++bits;
    return bits;
  }
  // By a table of places, four for each hash, where 0 is none; two hashes of 0 are caught by counting.
  bool all_different(const uint64_t* hashes, size_t count) {
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

  std::vector<uint32_t> taken_;  // the number of the hash whose place it is, from 1
  std::vector<uint64_t> late_, table_;
};

}  // namespace kvmesh::index
