// Attention of few query rows over many keys (decode): reads each key and value once, at memory speed.
//
// Lanes run along head_dim. Keys are taken in tiles; for a group of query rows four keys are multiplied at a time and
// their partial sums transposed together, so that a score costs two shuffles rather than a whole reduction.
#include <math.h>

#include "attention.h"

KVM_BEGIN
namespace {

#if defined(__AVX512F__)
constexpr int kRowGroup = 4;  // 4 rows x 4 keys of accumulators in 32 registers
#else
constexpr int kRowGroup = 3;
#endif
constexpr int kDimVectors = 4;  // vectors of head_dim per pass over the values

struct Workspace {
  float* q;       // [rows, padded]
  float* out;     // [rows, padded], unnormalised
  float* scores;  // [rows, kKeyTile]
  float* k_pack;  // [kKeyTile, padded], used where head_dim is not a whole number of vectors
  float* v_pack;
  SoftmaxState* states;
};

template <class T>
KVM_INLINE void prefetch_row(const T* row, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + line, 0, 2);
}

// Scores of `Rows` query rows against `count` keys.
template <int Rows, class T>
void score_tile(const float* q, int padded, const T* const* k_rows, int count, const T* const* ahead, float* scores) {
  VFloat groups[Rows][kLanes / 4];
  for (int key = 0; key < count; key += 4) {
    const T* rows[4];
    for (int j = 0; j < 4; ++j) rows[j] = k_rows[key + j < count ? key + j : count - 1];
    if (ahead != nullptr)
      for (int j = 0; j < 4; ++j) prefetch_row(ahead[key + j], padded * int(sizeof(T)));
    VFloat sums[Rows][4] = {};
    for (int d = 0; d < padded; d += kLanes) {
      VFloat k[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) k[j] = Lanes<T>::load(rows[j] + d);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        VFloat query = load(q + r * padded + d);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[r][j] += query * k[j];
      }
    }
    int part = key / 4 % (kLanes / 4);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) groups[r][part] = sum_groups(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    if (part == kLanes / 4 - 1 || key + 4 >= count) {
      for (int r = 0; r < Rows; ++r) store(scores + r * kKeyTile + key / kLanes * kLanes, sum_lanes(groups[r]));
    }
  }
}

// Adds the weighted values of a tile to `Rows` accumulators, `Vectors` vectors of head_dim at a time.
template <int Rows, int Vectors, class T>
KVM_INLINE void add_values_at(float* out, int padded, int d, const float* weights, const float* scales,
                              const T* const* v_rows, int count) {
  VFloat sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Vectors; ++i) sums[r][i] = load(out + r * padded + d + i * kLanes) * scales[r];
  for (int key = 0; key < count; ++key) {
    const T* row = v_rows[key] + d;
    VFloat v[Vectors];
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) v[i] = Lanes<T>::load(row + i * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      VFloat weight = splat(weights[r * kKeyTile + key]);
#pragma GCC unroll 4
      for (int i = 0; i < Vectors; ++i) sums[r][i] += weight * v[i];
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Vectors; ++i) store(out + r * padded + d + i * kLanes, sums[r][i]);
}

template <int Rows, class T>
void add_values(float* out, int padded, const float* weights, const float* scales, const T* const* v_rows, int count,
                const T* const* ahead) {
  if (ahead != nullptr)
    for (int key = 0; key < count; ++key) prefetch_row(ahead[key], padded * int(sizeof(T)));
  int d = 0;
  for (; d + kDimVectors * kLanes <= padded; d += kDimVectors * kLanes)
    add_values_at<Rows, kDimVectors>(out, padded, d, weights, scales, v_rows, count);
  for (; d < padded; d += kLanes) add_values_at<Rows, 1>(out, padded, d, weights, scales, v_rows, count);
}

// Turns one row's scores into weights and returns what the row's accumulator must be scaled by.
float soften(const AttentionArgs& a, float* scores, int key_begin, int count, int position, SoftmaxState& state) {
  int padded_count = (count + kLanes - 1) / kLanes * kLanes;
  int last = position - key_begin;                                      // the last visible key of the tile
  int first = a.window > 0 ? position - a.window + 1 - key_begin : 0;  // and the first
  if (last >= count) last = count - 1;
  VFloat best = splat(state.maximum);
  for (int i = 0; i < padded_count; i += kLanes) {
    VFloat s = load(scores + i);
    if (a.soft_cap > 0.0f) s = soft_cap_lanes(s, a.soft_cap);
    if (i < first || i + kLanes - 1 > last) {
      VInt index = lane_index() + i;
      s = select((index >= first) & (index <= last), s, splat(-INFINITY));
    }
    store(scores + i, s);
    best = maximum(best, s);
  }
  float highest = largest(best);
  VFloat total{};
  for (int i = 0; i < padded_count; i += kLanes) {
    VFloat weight = exp2_lanes(load(scores + i) - highest);
    store(scores + i, weight);
    total += weight;
  }
  float scale = exp2f(state.maximum - highest);
  state = {highest, state.sum * scale + sum(total)};
  return scale;
}

template <int Rows, class T>
void attend_tile(const AttentionArgs& a, const AttentionTask& task, const Workspace& w, int row, int padded,
                 const T* const* k_rows, const T* const* v_rows, const T* const* k_ahead, const T* const* v_ahead,
                 int key_begin, int count) {
  float* scores = w.scores + row * kKeyTile;
  float scales[Rows];
  score_tile<Rows>(w.q + row * padded, padded, k_rows, count, k_ahead, scores);
  for (int r = 0; r < Rows; ++r) {
    RowPlace place = row_place(a, task, task.row_begin + row + r);
    scales[r] = soften(a, scores + r * kKeyTile, key_begin, count, place.position, w.states[row + r]);
  }
  add_values<Rows>(w.out + row * padded, padded, scores, scales, v_rows, count, v_ahead);
}

template <class T>
void attend_rows(const AttentionArgs& a, const AttentionTask& task, const Workspace& w, int padded,
                 const T* const* k_rows, const T* const* v_rows, const T* const* k_ahead, const T* const* v_ahead,
                 int key_begin, int count) {
  int rows = task.row_end - task.row_begin;
  for (int row = 0; row < rows;) {
    int left = rows - row;
#define KVM_ATTEND(n) attend_tile<n>(a, task, w, row, padded, k_rows, v_rows, k_ahead, v_ahead, key_begin, count)
    if (left >= kRowGroup) KVM_ATTEND(kRowGroup), row += kRowGroup;
    else if (left == 3) KVM_ATTEND(3), row += 3;
    else if (left == 2) KVM_ATTEND(2), row += 2;
    else KVM_ATTEND(1), row += 1;
#undef KVM_ATTEND
    k_ahead = v_ahead = nullptr;  // the first group of rows has asked for the next tile already
  }
}

template <class T>
void decode(const AttentionArgs& a, const AttentionTask& task, const Workspace& w) {
  int dim = a.kv.head_dim, padded = padded_dim(a);
  const T* rows[2][2][kKeyTile];  // [this tile or the next][K or V]
  const Float32* packed[2][kKeyTile];
  for (int j = 0; j < kKeyTile; ++j) {
    packed[0][j] = reinterpret_cast<const Float32*>(w.k_pack + j * padded);
    packed[1][j] = reinterpret_cast<const Float32*>(w.v_pack + j * padded);
  }
  auto tile_end = [&](int begin) {  // tiles are aligned to key numbers: a row's sums never depend on its batch
    int end = (begin / kKeyTile + 1) * kKeyTile;
    return end < task.key_end ? end : task.key_end;
  };
  int now = 0, begin = task.key_begin, end = tile_end(begin);
  find_rows(a, task, begin, end - begin, rows[now][0], rows[now][1]);
  while (begin < task.key_end) {
    int count = end - begin, next_end = end < task.key_end ? tile_end(end) : end;
    const T* const* k_ahead = nullptr;
    const T* const* v_ahead = nullptr;
    if (next_end > end) {
      find_rows(a, task, end, next_end - end, rows[1 - now][0], rows[1 - now][1]);
      for (int j = next_end - end; j < kKeyTile; ++j) {
        rows[1 - now][0][j] = rows[1 - now][0][next_end - end - 1];
        rows[1 - now][1][j] = rows[1 - now][1][next_end - end - 1];
      }
      k_ahead = rows[1 - now][0];
      v_ahead = rows[1 - now][1];
    }
    if (dim == padded) {
      attend_rows<T>(a, task, w, padded, rows[now][0], rows[now][1], k_ahead, v_ahead, begin, count);
    } else {
      for (int j = 0; j < count; ++j) {
        unpack_row(w.k_pack + j * padded, rows[now][0][j], dim, padded, 1.0f);
        unpack_row(w.v_pack + j * padded, rows[now][1][j], dim, padded, 1.0f);
      }
      attend_rows<Float32>(a, task, w, padded, packed[0], packed[1], nullptr, nullptr, begin, count);
    }
    begin = end;
    end = next_end;
    now = 1 - now;
  }
}

Workspace carve(const AttentionArgs& a, int rows, void* scratch) {
  int padded = padded_dim(a);
  float* p = static_cast<float*>(scratch);
  Workspace w;
  w.q = p;
  w.out = w.q + rows * padded;
  w.scores = w.out + rows * padded;
  w.k_pack = w.scores + rows * kKeyTile;
  w.v_pack = w.k_pack + kKeyTile * padded;
  w.states = reinterpret_cast<SoftmaxState*>(w.v_pack + kKeyTile * padded);
  return w;
}

}  // namespace

size_t decode_scratch_bytes(const AttentionArgs& a) {
  size_t padded = size_t(padded_dim(a)), rows = kDecodeRows;
  return (2 * rows * padded + rows * kKeyTile + 2 * kKeyTile * padded) * sizeof(float) + rows * sizeof(SoftmaxState);
}

size_t partial_floats(const AttentionArgs& a, int rows) { return size_t(rows) * size_t(padded_dim(a) + kLanes); }

void attention_decode(const AttentionArgs& a, const AttentionTask& task, void* scratch) {
  int rows = task.row_end - task.row_begin, padded = padded_dim(a);
  Workspace w = carve(a, rows, scratch);
  for (int r = 0; r < rows; ++r) {
    read_query(a, row_place(a, task, task.row_begin + r), w.q + r * padded, padded);
    w.states[r] = {kMaximumOfNothing, 0.0f};
    memset(w.out + r * padded, 0, size_t(padded) * sizeof(float));
  }
  switch (a.kv.dtype) {
    case kFloat32: decode<Float32>(a, task, w); break;
    case kFloat16: decode<Float16>(a, task, w); break;
    case kBFloat16: decode<BFloat16>(a, task, w); break;
    case kFp8E4M3: decode<Fp8E4M3>(a, task, w); break;
    case kFp8E5M2: decode<Fp8E5M2>(a, task, w); break;
  }
  for (int r = 0; r < rows; ++r) {
    if (task.partial == nullptr) {
      write_output(a, row_place(a, task, task.row_begin + r), w.out + r * padded, 1.0f / w.states[r].sum);
    } else {
      float* part = task.partial + r * (padded + kLanes);
      memcpy(part, w.out + r * padded, size_t(padded) * sizeof(float));
      memcpy(part + padded, &w.states[r], sizeof(SoftmaxState));
    }
  }
}

void attention_merge(const AttentionArgs& a, const AttentionTask* parts, int count, void* scratch) {
  int rows = parts->row_end - parts->row_begin, padded = padded_dim(a);
  float* sums = static_cast<float*>(scratch);
  for (int r = 0; r < rows; ++r) {
    SoftmaxState total{kMaximumOfNothing, 0.0f};
    memset(sums, 0, size_t(padded) * sizeof(float));
    for (int i = 0; i < count; ++i) {
      const float* part = parts[i].partial + r * (padded + kLanes);
      SoftmaxState state;
      memcpy(&state, part + padded, sizeof(state));
      SoftmaxMerge merge = merge_softmax(total, state);
      total = merge.state;
      for (int d = 0; d < padded; d += kLanes) store(sums + d, load(sums + d) * merge.left + load(part + d) * merge.right);
    }
    write_output(a, row_place(a, *parts, parts->row_begin + r), sums, 1.0f / total.sum);
  }
}

KVM_END
