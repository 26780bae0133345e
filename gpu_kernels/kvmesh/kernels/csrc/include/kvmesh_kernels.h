// The C interface of the kernel libraries. Plain pointers and integers; the caller allocates every output.
//
// libkvmesh_cpu.so exports kvmesh_cpu_<op>; libkvmesh_cuda.so exports kvmesh_cuda_<op> with one more argument at the
// end, the CUDA stream. Strides count elements (not bytes) between consecutive tokens; within a token the data is
// contiguous. dtype codes: 0 float32, 1 float16, 2 bfloat16, 3 fp8 E4M3, 4 fp8 E5M2 (fp8 for KV pages only).
// Functions return 0, or a negative kvmesh_status. They never throw and may be called from any thread.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum kvmesh_status {
  KVMESH_OK = 0,
  KVMESH_BAD_DTYPE = -1,
  KVMESH_BAD_SHAPE = -2,
  KVMESH_NO_MEMORY = -3,
  KVMESH_DEVICE_ERROR = -4
};

#define KVMESH_ABI_VERSION 3

// One layer of a paged KV pool. Page p starts at base + p * page_stride_bytes; inside it K is a contiguous
// [num_kv_heads, tokens_per_block, head_dim] array at k_offset_bytes, and V the same at v_offset_bytes.
typedef struct {
  int64_t base;
  int64_t page_stride_bytes;
  int64_t k_offset_bytes;
  int64_t v_offset_bytes;
  int32_t num_kv_heads;
  int32_t tokens_per_block;
  int32_t head_dim;
  int32_t dtype;
} kvmesh_paged_kv;

// `count` items of `item_bytes` each: item i lies at base + ids[i] * stride_bytes.
typedef struct {
  int64_t base;
  int64_t ids;  // address of int32_t [count]
  int64_t count;
  int64_t stride_bytes;
  int64_t item_bytes;
} kvmesh_page_list;

// A second way to call an operation: all its arguments in an array of 8-byte values, integers and pointers in `i`,
// floating point in `f`. kvmesh_cpu_entry(name) finds it; `signature` has one letter per argument, i or f. Calls can so
// be made, kept and repeated without knowing the C types.
typedef union {
  int64_t i;
  double f;
} kvmesh_value;

typedef struct {
  const char* name;
  const char* signature;
  int (*call)(const kvmesh_value* arguments);
} kvmesh_entry;

#define KVMESH_MAX_ARGUMENTS 16

#ifdef __cplusplus
}
#endif
