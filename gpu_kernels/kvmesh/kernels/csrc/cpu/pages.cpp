// Page movement: gather, scatter, copy and checksum of whole pages, in parallel pieces.
#include <string.h>

#include "../include/kvmesh_kernels.h"
#include "exports.h"
#include "level.h"
#include "thread_pool.h"

namespace kvmesh {
namespace {

// Large enough that claiming a piece costs nothing next to copying it, small enough to share one page.
constexpr int64_t kPieceBytes = 256 << 10;
// Several small pages are claimed together.
constexpr int64_t kTaskBytes = 64 << 10;
// Below this a wake-up costs more than a second core saves.
constexpr int64_t kParallelBytes = 1 << 20;

// Copies `count` pages; page i goes from source(i) to destination(i). Few pages are read again while they are in the
// caches, many are not: those pass them by.
template <class Source, class Destination>
void move_pages(int64_t count, int64_t page_bytes, Source source, Destination destination) {
  if (count * page_bytes < kParallelBytes) {
    for (int64_t i = 0; i < count; ++i) memcpy(destination(i), source(i), size_t(page_bytes));
    return;
  }
  auto copy = kvmesh::level().stream_copy;
  if (page_bytes < kPieceBytes / 2) {
    int64_t pages_per_task = page_bytes < kTaskBytes ? kTaskBytes / page_bytes : 1;
    auto several = [&](int64_t task) {
      int64_t first = task * pages_per_task, end = first + pages_per_task;
      for (int64_t i = first; i < (end < count ? end : count); ++i) copy(destination(i), source(i), size_t(page_bytes));
    };
    return parallel_for((count + pages_per_task - 1) / pages_per_task, several);
  }
  int64_t pieces_per_page = (page_bytes + kPieceBytes - 1) / kPieceBytes;
  auto piece = [&](int64_t task) {
    int64_t page = task / pieces_per_page, offset = task % pieces_per_page * kPieceBytes;
    int64_t bytes = page_bytes - offset < kPieceBytes ? page_bytes - offset : kPieceBytes;
    copy(destination(page) + offset, source(page) + offset, size_t(bytes));
  };
  parallel_for(count * pieces_per_page, piece);
}

// Runs task(first, pages) over all pages, kSideBySide of them at a time where that leaves every thread its share.
template <class Task>
void in_groups(int64_t count, int64_t page_bytes, Task task) {
  int64_t side = count >= 2 * int64_t(kSideBySide) * thread_count() ? int64_t(kSideBySide) : 1;
  if (count * page_bytes < kParallelBytes) side = int64_t(kSideBySide);
  auto group = [&](int64_t number) {
    int64_t first = number * side;
    task(first, size_t(count - first < side ? count - first : side));
  };
  int64_t groups = (count + side - 1) / side;
  if (count * page_bytes >= kParallelBytes) return parallel_for(groups, group);
  for (int64_t number = 0; number < groups; ++number) group(number);
}

}  // namespace
}  // namespace kvmesh

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
