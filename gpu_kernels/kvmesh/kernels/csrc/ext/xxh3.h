// XXH3-64 with a seed, for inputs of any length: an implementation of the published algorithm (little-endian hosts).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmesh {

uint64_t xxh3_64(const uint8_t* data, size_t size, uint64_t seed);

// Of the 16 bytes of two words: each link of a chain of hashes is one, so that its latency counts.
inline uint64_t xxh3_64_of_pair(uint64_t first, uint64_t second, uint64_t seed) {
  // Words 3 to 6 of the specification's secret.
  const uint64_t lo = first ^ ((0x1F67B3B7A4A44072 ^ 0x78E5C0CC4EE679CB) + seed);
  const uint64_t hi = second ^ ((0x2172FFCC7DD05A82 ^ 0x8E2443F7744608B8) - seed);
  const unsigned __int128 product = static_cast<unsigned __int128>(lo) * hi;
  uint64_t h = 16 + __builtin_bswap64(lo) + hi + (static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64));
  h = (h ^ h >> 37) * 0x165667919E3779F9;
  return h ^ h >> 32;
}

// The specification's 192 bytes of secret, for the page checksums' own loop over long inputs.
const uint8_t* xxh3_secret();

}  // namespace kvmesh
