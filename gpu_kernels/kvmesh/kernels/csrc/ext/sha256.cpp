// SHA-256 (FIPS 180-4), portable and with x86 SHA instructions.
#include "sha256.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvmesh {
namespace {

constexpr size_t kBlockBytes = 64;

constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(64) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Compress = void (*)(uint32_t* state, const uint8_t* data, size_t blocks);

inline uint32_t rotr(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

inline uint32_t load_be32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return __builtin_bswap32(x);
}

void compress_portable(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += kBlockBytes) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = load_be32(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
      const uint32_t t1 =
          h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t t2 =
          (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

#if defined(__x86_64__)

__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(uint32_t* state, const uint8_t* data,
                                                                 size_t blocks) {
  const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  // The instructions want the state as (A, B, E, F) and (C, D, G, H).
  const __m128i dcba = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i*)state), 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i*)(state + 4)), 0x1B);
  __m128i abef = _mm_alignr_epi8(dcba, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, dcba, 0xF0);
  for (; blocks > 0; --blocks, data += kBlockBytes) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(data + 16 * i)), byte_swap);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i now = w[i & 3];
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128((const __m128i*)(kRound + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
      if (i < 12) {
        // Words 4i+16 .. 4i+19 of the schedule take the place of words 4i .. 4i+3.
        const __m128i next1 = w[(i + 1) & 3], next2 = w[(i + 2) & 3], next3 = w[(i + 3) & 3];
        const __m128i partial =
            _mm_add_epi32(_mm_sha256msg1_epu32(now, next1), _mm_alignr_epi8(next3, next2, 4));
        w[i & 3] = _mm_sha256msg2_epu32(partial, next3);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128((__m128i*)state, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128((__m128i*)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha_ni() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & (1u << 29))) return false;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_SSE4_1) && (ecx & bit_SSSE3);
}

Compress best() { return has_sha_ni() ? compress_sha_ni : compress_portable; }

#else

Compress best() { return compress_portable; }

#endif

Compress g_compress = best();

}  // namespace

const char* sha256_implementation() { return g_compress == compress_portable ? "portable" : "sha-ni"; }

void sha256_force_portable(bool portable) { g_compress = portable ? compress_portable : best(); }

void sha256_prefixed(const uint8_t* prefix, const uint8_t* data, size_t size, uint8_t* out) {
  uint32_t state[8];
  std::memcpy(state, kInitial, sizeof state);
  const uint64_t total_bits = (uint64_t{kSha256Bytes} + size) * 8;
  uint8_t buffer[2 * kBlockBytes];
  std::memcpy(buffer, prefix, kSha256Bytes);
  size_t filled = kSha256Bytes;
  const size_t head = size < kBlockBytes - filled ? size : kBlockBytes - filled;
  std::memcpy(buffer + filled, data, head);
  filled += head;
  data += head;
  size -= head;
  if (filled == kBlockBytes) {
    g_compress(state, buffer, 1);
    const size_t whole = size / kBlockBytes;
    g_compress(state, data, whole);
    data += whole * kBlockBytes;
    filled = size - whole * kBlockBytes;
    std::memcpy(buffer, data, filled);
  }
  buffer[filled++] = 0x80;
  const size_t padded = filled + 8 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  std::memset(buffer + filled, 0, padded - filled - 8);
  const uint64_t length = __builtin_bswap64(total_bits);
  std::memcpy(buffer + padded - 8, &length, 8);
  g_compress(state, buffer, padded / kBlockBytes);
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(out + 4 * i, &word, 4);
  }
}

}  // namespace kvmesh
