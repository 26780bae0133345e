// Page movement inside GPU memory. Page ids are in GPU memory too; a grid row moves one page.
#include "common.cuh"

KVM_BEGIN
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBytesPerBlock = 64 << 10;

__device__ __forceinline__ void copy_bytes(uint8_t* to, const uint8_t* from, int64_t bytes) {
  int64_t thread = int64_t(blockIdx.y) * blockDim.x + threadIdx.x, step = int64_t(gridDim.y) * blockDim.x;
  bool aligned = ((uintptr_t(to) | uintptr_t(from)) & 15) == 0;
  int64_t vectors = aligned ? bytes / 16 : 0;
  for (int64_t i = thread; i < vectors; i += step)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (int64_t i = vectors * 16 + thread; i < bytes; i += step) to[i] = from[i];
}

// A null id array numbers its pages 0, 1, 2, ...
__global__ void move_kernel(uint8_t* to, const int32_t* to_ids, int64_t to_stride, const uint8_t* from,
                            const int32_t* from_ids, int64_t from_stride, int64_t page_bytes) {
  int64_t to_page = to_ids != nullptr ? to_ids[blockIdx.x] : int64_t(blockIdx.x);
  int64_t from_page = from_ids != nullptr ? from_ids[blockIdx.x] : int64_t(blockIdx.x);
  copy_bytes(to + to_page * to_stride, from + from_page * from_stride, page_bytes);
}

int move(uint8_t* to, const int32_t* to_ids, int64_t to_stride, const uint8_t* from, const int32_t* from_ids,
         int64_t from_stride, int64_t count, int64_t page_bytes, void* stream) {
  if (count < 0 || page_bytes <= 0) return KVMESH_BAD_SHAPE;
  unsigned pieces = unsigned((page_bytes + kBytesPerBlock - 1) / kBytesPerBlock);
  return launch(move_kernel, dim3(unsigned(count), pieces), kThreads, 0, stream, to, to_ids, to_stride, from, from_ids,
                from_stride, page_bytes);
}

}  // namespace
KVM_END

KVMESH_API int kvmesh_cuda_gather_pages(uint8_t* destination, const uint8_t* base, const int32_t* ids, int64_t count,
                                        int64_t page_bytes, int64_t stride_bytes, void* stream) {
  return kvmesh::move(destination, nullptr, page_bytes, base, ids, stride_bytes, count, page_bytes, stream);
}

KVMESH_API int kvmesh_cuda_scatter_pages(uint8_t* base, const uint8_t* source, const int32_t* ids, int64_t count,
                                         int64_t page_bytes, int64_t stride_bytes, void* stream) {
  return kvmesh::move(base, ids, stride_bytes, source, nullptr, page_bytes, count, page_bytes, stream);
}

KVMESH_API int kvmesh_cuda_copy_pages(uint8_t* to_base, const int32_t* to_ids, int64_t to_stride_bytes,
                                      const uint8_t* from_base, const int32_t* from_ids, int64_t from_stride_bytes,
                                      int64_t count, int64_t page_bytes, void* stream) {
  return kvmesh::move(to_base, to_ids, to_stride_bytes, from_base, from_ids, from_stride_bytes, count, page_bytes,
                      stream);
}
