// The table of hot routines that every instruction-set level provides, and its choice at run time.
#pragma once

#include <stddef.h>

#include "../include/kvmesh_kernels.h"

namespace kvmesh {

// Row-wise work over [tokens, width] matrices; strides are elements between tokens.
struct NormArgs {
  void* out;
  void* residual;  // null: no residual addition
  const void* x;
  const void* weight;
  int64_t out_stride, residual_stride, x_stride, groups, width;  // groups: rows of one token (heads)
  float eps, weight_offset;  // every weight is weight_offset + weight
};

struct GateArgs {
  void* out;
  const void* gate_up;
  int64_t out_stride, gate_up_stride, width;
};

struct StoreArgs {
  const void* k;
  const void* v;
  const int64_t* slots;
  int64_t k_stride, v_stride;
  int32_t input_dtype;
  kvmesh_paged_kv kv;
};

struct RopeArgs {
  void* q;
  void* k;
  const float* cos;
  const float* sin;
  const int32_t* positions;
  int64_t q_stride, k_stride;
  int32_t q_heads, k_heads, head_dim, rotary_half;
};

struct AttentionArgs {
  void* out;
  const void* q;
  const int32_t* block_tables;
  const int32_t* query_start;
  const int32_t* context_lens;
  int64_t out_stride, q_stride, block_table_stride;
  int32_t dtype, num_heads, window;
  float scale, soft_cap;
  kvmesh_paged_kv kv;
};

// A part of one sequence's attention: `rows` of the (query, grouped head) pairs of one KV head, keys
// [key_begin, key_end). With `partial` null the result is final and goes to `out`; else the unnormalised rows and
// their softmax states go there, for merge_attention.
struct AttentionTask {
  int32_t sequence, kv_head, row_begin, row_end, key_begin, key_end;
  bool blocked;  // many rows: attention_prefill; else attention_decode
  float* partial;
};

// Up to this many rows attention runs as decode (lanes along head_dim); more fill the lanes themselves.
constexpr int kDecodeRows = 16;

struct LinearArgs {
  float* out;
  const float* x;
  const float* packed_x;    // x in tiles of a few tokens, [columns][tokens of the tile]: prepare_linear
  const float* block_sums;  // [tokens, columns / 32], the sums of x that a block's minimum multiplies
  const uint8_t* panels;
  int64_t out_stride, x_stride, tokens, rows, columns;
};

constexpr size_t kSideBySide = 4;  // pages of one checksum task

struct LevelTable {
  const char* name;
  void (*rms_norm)(const NormArgs&, int32_t dtype, int64_t begin, int64_t end);
  void (*silu_and_mul)(const GateArgs&, int32_t dtype, int64_t begin, int64_t end);
  void (*gelu_tanh_and_mul)(const GateArgs&, int32_t dtype, int64_t begin, int64_t end);
  void (*rope)(const RopeArgs&, int32_t dtype, int64_t begin, int64_t end);
  void (*store_kv)(const StoreArgs&, int64_t begin, int64_t end);
  int attention_tile_rows;  // query rows of one prefill task at most
  size_t (*attention_scratch_bytes)(const AttentionArgs&);
  size_t (*partial_floats)(const AttentionArgs&, int rows);  // size of a decode task's `partial`
  void (*attention_decode)(const AttentionArgs&, const AttentionTask&, void* scratch);
  void (*attention_prefill)(const AttentionArgs&, const AttentionTask&, void* scratch);
  void (*attention_merge)(const AttentionArgs&, const AttentionTask* parts, int count, void* scratch);
  void (*prepare_linear)(const LinearArgs&, int32_t kind, float* packed_x, float* block_sums);
  void (*linear_q4_1)(const LinearArgs&, int64_t panel_begin, int64_t panel_end);
  void (*linear_q8_0)(const LinearArgs&, int64_t panel_begin, int64_t panel_end);
  void (*stream_copy)(uint8_t* to, const uint8_t* from, size_t bytes);
  // XXH3-64 (seed 0) of up to kSideBySide pages of `bytes` each, alone or while they are copied, past the caches with
  // `stream`. A full number is fastest.
  void (*checksum)(uint64_t* sums, const uint8_t* const* pages, size_t count, size_t bytes);
  void (*copy_checksum)(uint64_t* sums, uint8_t* const* to, const uint8_t* const* from, size_t count, size_t bytes,
                        bool stream);
};

// The level in use: the best one of this CPU, unless choose_level took another.
const LevelTable& level();

// Takes the named level (baseline, avx2, avx512). False, changing nothing, where the CPU lacks it. Not while an
// operation runs.
bool choose_level(const char* name);

}  // namespace kvmesh
