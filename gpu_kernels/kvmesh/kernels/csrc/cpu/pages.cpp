// Page movement: gather, scatter, copy and checksum of whole pages, in parallel pieces.
#include "../include/kvmesh_kernels.h"
#include "exports.h"
#include "page_moves.h"

using kvmesh::move_pages;

int kvmesh_cpu_gather_pages(uint8_t* destination, const uint8_t* base, const int32_t* ids, int64_t count,
                                       int64_t page_bytes, int64_t stride_bytes) {
  if (count < 0 || page_bytes <= 0) return KVMESH_BAD_SHAPE;
  move_pages(
      count, page_bytes, [=](int64_t i) { return base + ids[i] * stride_bytes; },
      [=](int64_t i) { return destination + i * page_bytes; });
  return KVMESH_OK;
}

int kvmesh_cpu_scatter_pages(uint8_t* base, const uint8_t* source, const int32_t* ids, int64_t count,
                                        int64_t page_bytes, int64_t stride_bytes) {
  if (count < 0 || page_bytes <= 0) return KVMESH_BAD_SHAPE;
  move_pages(
      count, page_bytes, [=](int64_t i) { return source + i * page_bytes; },
      [=](int64_t i) { return base + ids[i] * stride_bytes; });
  return KVMESH_OK;
}

int kvmesh_cpu_copy_pages(uint8_t* to_base, const int32_t* to_ids, int64_t to_stride_bytes, const uint8_t* from_base,
                          const int32_t* from_ids, int64_t from_stride_bytes, int64_t count, int64_t page_bytes) {
  if (count < 0 || page_bytes <= 0) return KVMESH_BAD_SHAPE;
  move_pages(
      count, page_bytes, [=](int64_t i) { return from_base + from_ids[i] * from_stride_bytes; },
      [=](int64_t i) { return to_base + to_ids[i] * to_stride_bytes; });
  return KVMESH_OK;
}

int kvmesh_cpu_copy_pages_checksummed(uint64_t* sums, uint8_t* to_base, const int32_t* to_ids, int64_t to_stride_bytes,
                                      const uint8_t* from_base, const int32_t* from_ids, int64_t from_stride_bytes,
                                      int64_t count, int64_t page_bytes) {
  if (count < 0 || page_bytes <= 0) return KVMESH_BAD_SHAPE;
  auto copy = kvmesh::level().copy_checksum;
  // Few pages are read again while they are in the caches, many are not.
  bool many = count * page_bytes >= kvmesh::kParallelBytes;
  kvmesh::in_groups(count, page_bytes, [=](int64_t first, size_t pages) {
    uint8_t* to[kvmesh::kSideBySide];
    const uint8_t* from[kvmesh::kSideBySide];
    for (size_t i = 0; i < pages; ++i) {
      to[i] = to_base + to_ids[first + int64_t(i)] * to_stride_bytes;
      from[i] = from_base + from_ids[first + int64_t(i)] * from_stride_bytes;
    }
    copy(sums + first, to, from, pages, size_t(page_bytes), many);
  });
  return KVMESH_OK;
}

int kvmesh_cpu_checksum_pages(uint64_t* sums, const uint8_t* base, const int32_t* ids, int64_t count,
                                         int64_t page_bytes, int64_t stride_bytes) {
  if (count < 0 || page_bytes <= 0) return KVMESH_BAD_SHAPE;
  auto checksum = kvmesh::level().checksum;
  kvmesh::in_groups(count, page_bytes, [=](int64_t first, size_t pages) {
    const uint8_t* from[kvmesh::kSideBySide];
    for (size_t i = 0; i < pages; ++i) from[i] = base + ids[first + int64_t(i)] * stride_bytes;
    checksum(sums + first, from, pages, size_t(page_bytes));
  });
  return KVMESH_OK;
}
