// Several lists of pages at once: gathered into one run of bytes, and scattered from one, with or without checksums.
#include "../include/kvmesh_kernels.h"
#include "exports.h"
#include "page_moves.h"

namespace {

bool well_formed(const kvmesh_page_list* lists, int64_t num_lists) {
  if (num_lists < 0) return false;
  for (int64_t i = 0; i < num_lists; ++i)
    if (lists[i].count < 0 || lists[i].item_bytes <= 0) return false;
  return true;
}

}  // namespace

int kvmesh_cpu_gather_lists(uint8_t* destination, const kvmesh_page_list* lists, int64_t num_lists) {
  if (!well_formed(lists, num_lists)) return KVMESH_BAD_SHAPE;
  for (int64_t number = 0; number < num_lists; ++number) {
    const kvmesh_page_list& list = lists[number];
    auto base = reinterpret_cast<const uint8_t*>(list.base);
    auto ids = reinterpret_cast<const int32_t*>(list.ids);
    int64_t bytes = list.item_bytes;
    // Through the caches: the run is read again at once.
    kvmesh::in_groups(list.count, bytes, [=](int64_t first, size_t items) {
      for (int64_t i = first; i < first + int64_t(items); ++i)
        memcpy(destination + i * bytes, base + ids[i] * list.stride_bytes, size_t(bytes));
    });
    destination += list.count * bytes;
  }
  return KVMESH_OK;
}

int kvmesh_cpu_scatter_lists(uint64_t* sums, const uint8_t* source, const kvmesh_page_list* lists, int64_t num_lists) {
  if (!well_formed(lists, num_lists)) return KVMESH_BAD_SHAPE;
  auto copy = kvmesh::level().copy_checksum;
  for (int64_t number = 0; number < num_lists; ++number) {
    const kvmesh_page_list& list = lists[number];
    auto base = reinterpret_cast<uint8_t*>(list.base);
    auto ids = reinterpret_cast<const int32_t*>(list.ids);
    int64_t bytes = list.item_bytes;
    if (sums == nullptr) {
      kvmesh_cpu_scatter_pages(base, source, ids, list.count, bytes, list.stride_bytes);
    } else {
      bool many = list.count * bytes >= kvmesh::kParallelBytes;
      kvmesh::in_groups(list.count, bytes, [=](int64_t first, size_t items) {
        uint8_t* to[kvmesh::kSideBySide];
        const uint8_t* from[kvmesh::kSideBySide];
        for (size_t i = 0; i < items; ++i) {
          to[i] = base + ids[first + int64_t(i)] * list.stride_bytes;
          from[i] = source + (first + int64_t(i)) * bytes;
        }
        copy(sums + first, to, from, items, size_t(bytes), many);
      });
      sums += list.count;
    }
    source += list.count * bytes;
  }
  return KVMESH_OK;
}
