// Addresses inside paged KV memory: which byte holds head h of token t.
#pragma once

#include "../include/kvmesh_kernels.h"
#include "float_formats.h"

KVM_BEGIN

// The first byte of K (or V, by `offset`) of one head in one page: tokens_per_block rows of head_dim elements.
KVM_HD uint8_t* page_head(const kvmesh_paged_kv& kv, int64_t page, int64_t offset, int64_t head) {
  int64_t head_bytes = int64_t(kv.tokens_per_block) * kv.head_dim * dtype_bytes(kv.dtype);
  return (uint8_t*)(kv.base + page * kv.page_stride_bytes + offset + head * head_bytes);
}

// The row of K (or V) for a slot (page * tokens_per_block + token within the page) and head.
KVM_HD uint8_t* slot_row(const kvmesh_paged_kv& kv, int64_t slot, int64_t offset, int64_t head) {
  int64_t page = slot / kv.tokens_per_block, token = slot % kv.tokens_per_block;
  return page_head(kv, page, offset, head) + token * kv.head_dim * dtype_bytes(kv.dtype);
}

KVM_END
