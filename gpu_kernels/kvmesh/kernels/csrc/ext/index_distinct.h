// Whether the hashes of a stored event differ from each other and from their parent's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "index_table.h"

namespace kvmesh::index {

// By a table of places, four for each hash, where 0 is none; two hashes of 0 are caught by counting. Publishers choose
// the hashes: without a secret they could choose many for one place. `scratch` is for callers that ask often.
inline bool all_different(const std::optional<uint64_t>& parent, const uint64_t* hashes, size_t count,
                          std::vector<uint64_t>* scratch) {
  if (count == 1) return parent != hashes[0];
  size_t bits = 3;
  while (size_t{1} << bits < 4 * count) ++bits;
  std::vector<uint64_t>& table = *scratch;
  table.assign(size_t{1} << bits, 0);
  bool zero = false;
  const uint64_t secret = secret_multiplier();
  const auto add = [&](uint64_t hash) {
    if (hash == 0) return !std::exchange(zero, true);
    const uint64_t mixed = (hash ^ secret) * 0x9E3779B97F4A7C15u;
    size_t place = (mixed ^ mixed >> 32) * secret >> (64 - bits);
    for (; table[place] != 0; place = (place + 1) & (table.size() - 1))
      if (table[place] == hash) return false;
    table[place] = hash;
    return true;
  };
  return (!parent || add(*parent)) && std::all_of(hashes, hashes + count, add);
}

}  // namespace kvmesh::index
