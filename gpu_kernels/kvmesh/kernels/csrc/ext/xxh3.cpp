// XXH3-64: one routine for each length class of the specification.
#include "xxh3.h"

#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "keys are defined over little-endian words");

namespace kvmesh {
namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5;

constexpr size_t kSecretBytes = 192;
constexpr size_t kStripeBytes = 64;
constexpr size_t kStripesPerBlock = (kSecretBytes - kStripeBytes) / 8;
constexpr size_t kBlockBytes = kStripesPerBlock * kStripeBytes;

constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

inline uint32_t read32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

inline uint64_t read64(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}

inline uint64_t rotl(uint64_t x, int n) { return (x << n) | (x >> (64 - n)); }

inline uint64_t fold_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t avalanche(uint64_t h) {
  h ^= h >> 37;
  h *= 0x165667919E3779F9;
  return h ^ (h >> 32);
}

inline uint64_t avalanche_xxh64(uint64_t h) {
  h ^= h >> 33;
  h *= kPrime64_2;
  h ^= h >> 29;
  h *= kPrime64_3;
  return h ^ (h >> 32);
}

inline uint64_t mix16(const uint8_t* in, const uint8_t* secret, uint64_t seed) {
  return fold_product(read64(in) ^ (read64(secret) + seed), read64(in + 8) ^ (read64(secret + 8) - seed));
}

uint64_t hash_0_to_16(const uint8_t* in, size_t size, uint64_t seed) {
  if (size > 8) {
    const uint64_t lo = read64(in) ^ ((read64(kSecret + 24) ^ read64(kSecret + 32)) + seed);
    const uint64_t hi = read64(in + size - 8) ^ ((read64(kSecret + 40) ^ read64(kSecret + 48)) - seed);
    return avalanche(size + __builtin_bswap64(lo) + hi + fold_product(lo, hi));
  }
  if (size >= 4) {
    seed ^= static_cast<uint64_t>(__builtin_bswap32(static_cast<uint32_t>(seed))) << 32;
    const uint64_t flip = (read64(kSecret + 8) ^ read64(kSecret + 16)) - seed;
    uint64_t h = (read32(in + size - 4) + (static_cast<uint64_t>(read32(in)) << 32)) ^ flip;
    h ^= rotl(h, 49) ^ rotl(h, 24);
    h *= 0x9FB21C651E98DF25;
    h ^= (h >> 35) + size;
    h *= 0x9FB21C651E98DF25;
    return h ^ (h >> 28);
  }
  if (size > 0) {
    const uint32_t combined = (static_cast<uint32_t>(in[0]) << 16) | (static_cast<uint32_t>(in[size >> 1]) << 24) |
                              in[size - 1] | (static_cast<uint32_t>(size) << 8);
    return avalanche_xxh64(combined ^ ((read32(kSecret) ^ read32(kSecret + 4)) + seed));
  }
  return avalanche_xxh64(seed ^ read64(kSecret + 56) ^ read64(kSecret + 64));
}

uint64_t hash_17_to_128(const uint8_t* in, size_t size, uint64_t seed) {
  uint64_t acc = size * kPrime64_1;
  // Pairs of 16 bytes from both ends towards the middle.
  for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
    acc += mix16(in + 16 * i, kSecret + 32 * i, seed);
    acc += mix16(in + size - 16 * (i + 1), kSecret + 32 * i + 16, seed);
  }
  return avalanche(acc);
}

uint64_t hash_129_to_240(const uint8_t* in, size_t size, uint64_t seed) {
  uint64_t acc = size * kPrime64_1;
  for (size_t i = 0; i < 8; ++i) acc += mix16(in + 16 * i, kSecret + 16 * i, seed);
  acc = avalanche(acc);
  for (size_t i = 8; i < size / 16; ++i) acc += mix16(in + 16 * i, kSecret + 16 * (i - 8) + 3, seed);
  return avalanche(acc + mix16(in + size - 16, kSecret + 136 - 17, seed));
}

inline void accumulate(uint64_t* acc, const uint8_t* in, const uint8_t* secret) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t value = read64(in + 8 * i);
    const uint64_t key = value ^ read64(secret + 8 * i);
    acc[i ^ 1] += value;
    acc[i] += (key & 0xFFFFFFFF) * (key >> 32);
  }
}

uint64_t hash_long(const uint8_t* in, size_t size, uint64_t seed) {
  uint8_t secret[kSecretBytes];
  for (size_t i = 0; i < kSecretBytes; i += 16) {
    const uint64_t lo = read64(kSecret + i) + seed, hi = read64(kSecret + i + 8) - seed;
    std::memcpy(secret + i, &lo, 8);
    std::memcpy(secret + i + 8, &hi, 8);
  }
  uint64_t acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const size_t blocks = (size - 1) / kBlockBytes;
  for (size_t b = 0; b < blocks; ++b) {
    for (size_t s = 0; s < kStripesPerBlock; ++s) {
      accumulate(acc, in + b * kBlockBytes + s * kStripeBytes, secret + 8 * s);
    }
    for (int i = 0; i < 8; ++i) {
      acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(secret + kSecretBytes - kStripeBytes + 8 * i)) * kPrime32_1;
    }
  }
  const size_t stripes = (size - 1 - blocks * kBlockBytes) / kStripeBytes;
  for (size_t s = 0; s < stripes; ++s) accumulate(acc, in + blocks * kBlockBytes + s * kStripeBytes, secret + 8 * s);
  accumulate(acc, in + size - kStripeBytes, secret + kSecretBytes - kStripeBytes - 7);
  uint64_t h = size * kPrime64_1;
  for (int i = 0; i < 4; ++i) {
    h += fold_product(acc[2 * i] ^ read64(secret + 11 + 16 * i), acc[2 * i + 1] ^ read64(secret + 19 + 16 * i));
  }
  return avalanche(h);
}

}  // namespace

uint64_t xxh3_64(const uint8_t* data, size_t size, uint64_t seed) {
  if (size <= 16) return hash_0_to_16(data, size, seed);
  if (size <= 128) return hash_17_to_128(data, size, seed);
  if (size <= 240) return hash_129_to_240(data, size, seed);
  return hash_long(data, size, seed);
}

const uint8_t* xxh3_secret() { return kSecret; }

}  // namespace kvmesh
