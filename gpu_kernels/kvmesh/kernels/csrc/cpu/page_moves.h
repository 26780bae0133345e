// How pages move in parallel pieces: shared by the operations on one list of pages and on several.
#pragma once

#include <string.h>

#include "level.h"
#include "thread_pool.h"

namespace kvmesh {

// Large enough that claiming a piece costs nothing next to copying it, small enough to share one page.
inline constexpr int64_t kPieceBytes = 256 << 10;
// Several small pages are claimed together.
inline constexpr int64_t kTaskBytes = 64 << 10;
// Below this a wake-up costs more than a second core saves.
inline constexpr int64_t kParallelBytes = 1 << 20;

// Copies `count` pages; page i goes from source(i) to destination(i). Few pages are read again while they are in the
// caches, many are not: those pass them by.
template <class Source, class Destination>
void move_pages(int64_t count, int64_t page_bytes, Source source, Destination destination) {
  if (count * page_bytes < kParallelBytes) {
    for (int64_t i = 0; i < count; ++i) memcpy(destination(i), source(i), size_t(page_bytes));
    return;
  }
  auto copy = level().stream_copy;
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

}  // namespace kvmesh
