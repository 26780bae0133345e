// XXH3-64 (seed 0) of pages, its loop over 64-byte stripes in vectors, alone or while copying the pages. Several pages
// are walked side by side: hardware prefetches within one page of memory only, and their misses overlap. Compiled once
// per level.
#include "../ext/xxh3.h"
#include "kernels.h"
#include "simd.h"

KVM_BEGIN
namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5;

constexpr size_t kShort = 240;  // up to here the specification has other, scalar routines
constexpr size_t kSecretBytes = 192, kStripe = 64;
constexpr size_t kStripesPerBlock = (kSecretBytes - kStripe) / 8, kBlock = kStripesPerBlock * kStripe;
constexpr size_t kPrefetch = 2048;

typedef uint64_t VLong __attribute__((vector_size(KVM_LANES * 4)));
constexpr int kParts = int(kStripe / sizeof(VLong));
struct Accumulators { VLong part[kParts]; };

// Products of the low 32 bits of each lane.
KVM_INLINE VLong multiply_low(VLong a, VLong b) {
#if defined(__AVX512F__)
  return (VLong)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VLong)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (VLong)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

KVM_INLINE VLong swap_pairs(VLong v) {
#if defined(__AVX512F__)
  return (VLong)_mm512_shuffle_epi32((__m512i)v, _MM_PERM_BADC);
#elif defined(__AVX2__)
  return (VLong)_mm256_shuffle_epi32((__m256i)v, 0x4e);
#else
  return __builtin_shuffle(v, VLong{1, 0});
#endif
}

// What happens to the bytes besides being summed: nothing.
struct OnlySum {
  KVM_INLINE void keep(const uint8_t*, VLong) const {}
  // Deals with the last 1..64 bytes; returns where they, and those before them, are to be read.
  KVM_INLINE const uint8_t* keep_last(const uint8_t* from, size_t) const { return from; }
};

// They are copied from one register to both: the sum is that of the copy, whatever happens to the source meanwhile.
// Streaming writes pass the caches by, and need an aligned destination.
template <bool kStream>
struct Copy {
  ptrdiff_t shift;  // from a byte of the source to its copy

  KVM_INLINE void keep(const uint8_t* from, VLong value) const {
    uint8_t* to = const_cast<uint8_t*>(from) + shift;
    kStream ? store_past_caches(to, value) : store_bits(to, value);
  }
  KVM_INLINE const uint8_t* keep_last(const uint8_t* from, size_t bytes) const {
    uint8_t* to = const_cast<uint8_t*>(from) + shift;
    memcpy(to, from, bytes);
    return to;
  }
};

template <class Keep>
KVM_INLINE void accumulate(Accumulators& acc, const uint8_t* data, const uint8_t* secret, Keep also) {
  for (int p = 0; p < kParts; ++p) {
    VLong value = load_bits<VLong>(data + p * sizeof(VLong));
    also.keep(data + p * sizeof(VLong), value);
    VLong key = value ^ load_bits<VLong>(secret + p * sizeof(VLong));
    acc.part[p] += swap_pairs(value) + multiply_low(key, key >> 32);
  }
}

KVM_INLINE void scramble(Accumulators& acc, const uint8_t* secret) {
  const VLong prime = kPrime32_1 - VLong{};
  for (int p = 0; p < kParts; ++p) {
    VLong v = acc.part[p] ^ (acc.part[p] >> 47) ^ load_bits<VLong>(secret + p * sizeof(VLong));
    acc.part[p] = multiply_low(v, prime) + (multiply_low(v >> 32, prime) << 32);
  }
}

KVM_INLINE uint64_t read64(const uint8_t* p) { return load_bits<uint64_t>(p); }

KVM_INLINE uint64_t fold_product(uint64_t a, uint64_t b) {
  unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

// What is left of the accumulators once every byte has been seen.
KVM_INLINE uint64_t finish(const Accumulators& acc, size_t bytes) {
  const uint8_t* secret = xxh3_secret();
  uint64_t lanes[8];
  store_bits(lanes, acc);
  uint64_t hash = bytes * kPrime64_1;
  for (int i = 0; i < 4; ++i)
    hash += fold_product(lanes[2 * i] ^ read64(secret + 11 + 16 * i), lanes[2 * i + 1] ^ read64(secret + 19 + 16 * i));
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9;
  return hash ^ (hash >> 32);
}

// Sums kPages pages of more than kShort bytes side by side.
template <int kPages, class Keep>
KVM_INLINE void sum_long(uint64_t* sums, const uint8_t* const* pages, size_t bytes, const Keep* also) {
  const uint8_t* secret = xxh3_secret();
  const uint64_t start[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                             kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  Accumulators acc[kPages];
  for (int i = 0; i < kPages; ++i) acc[i] = load_bits<Accumulators>(start);
  size_t at = 0, blocks = (bytes - 1) / kBlock;
  for (size_t block = 0; block < blocks; ++block) {
    for (size_t s = 0; s < kStripesPerBlock; ++s, at += kStripe) {
      for (int i = 0; i < kPages; ++i) {
        if (kPages == 1) __builtin_prefetch(pages[i] + at + kPrefetch);
        accumulate(acc[i], pages[i] + at, secret + 8 * s, also[i]);
      }
    }
    for (int i = 0; i < kPages; ++i) scramble(acc[i], secret + kSecretBytes - kStripe);
  }
  size_t stripes = (bytes - at - 1) / kStripe;
  for (size_t s = 0; s < stripes; ++s, at += kStripe)
    for (int i = 0; i < kPages; ++i) accumulate(acc[i], pages[i] + at, secret + 8 * s, also[i]);
  for (int i = 0; i < kPages; ++i) {
    const uint8_t* end = also[i].keep_last(pages[i] + at, bytes - at) + bytes - at;
    accumulate(acc[i], end - kStripe, secret + kSecretBytes - kStripe - 7, OnlySum{});
    sums[i] = finish(acc[i], bytes);
  }
}

template <bool kStream>
void copy_long(uint64_t* sums, uint8_t* const* to, const uint8_t* const* from, size_t count, size_t bytes) {
  Copy<kStream> copies[kSideBySide];
  for (size_t i = 0; i < count; ++i) copies[i] = {to[i] - from[i]};
  if (count == kSideBySide) return sum_long<kSideBySide>(sums, from, bytes, copies);
  for (size_t i = 0; i < count; ++i) sum_long<1>(sums + i, from + i, bytes, copies + i);
}

}  // namespace

void checksum(uint64_t* sums, const uint8_t* const* pages, size_t count, size_t bytes) {
  const OnlySum nothing[kSideBySide];
  if (bytes > kShort && count == kSideBySide) return sum_long<kSideBySide>(sums, pages, bytes, nothing);
  for (size_t i = 0; i < count; ++i)
    bytes > kShort ? sum_long<1>(sums + i, pages + i, bytes, nothing) : void(sums[i] = xxh3_64(pages[i], bytes, 0));
}

void copy_checksum(uint64_t* sums, uint8_t* const* to, const uint8_t* const* from, size_t count, size_t bytes,
                   bool stream) {
  if (bytes <= kShort) {
    for (size_t i = 0; i < count; ++i) {
      memcpy(to[i], from[i], bytes);
      sums[i] = xxh3_64(to[i], bytes, 0);
    }
    return;
  }
  for (size_t i = 0; i < count; ++i) stream = stream && reinterpret_cast<uintptr_t>(to[i]) % kStripe == 0;
  if (!stream) return copy_long<false>(sums, to, from, count, bytes);
  copy_long<true>(sums, to, from, count, bytes);
  order_streaming_stores();
}

KVM_END
