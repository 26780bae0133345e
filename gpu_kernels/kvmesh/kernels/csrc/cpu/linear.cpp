// Products with quantised weights: out[t, n] = sum over k of x[t, k] * w[n, k], in float32. Compiled once per level.
//
// Lanes are the 16 rows of a panel (core/quant_panels.h). Integers are widened to float32 in registers and multiplied
// with x unrounded; the block's scale and minimum are applied once per 32 columns, which is the same sum reassociated.
// The order of additions never depends on the number of tokens, so a token's result is that of any batch.
#include <type_traits>

#include "../core/quant_panels.h"
#include "kernels.h"
#include "simd.h"

KVM_BEGIN
namespace {

constexpr int kParts = kPanelRows / kLanes;  // vectors that one column of a panel fills
// Tokens per pass over a panel: with two chains of sums each they fill the registers.
#if defined(__AVX512F__)
constexpr int kTokens = 8;
#elif defined(__AVX2__)
constexpr int kTokens = 3;
#else
constexpr int kTokens = 1;
#endif
constexpr int kPrefetchBytes = 4096;

KVM_INLINE VFloat half_scales(const uint8_t* p, int part) {
  return Lanes<Float16>::load(reinterpret_cast<const Float16*>(p) + part * kLanes);
}

// Nibble `index` of every lane, times nibble_factor(index), as float32.
KVM_INLINE VFloat nibble_to_float(VUint v, int index) {
#if defined(__AVX512F__)
  // The permutation looks at four index bits only: mask and conversion in one instruction.
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (VFloat)_mm512_permutexvar_ps((__m512i)(v >> (4 * index)), values);
#else
  // Without a shift the value comes out times 16^index; the inputs are divided by that power of two, exactly.
  return index == 7 ? to_lanes((VInt)(v >> 28)) : to_lanes((VInt)(v & (15u << (4 * index))));
#endif
}

KVM_INLINE float nibble_factor(int index) {
#if defined(__AVX512F__)
  (void)index;
  return 1.0f;
#else
  return index == 7 ? 1.0f : float(1u << (4 * index));
#endif
}

struct Q4 {
  static constexpr int kBytes = kQ4PanelBytes;

  // sums[token][part][parity] += weights of this block, unscaled, times x.
  template <int Tokens>
  static KVM_INLINE void multiply(VFloat (&sums)[Tokens][kParts][2], const uint8_t* panel, const float* x) {
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      VUint packed[kParts];
      for (int p = 0; p < kParts; ++p) packed[p] = load_bits<VUint>(panel + g * 64 + p * kLanes * 4);
#pragma GCC unroll 8
      for (int n = 0; n < 8; ++n) {
        VFloat w[kParts];
        for (int p = 0; p < kParts; ++p) w[p] = nibble_to_float(packed[p], n);
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
          VFloat value = splat(x[(g * 8 + n) * Tokens + t]);
          for (int p = 0; p < kParts; ++p) sums[t][p][n % 2] += w[p] * value;
        }
      }
    }
  }

  template <int Tokens>
  static KVM_INLINE void apply_scales(VFloat (&totals)[Tokens][kParts], const VFloat (&sums)[Tokens][kParts][2],
                                      const uint8_t* panel, const float* block_sums, int64_t sums_stride) {
    for (int p = 0; p < kParts; ++p) {
      VFloat scale = half_scales(panel + kQ4Scales, p), minimum = half_scales(panel + kQ4Minima, p);
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) {
        totals[t][p] += scale * (sums[t][p][0] + sums[t][p][1]);
        totals[t][p] += minimum * block_sums[t * sums_stride];
      }
    }
  }
};

struct Q8 {
  static constexpr int kBytes = kQ8PanelBytes;

  template <int Tokens>
  static KVM_INLINE void multiply(VFloat (&sums)[Tokens][kParts][2], const uint8_t* panel, const float* x) {
#pragma GCC unroll 32
    for (int k = 0; k < kBlockColumns; ++k) {
      VFloat w[kParts];
      for (int p = 0; p < kParts; ++p)
        w[p] = to_lanes(widen_i8(panel + k * kPanelRows + p * kLanes));
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) {
        VFloat value = splat(x[k * Tokens + t]);
        for (int p = 0; p < kParts; ++p) sums[t][p][k % 2] += w[p] * value;
      }
    }
  }

  template <int Tokens>
  static KVM_INLINE void apply_scales(VFloat (&totals)[Tokens][kParts], const VFloat (&sums)[Tokens][kParts][2],
                                      const uint8_t* panel, const float*, int64_t) {
    for (int p = 0; p < kParts; ++p) {
      VFloat scale = half_scales(panel + kQ8Scales, p);
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) totals[t][p] += scale * (sums[t][p][0] + sums[t][p][1]);
    }
  }
};

template <class Format, int Tokens>
void multiply_panel(const LinearArgs& a, int64_t panel_index, int64_t token) {
  int64_t blocks = a.columns / kBlockColumns;
  const uint8_t* panel = a.panels + panel_index * blocks * Format::kBytes;
  const float* x = a.packed_x + token * a.columns;
  const float* block_sums = a.block_sums + token * blocks;
  VFloat totals[Tokens][kParts] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    for (int line = 0; line < Format::kBytes; line += 64) __builtin_prefetch(panel + kPrefetchBytes + line, 0, 3);
    VFloat sums[Tokens][kParts][2] = {};
    Format::template multiply<Tokens>(sums, panel, x + block * kBlockColumns * Tokens);
    Format::template apply_scales<Tokens>(totals, sums, panel, block_sums + block, blocks);
    panel += Format::kBytes;
  }
  int64_t row = panel_index * kPanelRows, rows = a.rows - row < kPanelRows ? a.rows - row : kPanelRows;
  for (int t = 0; t < Tokens; ++t) {
    float* out = a.out + (token + t) * a.out_stride + row;
    if (rows == kPanelRows) {
      for (int p = 0; p < kParts; ++p) store(out + p * kLanes, totals[t][p]);
    } else {
      float lanes[kPanelRows];
      for (int p = 0; p < kParts; ++p) store(lanes + p * kLanes, totals[t][p]);
      memcpy(out, lanes, size_t(rows) * sizeof(float));
    }
  }
}

// Calls visit(token, tile size) for every pass over a panel: whole tiles, then one of exactly the rest.
template <int Tokens, class Visit>
KVM_INLINE void visit_rest(int64_t token, int64_t rest, Visit visit) {
  if constexpr (Tokens > 0) {
    if (rest == Tokens) visit(token, std::integral_constant<int, Tokens>());
    else visit_rest<Tokens - 1>(token, rest, visit);
  }
}
template <class Visit>
KVM_INLINE void for_tiles(int64_t tokens, Visit visit) {
  int64_t token = 0;
  for (; token + kTokens <= tokens; token += kTokens) visit(token, std::integral_constant<int, kTokens>());
  visit_rest<kTokens - 1>(token, tokens - token, visit);
}

template <class Format>
void multiply_panels(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel) {
    for_tiles(a.tokens, [&](int64_t token, auto tile) { multiply_panel<Format, tile()>(a, panel, token); });
  }
}

}  // namespace

void prepare_linear(const LinearArgs& a, int32_t kind, float* packed_x, float* block_sums) {
  int64_t blocks = a.columns / kBlockColumns;
  float factors[8];
  for (int i = 0; i < 8; ++i) factors[i] = kind == kQ4_1 ? 1.0f / nibble_factor(i) : 1.0f;
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t b = 0; b < blocks; ++b) {
      const float* x = a.x + t * a.x_stride + b * kBlockColumns;
      VFloat total{};
      for (int i = 0; i < kBlockColumns; i += kLanes) total += load(x + i);
      block_sums[t * blocks + b] = sum(total);
    }
  }
  for_tiles(a.tokens, [&](int64_t token, auto tile) {
    float* to = packed_x + token * a.columns;
    for (int t = 0; t < tile(); ++t) {
      const float* from = a.x + (token + t) * a.x_stride;
      for (int64_t k = 0; k < a.columns; ++k) to[k * tile() + t] = from[k] * factors[k % 8];
    }
  });
}

void linear_q4_1(const LinearArgs& a, int64_t begin, int64_t end) { multiply_panels<Q4>(a, begin, end); }

void linear_q8_0(const LinearArgs& a, int64_t begin, int64_t end) { multiply_panels<Q8>(a, begin, end); }

KVM_END
