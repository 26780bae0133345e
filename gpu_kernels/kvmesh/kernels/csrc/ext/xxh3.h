// XXH3-64 with a seed, for inputs of any length: an implementation of the published algorithm (little-endian hosts).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmesh {

uint64_t xxh3_64(const uint8_t* data, size_t size, uint64_t seed);

// The specification's 192 bytes of secret, for the page checksums' own loop over long inputs.
const uint8_t* xxh3_secret();

}  // namespace kvmesh
