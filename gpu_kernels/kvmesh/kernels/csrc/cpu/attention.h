// What both attention kernels of one level share: tile sizes, row addressing and key lookup.
#pragma once

#include "../core/paging.h"
#include "../core/softmax.h"
#include "kernels.h"
#include "simd.h"

KVM_BEGIN

// Keys per softmax step: the rescaling of the accumulators is amortised over a tile that still fits the L1 cache.
constexpr int kKeyTile = 64;

// Query rows of one prefill task: three vectors of lanes.
constexpr int kAttentionTileRows = 3 * kLanes;

// head_dim rounded up to whole vectors; packed rows are zero beyond head_dim.
KVM_INLINE int padded_dim(const AttentionArgs& a) { return (a.kv.head_dim + kLanes - 1) / kLanes * kLanes; }

KVM_INLINE int group_size(const AttentionArgs& a) { return a.num_heads / a.kv.num_kv_heads; }

// Queries of one KV head are numbered row = query * group + head within the group.
struct RowPlace { int64_t token; int32_t head, position; };

KVM_INLINE RowPlace row_place(const AttentionArgs& a, const AttentionTask& task, int row) {
  int group = group_size(a), query = row / group;
  int32_t first = a.query_start[task.sequence];
  int32_t queries = a.query_start[task.sequence + 1] - first;
  return {int64_t(first) + query, task.kv_head * group + row % group,
          a.context_lens[task.sequence] - queries + query};
}

template <class T>
KVM_INLINE const T* query_row(const AttentionArgs& a, const RowPlace& place) {
  return static_cast<const T*>(a.q) + place.token * a.q_stride + int64_t(place.head) * a.kv.head_dim;
}

template <class T>
KVM_INLINE T* output_row(const AttentionArgs& a, const RowPlace& place) {
  return static_cast<T*>(a.out) + place.token * a.out_stride + int64_t(place.head) * a.kv.head_dim;
}

// The K and V rows of keys [begin, begin + count) of the task's sequence and KV head.
template <class T>
KVM_INLINE void find_rows(const AttentionArgs& a, const AttentionTask& task, int begin, int count, const T** k_rows,
                          const T** v_rows) {
  const int32_t* table = a.block_tables + task.sequence * a.block_table_stride;
  int per_page = a.kv.tokens_per_block, dim = a.kv.head_dim;
  for (int i = 0; i < count;) {
    int page = table[(begin + i) / per_page], token = (begin + i) % per_page;
    const T* k = reinterpret_cast<const T*>(page_head(a.kv, page, a.kv.k_offset_bytes, task.kv_head));
    const T* v = reinterpret_cast<const T*>(page_head(a.kv, page, a.kv.v_offset_bytes, task.kv_head));
    for (; token < per_page && i < count; ++token, ++i) {
      k_rows[i] = k + int64_t(token) * dim;
      v_rows[i] = v + int64_t(token) * dim;
    }
  }
}

// Converts one row to float32, times `factor`, zero from head_dim to the padded width.
template <class T>
KVM_INLINE void unpack_row(float* to, const T* from, int dim, int padded, float factor) {
  int whole = dim / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) store(to + i, Lanes<T>::load(from + i) * factor);
  for (int i = whole; i < dim; ++i) to[i] = to_float(from[i]) * factor;
  for (int i = dim; i < padded; ++i) to[i] = 0.0f;
}

template <class T>
KVM_INLINE void write_row(T* to, const float* from, int dim, float factor) {
  int whole = dim / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) Lanes<T>::store(to + i, load(from + i) * factor);
  for (int i = whole; i < dim; ++i) to[i] = from_float<T>(from[i] * factor);
}

KVM_INLINE void write_output(const AttentionArgs& a, const RowPlace& place, const float* row, float factor) {
  if (a.dtype == kFloat32) write_row(output_row<Float32>(a, place), row, a.kv.head_dim, factor);
  else if (a.dtype == kFloat16) write_row(output_row<Float16>(a, place), row, a.kv.head_dim, factor);
  else write_row(output_row<BFloat16>(a, place), row, a.kv.head_dim, factor);
}

KVM_INLINE void read_query(const AttentionArgs& a, const RowPlace& place, float* row, int padded) {
  // Without a soft cap scores are wanted in base-2 units at once; with one, the cap comes before the conversion.
  float factor = a.soft_cap > 0.0f ? a.scale : a.scale * kLog2E;
  if (a.dtype == kFloat32) unpack_row(row, query_row<Float32>(a, place), a.kv.head_dim, padded, factor);
  else if (a.dtype == kFloat16) unpack_row(row, query_row<Float16>(a, place), a.kv.head_dim, padded, factor);
  else unpack_row(row, query_row<BFloat16>(a, place), a.kv.head_dim, padded, factor);
}

KVM_INLINE VFloat soft_cap_lanes(VFloat score, float cap) {
  return tanh_lanes(score / cap) * (cap * kLog2E);
}

KVM_END
