// The C functions of libkvmesh_cpu.so; the Python operations of the same names document their arguments.
#pragma once

#include "../include/kvmesh_kernels.h"

#define KVMESH_API extern "C" __attribute__((visibility("default")))

KVMESH_API int kvmesh_cpu_abi_version();
KVMESH_API const char* kvmesh_cpu_level();
KVMESH_API int kvmesh_cpu_set_level(const char* name);
KVMESH_API int kvmesh_cpu_num_threads();
KVMESH_API void kvmesh_cpu_set_num_threads(int count);
KVMESH_API const kvmesh_entry* kvmesh_cpu_entry(const char* name);

KVMESH_API int kvmesh_cpu_rms_norm(void* out, int64_t out_stride, const void* x, int64_t x_stride, const void* weight,
                                   int64_t tokens, int64_t groups, int64_t width, float eps, float weight_offset,
                                   int32_t dtype);
KVMESH_API int kvmesh_cpu_add_rms_norm(void* out, int64_t out_stride, void* residual, int64_t residual_stride,
                                       const void* x, int64_t x_stride, const void* weight, int64_t tokens,
                                       int64_t width, float eps, float weight_offset, int32_t dtype);
KVMESH_API int kvmesh_cpu_silu_and_mul(void* out, int64_t out_stride, const void* gate_up, int64_t gate_up_stride,
                                       int64_t tokens, int64_t width, int32_t dtype);
KVMESH_API int kvmesh_cpu_gelu_tanh_and_mul(void* out, int64_t out_stride, const void* gate_up,
                                            int64_t gate_up_stride, int64_t tokens, int64_t width, int32_t dtype);
KVMESH_API int kvmesh_cpu_store_kv(const void* k, int64_t k_stride, const void* v, int64_t v_stride, int32_t dtype,
                                   const kvmesh_paged_kv* kv, const int64_t* slots, int64_t tokens);
KVMESH_API int kvmesh_cpu_rope_store_kv(void* q, int64_t q_stride, void* k, int64_t k_stride, const void* v,
                                        int64_t v_stride, int32_t dtype, const float* cos, const float* sin,
                                        const int32_t* positions, const kvmesh_paged_kv* kv, const int64_t* slots,
                                        int64_t tokens, int32_t q_heads, int32_t rotary_half);
KVMESH_API int kvmesh_cpu_paged_attention(void* out, int64_t out_stride, const void* q, int64_t q_stride, int32_t dtype,
                                          const kvmesh_paged_kv* kv, const int32_t* block_tables,
                                          int64_t block_table_stride, const int32_t* query_start,
                                          const int32_t* context_lens, int64_t tokens, int32_t sequences,
                                          int32_t num_heads, float scale, int32_t window, float soft_cap);
KVMESH_API int kvmesh_cpu_philox(uint32_t* out, uint64_t key, uint64_t counter_low, uint64_t counter_high,
                                 int64_t blocks, int32_t rounds);

KVMESH_API int kvmesh_cpu_gather_pages(uint8_t* destination, const uint8_t* base, const int32_t* ids, int64_t count,
                                       int64_t page_bytes, int64_t stride_bytes);
KVMESH_API int kvmesh_cpu_scatter_pages(uint8_t* base, const uint8_t* source, const int32_t* ids, int64_t count,
                                        int64_t page_bytes, int64_t stride_bytes);
KVMESH_API int kvmesh_cpu_copy_pages(uint8_t* to_base, const int32_t* to_ids, int64_t to_stride_bytes,
                                     const uint8_t* from_base, const int32_t* from_ids, int64_t from_stride_bytes,
                                     int64_t count, int64_t page_bytes);
KVMESH_API int kvmesh_cpu_copy_pages_checksummed(uint64_t* sums, uint8_t* to_base, const int32_t* to_ids,
                                                 int64_t to_stride_bytes, const uint8_t* from_base,
                                                 const int32_t* from_ids, int64_t from_stride_bytes, int64_t count,
                                                 int64_t page_bytes);
KVMESH_API int kvmesh_cpu_gather_lists(uint8_t* destination, const kvmesh_page_list* lists, int64_t num_lists);
KVMESH_API int kvmesh_cpu_scatter_lists(uint64_t* sums, const uint8_t* source, const kvmesh_page_list* lists,
                                        int64_t num_lists);
KVMESH_API int kvmesh_cpu_checksum_pages(uint64_t* sums, const uint8_t* base, const int32_t* ids, int64_t count,
                                         int64_t page_bytes, int64_t stride_bytes);

KVMESH_API int64_t kvmesh_cpu_packed_bytes(int32_t kind, int64_t rows, int64_t columns);
KVMESH_API int kvmesh_cpu_pack_weight(uint8_t* panels, const uint8_t* blocks, int32_t kind, int64_t rows,
                                      int64_t columns);
KVMESH_API int kvmesh_cpu_quantized_linear(float* out, int64_t out_stride, const float* x, int64_t x_stride,
                                           const uint8_t* panels, int32_t kind, int64_t tokens, int64_t rows,
                                           int64_t columns);
KVMESH_API int kvmesh_cpu_dequantize_rows(float* out, int64_t out_stride, const uint8_t* panels, int32_t kind,
                                          const int64_t* row_ids, int64_t count, int64_t rows, int64_t columns);
