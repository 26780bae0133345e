// What the CUDA sources share: launching, dtype dispatch, exported names, shared memory.
#pragma once

#include <cuda_runtime.h>

#include "../core/float_formats.h"
#include "../include/kvmesh_kernels.h"

#define KVMESH_API extern "C" __attribute__((visibility("default")))

#if defined(__CUDACC__)
extern __shared__ unsigned char kvmesh_dynamic_memory[];
#endif

KVM_BEGIN

constexpr int kWarp = 32;

// Enqueues a kernel; an empty grid is no work. Returns a kvmesh_status.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, unsigned block, size_t shared_bytes, void* stream,
           Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return KVMESH_OK;
  constexpr size_t kDefaultShared = 48 << 10;
  if (shared_bytes > kDefaultShared &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)) != cudaSuccess)
    return KVMESH_DEVICE_ERROR;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...) == cudaSuccess ? KVMESH_OK : KVMESH_DEVICE_ERROR;
}

// Calls visit with a value of the storage type that `dtype` names.
template <class Visit>
int with_compute_type(int32_t dtype, Visit visit) {
  switch (dtype) {
    case kFloat32: return visit(Float32{});
    case kFloat16: return visit(Float16{});
    case kBFloat16: return visit(BFloat16{});
    default: return KVMESH_BAD_DTYPE;
  }
}
template <class Visit>
int with_kv_type(int32_t dtype, Visit visit) {
  switch (dtype) {
    case kFp8E4M3: return visit(Fp8E4M3{});
    case kFp8E5M2: return visit(Fp8E5M2{});
    default: return with_compute_type(dtype, visit);
  }
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

KVM_END
