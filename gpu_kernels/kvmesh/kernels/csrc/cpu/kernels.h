// Declarations of one level's kernels, inside that level's namespace; level.h says what they do.
#pragma once

#include "../core/platform.h"
#include "level.h"

KVM_BEGIN

void rms_norm(const NormArgs& a, int32_t dtype, int64_t begin, int64_t end);
void silu_and_mul(const GateArgs& a, int32_t dtype, int64_t begin, int64_t end);
void gelu_tanh_and_mul(const GateArgs& a, int32_t dtype, int64_t begin, int64_t end);
void rope(const RopeArgs& a, int32_t dtype, int64_t begin, int64_t end);
void store_kv(const StoreArgs& a, int64_t begin, int64_t end);

size_t decode_scratch_bytes(const AttentionArgs& a);
size_t prefill_scratch_bytes(const AttentionArgs& a);
size_t attention_scratch_bytes(const AttentionArgs& a);
size_t partial_floats(const AttentionArgs& a, int rows);
void attention_merge(const AttentionArgs& a, const AttentionTask* parts, int count, void* scratch);
void attention_decode(const AttentionArgs& a, const AttentionTask& task, void* scratch);
void attention_prefill(const AttentionArgs& a, const AttentionTask& task, void* scratch);

void prepare_linear(const LinearArgs& a, int32_t kind, float* packed_x, float* block_sums);
void linear_q4_1(const LinearArgs& a, int64_t panel_begin, int64_t panel_end);
void linear_q8_0(const LinearArgs& a, int64_t panel_begin, int64_t panel_end);

void stream_copy(uint8_t* to, const uint8_t* from, size_t bytes);
void checksum(uint64_t* sums, const uint8_t* const* pages, size_t count, size_t bytes);
void copy_checksum(uint64_t* sums, uint8_t* const* to, const uint8_t* const* from, size_t count, size_t bytes,
                   bool stream);

KVM_END
