// Paged attention on the GPU: one block per (tile of query rows, KV head, split of the keys).
//
// A row is a (query, head of the group) pair, as on the CPU. Each warp owns kRowsPerWarp rows. Keys come in tiles of
// 32, one key per lane for the scores and one head_dim column per lane for the values. Sequences that fit one tile
// (decode) have their keys split over blocks; a second kernel merges. The split depends on the block table's width
// alone, so a sequence's result does not depend on its batch.
#include "../core/paging.h"
#include "../core/softmax.h"
#include "common.cuh"

KVM_BEGIN
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kRowsPerWarp = 4, kRows = kWarps * kRowsPerWarp;
constexpr int kKeys = kWarp;
constexpr int kMinSplit = 1024, kMaxSplits = 32;

struct Arguments {
  void* out;
  const void* q;
  const int32_t* block_tables;
  const int32_t* query_start;
  const int32_t* context_lens;
  float* partial;  // [sequences, kv heads, splits, kRows, head_dim + 2]; null where no sequence can need it
  int64_t out_stride, q_stride, block_table_stride;
  int32_t sequences, group, splits, split_keys, window;
  float scale, soft_cap;
  kvmesh_paged_kv kv;
};

struct Place { int sequence, first_row, rows, queries, context; };

// The tile of query rows of this block: tiles are numbered through all sequences. False past the last.
__device__ __forceinline__ bool find_tile(const Arguments& a, int index, Place& place) {
  for (int s = 0; s < a.sequences; ++s) {
    int queries = a.query_start[s + 1] - a.query_start[s], rows = queries * a.group;
    int tiles = (rows + kRows - 1) / kRows;
    if (index < tiles) {
      int first = index * kRows;
      place = {s, first, rows - first < kRows ? rows - first : kRows, queries, a.context_lens[s]};
      return true;
    }
    index -= tiles;
  }
  return false;
}

__device__ __forceinline__ bool is_split(const Arguments& a, const Place& place) {
  return place.queries * a.group <= kRows && place.context > a.split_keys;
}

__device__ __forceinline__ float* partial_row(const Arguments& a, int sequence, int head, int split, int row) {
  int64_t index = ((int64_t(sequence) * a.kv.num_kv_heads + head) * a.splits + split) * kRows + row;
  return a.partial + index * (a.kv.head_dim + 2);
}

struct Row { int64_t token; int head, position; };

__device__ __forceinline__ Row row_of(const Arguments& a, const Place& place, int kv_head, int row) {
  int query = (place.first_row + row) / a.group, in_group = (place.first_row + row) % a.group;
  return {int64_t(a.query_start[place.sequence]) + query, kv_head * a.group + in_group,
          place.context - place.queries + query};
}

// Chunks: vectors of 32 columns of head_dim that a lane accumulates.
template <class T, class Kv, int Chunks>
__global__ void attention_kernel(Arguments a) {
  Place place;
  if (!find_tile(a, int(blockIdx.x), place)) return;
  int kv_head = int(blockIdx.y), split = int(blockIdx.z), dim = a.kv.head_dim, pitch = dim + 1;
  bool splitting = is_split(a, place);
  if (split > 0 && !splitting) return;

  float* q = reinterpret_cast<float*>(kvmesh_dynamic_memory);  // [kRows, dim]
  float* k = q + kRows * dim;                                  // [kKeys, pitch]: a pitch of odd words spares bank conflicts
  float* v = k + kKeys * pitch;                                // [kKeys, pitch]
  float* weights = v + kKeys * pitch;                          // [kRows, kKeys]

  float factor = a.soft_cap > 0.0f ? a.scale : a.scale * kLog2E;
  for (int i = int(threadIdx.x); i < kRows * dim; i += kThreads) {
    int r = i / dim;
    Row row = row_of(a, place, kv_head, r < place.rows ? r : place.rows - 1);
    q[i] = to_float(static_cast<const T*>(a.q)[row.token * a.q_stride + int64_t(row.head) * dim + i % dim]) * factor;
  }

  int first_position = row_of(a, place, kv_head, 0).position;
  int last_position = row_of(a, place, kv_head, place.rows - 1).position;
  int begin = a.window > 0 && first_position - a.window + 1 > 0 ? first_position - a.window + 1 : 0;
  int end = last_position + 1;
  if (splitting) {
    begin = begin > split * a.split_keys ? begin : split * a.split_keys;
    end = end < (split + 1) * a.split_keys ? end : (split + 1) * a.split_keys;
  }

  int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  SoftmaxState state[kRowsPerWarp];
  float sums[kRowsPerWarp][Chunks];
  for (int i = 0; i < kRowsPerWarp; ++i) {
    state[i] = {kMaximumOfNothing, 0.0f};
    for (int c = 0; c < Chunks; ++c) sums[i][c] = 0.0f;
  }
  const int32_t* table = a.block_tables + int64_t(place.sequence) * a.block_table_stride;
  for (int tile = begin; tile < end; tile += kKeys) {
    int count = end - tile < kKeys ? end - tile : kKeys;
    __syncthreads();  // the last tile has been read by every warp (and q is written before the first)
    for (int i = int(threadIdx.x); i < kKeys * dim; i += kThreads) {
      int key = i / dim, d = i % dim;
      float k_value = 0.0f, v_value = 0.0f;  // beyond the sequence pages may hold anything, NaN too
      if (key < count) {
        int64_t slot = int64_t(table[(tile + key) / a.kv.tokens_per_block]) * a.kv.tokens_per_block +
                       (tile + key) % a.kv.tokens_per_block;
        k_value = to_float(reinterpret_cast<const Kv*>(slot_row(a.kv, slot, a.kv.k_offset_bytes, kv_head))[d]);
        v_value = to_float(reinterpret_cast<const Kv*>(slot_row(a.kv, slot, a.kv.v_offset_bytes, kv_head))[d]);
      }
      k[key * pitch + d] = k_value;
      v[key * pitch + d] = v_value;
    }
    __syncthreads();
    for (int i = 0; i < kRowsPerWarp; ++i) {
      int r = warp * kRowsPerWarp + i;
      Row row = row_of(a, place, kv_head, r < place.rows ? r : place.rows - 1);
      float score = 0.0f;
      for (int d = 0; d < dim; ++d) score += q[r * dim + d] * k[lane * pitch + d];
      if (a.soft_cap > 0.0f) score = soft_cap_score(score, a.soft_cap);
      bool visible = lane < count && attends(row.position, tile + lane, a.window);
      float best = fmaxf(state[i].maximum, warp_max(visible ? score : kMaximumOfNothing));
      float weight = visible ? exp2f(score - best) : 0.0f;
      float rescale = exp2f(state[i].maximum - best);
      state[i] = {best, state[i].sum * rescale + warp_sum(weight)};
      weights[r * kKeys + lane] = weight;
      __syncwarp();
      for (int c = 0; c < Chunks; ++c) sums[i][c] *= rescale;
      for (int key = 0; key < count; ++key) {
        float w = weights[r * kKeys + key];
        for (int c = 0; c < Chunks; ++c) {
          int d = c * kWarp + lane;
          if (d < dim) sums[i][c] += w * v[key * pitch + d];
        }
      }
    }
  }

  for (int i = 0; i < kRowsPerWarp; ++i) {
    int r = warp * kRowsPerWarp + i;
    if (r >= place.rows) break;
    Row row = row_of(a, place, kv_head, r);
    float* part = splitting ? partial_row(a, place.sequence, kv_head, split, r) : nullptr;
    T* out = static_cast<T*>(a.out) + row.token * a.out_stride + int64_t(row.head) * dim;
    for (int c = 0; c < Chunks; ++c) {
      int d = c * kWarp + lane;
      if (d >= dim) continue;
      if (splitting) part[d] = sums[i][c];
      else out[d] = from_float<T>(sums[i][c] / state[i].sum);
    }
    if (splitting && lane == 0) {
      part[dim] = state[i].maximum;
      part[dim + 1] = state[i].sum;
    }
  }
}

// Merges the splits of one sequence and KV head; a warp takes a row at a time.
template <class T, int Chunks>
__global__ void merge_kernel(Arguments a) {
  int sequence = int(blockIdx.x), kv_head = int(blockIdx.y), dim = a.kv.head_dim;
  int queries = a.query_start[sequence + 1] - a.query_start[sequence];
  Place place{sequence, 0, queries * a.group, queries, a.context_lens[sequence]};
  if (place.rows == 0 || !is_split(a, place)) return;
  int splits = (place.context + a.split_keys - 1) / a.split_keys;
  int lane = int(threadIdx.x) % kWarp;
  for (int r = int(threadIdx.x) / kWarp; r < place.rows; r += kWarps) {
    SoftmaxState total{kMaximumOfNothing, 0.0f};
    float sums[Chunks];
    for (int c = 0; c < Chunks; ++c) sums[c] = 0.0f;
    for (int split = 0; split < splits; ++split) {
      const float* part = partial_row(a, sequence, kv_head, split, r);
      SoftmaxMerge merge = merge_softmax(total, {part[dim], part[dim + 1]});
      total = merge.state;
      for (int c = 0; c < Chunks; ++c) {
        int d = c * kWarp + lane;
        if (d < dim) sums[c] = sums[c] * merge.left + part[d] * merge.right;
      }
    }
    Row row = row_of(a, place, kv_head, r);
    T* out = static_cast<T*>(a.out) + row.token * a.out_stride + int64_t(row.head) * dim;
    for (int c = 0; c < Chunks; ++c) {
      int d = c * kWarp + lane;
      if (d < dim) out[d] = from_float<T>(sums[c] / total.sum);
    }
  }
}

template <class T, class Kv, int Chunks>
int run(const Arguments& a, unsigned tiles, void* stream) {
  int dim = a.kv.head_dim;
  size_t shared = size_t(kRows * dim + 2 * kKeys * (dim + 1) + kRows * kKeys) * sizeof(float);
  unsigned heads = unsigned(a.kv.num_kv_heads);
  int status = launch(attention_kernel<T, Kv, Chunks>, dim3(tiles, heads, unsigned(a.splits)), kThreads, shared, stream, a);
  if (status != KVMESH_OK || a.splits == 1) return status;
  return launch(merge_kernel<T, Chunks>, dim3(unsigned(a.sequences), heads), kThreads, 0, stream, a);
}

template <class T, class Kv>
int run_for_dim(const Arguments& a, unsigned tiles, void* stream) {
  int dim = a.kv.head_dim;
  if (dim <= 64) return run<T, Kv, 2>(a, tiles, stream);
  if (dim <= 128) return run<T, Kv, 4>(a, tiles, stream);
  if (dim <= 256) return run<T, Kv, 8>(a, tiles, stream);
  return KVMESH_BAD_SHAPE;
}

}  // namespace
KVM_END

using namespace kvmesh;

KVMESH_API int kvmesh_cuda_paged_attention(void* out, int64_t out_stride, const void* q, int64_t q_stride,
                                           int32_t dtype, const kvmesh_paged_kv* kv, const int32_t* block_tables,
                                           int64_t block_table_stride, const int32_t* query_start,
                                           const int32_t* context_lens, int64_t tokens, int32_t sequences,
                                           int32_t num_heads, float scale, int32_t window, float soft_cap,
                                           void* stream) {
  if (kv->head_dim < 1 || kv->tokens_per_block < 1 || kv->num_kv_heads < 1 || num_heads % kv->num_kv_heads != 0)
    return KVMESH_BAD_SHAPE;
  int64_t max_keys = block_table_stride * kv->tokens_per_block;
  int64_t split_keys = (max_keys + kMaxSplits - 1) / kMaxSplits;
  split_keys = split_keys < kMinSplit ? kMinSplit : (split_keys + kKeys - 1) / kKeys * kKeys;
  int32_t splits = int32_t((max_keys + split_keys - 1) / split_keys);
  int32_t group = num_heads / kv->num_kv_heads;
  Arguments a{out,        q,         block_tables,       query_start, context_lens, nullptr,            out_stride, q_stride,
              block_table_stride, sequences, group, splits < 1 ? 1 : splits, int32_t(split_keys), window, scale, soft_cap, *kv};
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (a.splits > 1) {
    size_t rows = size_t(sequences) * kv->num_kv_heads * a.splits * kRows;
    void* memory = nullptr;
    if (cudaMallocAsync(&memory, rows * (kv->head_dim + 2) * sizeof(float), on) != cudaSuccess) return KVMESH_NO_MEMORY;
    a.partial = static_cast<float*>(memory);
  }
  // Every sequence adds at most one part-filled tile; blocks beyond the last tile return at once.
  unsigned tiles = unsigned(tokens * group / kRows + sequences);
  int status = with_compute_type(dtype, [&](auto type) {
    return with_kv_type(kv->dtype, [&](auto kv_type) {
      return run_for_dim<decltype(type), decltype(kv_type)>(a, tiles, stream);
    });
  });
  if (a.partial != nullptr && cudaFreeAsync(a.partial, on) != cudaSuccess) return KVMESH_DEVICE_ERROR;
  return status;
}
