// Attention of many query rows (prefill): blocked, with lanes running along the query rows.
//
// A tile of query rows is transposed once; keys and values are broadcast from memory. Scores, their running maxima
// and sums and the output all keep one query row per lane, so the softmax needs no horizontal operation at all.
#include <math.h>

#include "attention.h"

KVM_BEGIN
namespace {

// Rows of the left operand per register block; with Vectors it fills the register file.
#if defined(__AVX512F__)
template <int Vectors> constexpr int kBlock = 8;
#else
template <int Vectors> constexpr int kBlock = Vectors == 1 ? 8 : 4;
#endif

// sums[m][v] += left(m, k) * right(k, v) for k < depth; `right` is [depth, Vectors * kLanes].
template <int Block, int Vectors>
KVM_INLINE void multiply(VFloat (&sums)[Block][Vectors], const float* left, int row_stride, int depth_stride,
                         const float* right, int depth) {
  for (int k = 0; k < depth; ++k) {
    VFloat r[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) r[v] = load(right + (k * Vectors + v) * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < Block; ++m) {
      VFloat l = splat(left[m * row_stride + k * depth_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[m][v] += l * r[v];
    }
  }
}

template <int Vectors>
struct Tile {
  static constexpr int kRows = Vectors * kLanes;
  float* q;        // [padded, kRows], transposed and scaled
  float* out;      // [padded, kRows]
  float* weights;  // [kKeyTile, kRows]
  float* k;        // [kKeyTile, padded]
  float* v;        // [kKeyTile, padded]
  VInt position[Vectors];
  VFloat best[Vectors], total[Vectors];
  int lowest_position, highest_position;
};

template <int Vectors>
void score(Tile<Vectors>& tile, int padded, int count) {
  constexpr int kStep = kBlock<Vectors>;
  for (int key = 0; key < count; key += kStep) {
    VFloat sums[kStep][Vectors] = {};
    multiply<kStep, Vectors>(sums, tile.k + key * padded, padded, 1, tile.q, padded);
    for (int m = 0; m < kStep; ++m)
      for (int v = 0; v < Vectors; ++v) store(tile.weights + ((key + m) * Vectors + v) * kLanes, sums[m][v]);
  }
}

// Scores to weights; returns through `scale` what the accumulators must be multiplied by.
template <int Vectors>
void soften(const AttentionArgs& a, Tile<Vectors>& tile, int key_begin, int count, VFloat (&scale)[Vectors]) {
  bool masked = key_begin + count - 1 > tile.lowest_position ||
                (a.window > 0 && key_begin <= tile.highest_position - a.window);
  for (int v = 0; v < Vectors; ++v) {
    float* column = tile.weights + v * kLanes;
    VFloat best = tile.best[v];
    if (masked || a.soft_cap > 0.0f) {
      for (int key = 0; key < count; ++key) {
        VFloat s = load(column + key * tile.kRows);
        if (a.soft_cap > 0.0f) s = soft_cap_lanes(s, a.soft_cap);
        VInt distance = tile.position[v] - (key_begin + key);
        VInt visible = distance >= 0;
        if (a.window > 0) visible &= distance < a.window;
        s = select(visible, s, splat(-INFINITY));
        store(column + key * tile.kRows, s);
        best = maximum(best, s);
      }
    } else {
      for (int key = 0; key < count; ++key) best = maximum(best, load(column + key * tile.kRows));
    }
    VFloat total{};
    for (int key = 0; key < count; ++key) {
      VFloat weight = exp2_lanes(load(column + key * tile.kRows) - best);
      store(column + key * tile.kRows, weight);
      total += weight;
    }
    scale[v] = exp2_lanes(tile.best[v] - best);
    tile.total[v] = tile.total[v] * scale[v] + total;
    tile.best[v] = best;
  }
}

template <int Vectors>
void add_values(Tile<Vectors>& tile, int padded, int count, const VFloat (&scale)[Vectors]) {
  constexpr int kStep = kBlock<Vectors>;
  for (int d = 0; d < padded; d += kStep) {
    VFloat sums[kStep][Vectors];
    for (int m = 0; m < kStep; ++m)
      for (int v = 0; v < Vectors; ++v) sums[m][v] = load(tile.out + ((d + m) * Vectors + v) * kLanes) * scale[v];
    multiply<kStep, Vectors>(sums, tile.v + d, 1, padded, tile.weights, count);
    for (int m = 0; m < kStep; ++m)
      for (int v = 0; v < Vectors; ++v) store(tile.out + ((d + m) * Vectors + v) * kLanes, sums[m][v]);
  }
}

// Rows of K and V as float32, and zero rows of K up to a whole register block.
template <class T>
void unpack_keys(const AttentionArgs& a, const AttentionTask& task, int begin, int count, int padded, float* k, float* v) {
  const T* k_rows[kKeyTile];
  const T* v_rows[kKeyTile];
  find_rows(a, task, begin, count, k_rows, v_rows);
  for (int j = 0; j < count; ++j) {
    unpack_row(k + j * padded, k_rows[j], a.kv.head_dim, padded, 1.0f);
    unpack_row(v + j * padded, v_rows[j], a.kv.head_dim, padded, 1.0f);
  }
  for (int j = count; j < (count + 7) / 8 * 8; ++j) memset(k + j * padded, 0, size_t(padded) * sizeof(float));
}

void unpack_keys_of(const AttentionArgs& a, const AttentionTask& task, int begin, int count, int padded, float* k,
                    float* v) {
  switch (a.kv.dtype) {
    case kFloat32: return unpack_keys<Float32>(a, task, begin, count, padded, k, v);
    case kFloat16: return unpack_keys<Float16>(a, task, begin, count, padded, k, v);
    case kBFloat16: return unpack_keys<BFloat16>(a, task, begin, count, padded, k, v);
    case kFp8E4M3: return unpack_keys<Fp8E4M3>(a, task, begin, count, padded, k, v);
    case kFp8E5M2: return unpack_keys<Fp8E5M2>(a, task, begin, count, padded, k, v);
  }
}

template <int Vectors>
void load_queries(const AttentionArgs& a, const AttentionTask& task, Tile<Vectors>& tile, int padded) {
  int rows = task.row_end - task.row_begin;
  float* row_buffer = tile.weights;  // free until the first scores
  for (int r = 0; r < tile.kRows; ++r) {
    // Lanes without a row repeat the last one; they are computed and not written.
    RowPlace place = row_place(a, task, task.row_begin + (r < rows ? r : rows - 1));
    read_query(a, place, row_buffer, padded);
    for (int d = 0; d < padded; ++d) tile.q[d * tile.kRows + r] = row_buffer[d];
    tile.position[r / kLanes][r % kLanes] = place.position;
  }
  tile.lowest_position = tile.position[0][0];
  tile.highest_position = tile.position[Vectors - 1][kLanes - 1];
  memset(tile.out, 0, size_t(padded) * tile.kRows * sizeof(float));
  for (int v = 0; v < Vectors; ++v) {
    tile.best[v] = splat(kMaximumOfNothing);
    tile.total[v] = VFloat{};
  }
}

template <int Vectors>
void write_outputs(const AttentionArgs& a, const AttentionTask& task, const Tile<Vectors>& tile, int padded) {
  float* row_buffer = tile.weights;
  for (int r = 0; r < task.row_end - task.row_begin; ++r) {
    for (int d = 0; d < padded; ++d) row_buffer[d] = tile.out[d * tile.kRows + r];
    write_output(a, row_place(a, task, task.row_begin + r), row_buffer, 1.0f / tile.total[r / kLanes][r % kLanes]);
  }
}

template <int Vectors>
void prefill(const AttentionArgs& a, const AttentionTask& task, void* scratch) {
  int padded = padded_dim(a);
  padded = (padded + 7) / 8 * 8;  // whole register blocks of the value pass
  Tile<Vectors> tile;
  float* p = static_cast<float*>(scratch);
  tile.q = p;
  tile.out = tile.q + padded * tile.kRows;
  tile.weights = tile.out + padded * tile.kRows;
  tile.k = tile.weights + (kKeyTile > padded ? kKeyTile : padded) * tile.kRows;
  tile.v = tile.k + kKeyTile * padded;
  load_queries(a, task, tile, padded);
  for (int begin = task.key_begin; begin < task.key_end;) {
    int end = (begin / kKeyTile + 1) * kKeyTile;  // aligned to key numbers, so chunking does not change results
    if (end > task.key_end) end = task.key_end;
    int count = end - begin;
    VFloat scale[Vectors];
    unpack_keys_of(a, task, begin, count, padded, tile.k, tile.v);
    score(tile, padded, count);
    soften(a, tile, begin, count, scale);
    add_values(tile, padded, count, scale);
    begin = end;
  }
  write_outputs(a, task, tile, padded);
}

}  // namespace

size_t prefill_scratch_bytes(const AttentionArgs& a) {
  size_t padded = size_t(padded_dim(a) + 7) / 8 * 8, rows = kAttentionTileRows;
  size_t weights = kKeyTile > padded ? size_t(kKeyTile) : padded;
  return (2 * padded * rows + weights * rows + 2 * kKeyTile * padded) * sizeof(float);
}

void attention_prefill(const AttentionArgs& a, const AttentionTask& task, void* scratch) {
  int rows = task.row_end - task.row_begin;
  if (rows <= kLanes) prefill<1>(a, task, scratch);
  else if (rows <= 2 * kLanes) prefill<2>(a, task, scratch);
  else prefill<3>(a, task, scratch);
}

size_t attention_scratch_bytes(const AttentionArgs& a) {
  size_t decode = decode_scratch_bytes(a), prefill = prefill_scratch_bytes(a);
  return decode > prefill ? decode : prefill;
}

KVM_END
