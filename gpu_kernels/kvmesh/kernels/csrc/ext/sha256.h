// SHA-256 of short messages, with the CPU's SHA instructions where it has them (chosen once, at run time).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmesh {

constexpr size_t kSha256Bytes = 32;

// Name of the code path in use: "sha-ni" or "portable".
const char* sha256_implementation();

// Forces the portable path (tests compare both); false restores the choice by CPU.
void sha256_force_portable(bool portable);

// out[32] = SHA-256(prefix[32] || data[size]).
void sha256_prefixed(const uint8_t* prefix, const uint8_t* data, size_t size, uint8_t* out);

}  // namespace kvmesh
