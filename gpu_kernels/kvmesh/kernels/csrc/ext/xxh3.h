// XXH3-64 with a seed, for inputs of any length: an implementation of the published algorithm (little-endian hosts).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmesh {

uint64_t xxh3_64(const uint8_t* data, size_t size, uint64_t seed);

}  // namespace kvmesh
