// Float vectors as wide as the level compiles to (16, 8 or 4 lanes), with the few operations the kernels need.
//
// Arithmetic uses the compiler's vector extensions, so one source serves every level; intrinsics appear only where
// the compiler finds no good instruction by itself (lane shuffles, half precision, min/max).
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../core/float_formats.h"

#if defined(__AVX512F__)
#define KVM_LANES 16
#elif defined(__AVX2__)
#define KVM_LANES 8
#else
#define KVM_LANES 4
#endif

#define KVM_INLINE inline __attribute__((always_inline))

KVM_BEGIN

constexpr int kLanes = KVM_LANES;

typedef float VFloat __attribute__((vector_size(KVM_LANES * 4)));
typedef int32_t VInt __attribute__((vector_size(KVM_LANES * 4)));
typedef uint32_t VUint __attribute__((vector_size(KVM_LANES * 4)));
typedef uint16_t VHalf __attribute__((vector_size(KVM_LANES * 2)));
typedef uint8_t VByte __attribute__((vector_size(KVM_LANES)));

template <class V>
KVM_INLINE V load_bits(const void* p) {
  V v;
  memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
KVM_INLINE void store_bits(void* p, V v) {
  memcpy(p, &v, sizeof(V));
}

// Writes a whole vector past the caches to an address of its own alignment. Ordered with nothing else, such as the
// news that a copy is done, until order_streaming_stores().
template <class V>
KVM_INLINE void store_past_caches(void* p, V v) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)p, (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256((__m256i*)p, (__m256i)v);
#elif defined(__x86_64__)
  _mm_stream_si128((__m128i*)p, (__m128i)v);
#else
  store_bits(p, v);
#endif
}
KVM_INLINE void order_streaming_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

KVM_INLINE VFloat splat(float f) { return f - VFloat{}; }
KVM_INLINE VInt splat(int32_t i) { return i - VInt{}; }
KVM_INLINE VFloat load(const float* p) { return load_bits<VFloat>(p); }
KVM_INLINE void store(float* p, VFloat v) { store_bits(p, v); }

KVM_INLINE VFloat maximum(VFloat a, VFloat b) {
#if defined(__AVX512F__)
  return (VFloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (VFloat)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (VFloat)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

KVM_INLINE VFloat select(VInt mask, VFloat yes, VFloat no) { return mask ? yes : no; }

KVM_INLINE VInt lane_index() {
  VInt v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// ---- integers of 8 and 16 bits, widened to 32: the compiler's own conversions of such short vectors go lane by lane

KVM_INLINE VUint widen_u16(const void* p) {
#if defined(__AVX512F__)
  return (VUint)_mm512_cvtepu16_epi32(load_bits<__m256i>(p));
#elif defined(__AVX2__)
  return (VUint)_mm256_cvtepu16_epi32(load_bits<__m128i>(p));
#elif defined(__x86_64__)
  return (VUint)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128());
#else
  return __builtin_convertvector(load_bits<VHalf>(p), VUint);
#endif
}

KVM_INLINE VUint widen_u8(const void* p) {
#if defined(__AVX512F__)
  return (VUint)_mm512_cvtepu8_epi32(load_bits<__m128i>(p));
#elif defined(__AVX2__)
  return (VUint)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__x86_64__)
  __m128i bytes = _mm_cvtsi32_si128(load_bits<int32_t>(p)), zero = _mm_setzero_si128();
  return (VUint)_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zero), zero);
#else
  return __builtin_convertvector(load_bits<VByte>(p), VUint);
#endif
}

KVM_INLINE VInt widen_i8(const void* p) {
#if defined(__AVX512F__)
  return (VInt)_mm512_cvtepi8_epi32(load_bits<__m128i>(p));
#elif defined(__AVX2__)
  return (VInt)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return (VInt)(widen_u8(p) << 24) >> 24;
#endif
}

KVM_INLINE void store_u16(void* p, VUint v) {
#if defined(__AVX512F__)
  store_bits(p, _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(__AVX2__)
  __m256i pairs = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  store_bits(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
#else
  store_bits(p, __builtin_convertvector(v, VHalf));
#endif
}

KVM_INLINE VFloat to_lanes(VInt v) {
#if defined(__AVX512F__)
  return (VFloat)_mm512_cvtepi32_ps((__m512i)v);
#else
  return __builtin_convertvector(v, VFloat);
#endif
}

// ---- loads and stores of every storage format, to and from float32 lanes ----

template <class T>
struct Lanes;

template <>
struct Lanes<Float32> {
  static KVM_INLINE VFloat load(const Float32* p) { return load_bits<VFloat>(p); }
  static KVM_INLINE void store(Float32* p, VFloat v) { store_bits(p, v); }
};

template <>
struct Lanes<BFloat16> {
  static KVM_INLINE VFloat load(const BFloat16* p) {
    return (VFloat)(widen_u16(p) << 16);
  }
  static KVM_INLINE void store(BFloat16* p, VFloat v) {
    VUint u = (VUint)v;
    VUint rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    VUint nan = (u >> 16) | 0x40u;
    rounded = (v == v) ? rounded : nan;
    store_u16(p, rounded);
  }
};

template <>
struct Lanes<Float16> {
  static KVM_INLINE VFloat load(const Float16* p) {
#if defined(__AVX512F__)
    return (VFloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (VFloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    VFloat v;
    for (int i = 0; i < kLanes; ++i) v[i] = fp16_to_float(p[i].bits);
    return v;
#endif
  }
  static KVM_INLINE void store(Float16* p, VFloat v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_fp16(v[i]);
#endif
  }
};

template <>
struct Lanes<Fp8E4M3> {
  static KVM_INLINE VFloat load(const Fp8E4M3* p) {
    VUint b = widen_u8(p);
    VUint magnitude = b & 0x7fu;
    VFloat value = (VFloat)(magnitude << 20) * bit_cast<float>(0x7b800000u);
    value = (magnitude == 0x7fu) ? (VFloat)(magnitude | 0x7fc00000u) : value;
    return (VFloat)((VUint)value | (b & 0x80u) << 24);
  }
  static KVM_INLINE void store(Fp8E4M3* p, VFloat v) {
    for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_e4m3(v[i]);
  }
};

template <>
struct Lanes<Fp8E5M2> {
  static KVM_INLINE VFloat load(const Fp8E5M2* p) {
    VUint b = widen_u8(p);
    VUint magnitude = b & 0x7fu;
    VFloat value = (VFloat)(magnitude << 21) * bit_cast<float>(0x77800000u);
    value = (magnitude >= 0x7cu) ? (VFloat)(0x7f800000u | (magnitude << 21)) : value;
    return (VFloat)((VUint)value | (b & 0x80u) << 24);
  }
  static KVM_INLINE void store(Fp8E5M2* p, VFloat v) {
    for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_e5m2(v[i]);
  }
};

// ---- reductions ----

KVM_INLINE VFloat interleave_low(VFloat a, VFloat b) {
#if defined(__AVX512F__)
  return (VFloat)_mm512_unpacklo_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (VFloat)_mm256_unpacklo_ps((__m256)a, (__m256)b);
#else
  return __builtin_shuffle(a, b, VInt{0, 4, 1, 5});
#endif
}
KVM_INLINE VFloat interleave_high(VFloat a, VFloat b) {
#if defined(__AVX512F__)
  return (VFloat)_mm512_unpackhi_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (VFloat)_mm256_unpackhi_ps((__m256)a, (__m256)b);
#else
  return __builtin_shuffle(a, b, VInt{2, 6, 3, 7});
#endif
}
KVM_INLINE VFloat pair_low(VFloat a, VFloat b) {
#if defined(__AVX512F__)
  return (VFloat)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  return (VFloat)_mm256_unpacklo_pd((__m256d)a, (__m256d)b);
#else
  return __builtin_shuffle(a, b, VInt{0, 1, 4, 5});
#endif
}
KVM_INLINE VFloat pair_high(VFloat a, VFloat b) {
#if defined(__AVX512F__)
  return (VFloat)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  return (VFloat)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
#else
  return __builtin_shuffle(a, b, VInt{2, 3, 6, 7});
#endif
}

// Four vectors to one whose every 128-bit group holds that group's partial sums of a, b, c and d, in this order.
KVM_INLINE VFloat sum_groups(VFloat a, VFloat b, VFloat c, VFloat d) {
  VFloat ab = interleave_low(a, b) + interleave_high(a, b);  // a0+a2 b0+b2 a1+a3 b1+b3
  VFloat cd = interleave_low(c, d) + interleave_high(c, d);
  return pair_low(ab, cd) + pair_high(ab, cd);
}

// Sums of kLanes vectors, lane i of the result being the sum of vector i; `groups` are kLanes / 4 sum_groups results.
KVM_INLINE VFloat sum_lanes(const VFloat* groups) {
#if defined(__AVX512F__)
  __m512 g0 = (__m512)groups[0], g1 = (__m512)groups[1], g2 = (__m512)groups[2], g3 = (__m512)groups[3];
  __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(g0, g1, 0x44), _mm512_shuffle_f32x4(g0, g1, 0xee));
  __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(g2, g3, 0x44), _mm512_shuffle_f32x4(g2, g3, 0xee));
  return (VFloat)_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
#elif defined(__AVX2__)
  __m256 g0 = (__m256)groups[0], g1 = (__m256)groups[1];
  return (VFloat)_mm256_add_ps(_mm256_permute2f128_ps(g0, g1, 0x20), _mm256_permute2f128_ps(g0, g1, 0x31));
#else
  return groups[0];
#endif
}

KVM_INLINE float sum(VFloat v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  return lanes[0];
#endif
}

KVM_INLINE float largest(VFloat v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 1; i < kLanes; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
#endif
}

// ---- exponentials ----

// 2^x to about 2e-7 relative for x <= 126; exactly 0 below -126.5, so masked scores (-inf) weigh nothing.
KVM_INLINE VFloat exp2_lanes(VFloat x) {
  x = maximum(x, splat(-127.0f));
  VFloat shifted = x + 12582912.0f;  // 1.5 x 2^23: the nearest integer lands in the low mantissa bits
  VFloat fraction = x - (shifted - 12582912.0f);
  VFloat p = fraction * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * fraction + 9.618437357674640e-3f;
  p = p * fraction + 5.550332471162809e-2f;
  p = p * fraction + 2.402264791363012e-1f;
  p = p * fraction + 6.931472028550421e-1f;
  p = p * fraction + 1.0f;
  return p * (VFloat)(((VUint)shifted << 23) + 0x3f800000u);
}

KVM_INLINE VFloat tanh_lanes(VFloat x) {
  constexpr float kTwoLog2E = 2.88539008177792681472f;
  VFloat bounded = maximum(splat(-20.0f), -maximum(splat(-20.0f), -x));
  return 1.0f - 2.0f / (exp2_lanes(bounded * kTwoLog2E) + 1.0f);
}

// factor * sigmoid(x)
KVM_INLINE VFloat sigmoid_times(VFloat x, VFloat factor) {
  constexpr float kLog2E = 1.44269504088896340736f;
  VFloat bounded = maximum(x, splat(-87.0f));  // beyond, the result is 0 within float32
  return factor / (1.0f + exp2_lanes(bounded * -kLog2E));
}

KVM_END
