// The exported row-wise operations: checks, the split over threads, and the call of this CPU's level.
#include "exports.h"

#include "../core/float_formats.h"
#include "../core/philox.h"
#include "level.h"
#include "thread_pool.h"

namespace kvmesh {
namespace {

// Bytes of one matrix below which a second thread's wake-up costs more than it saves.
constexpr int64_t kParallelBytes = 128 << 10;

bool is_compute_dtype(int32_t dtype) { return dtype >= kFloat32 && dtype <= kBFloat16; }
bool is_kv_dtype(int32_t dtype) { return dtype >= kFloat32 && dtype <= kFp8E5M2; }

// Splits `tokens` rows of `row_bytes` each into a few tasks per thread.
template <class F>
void for_token_ranges(int64_t tokens, int64_t row_bytes, F body) {
  if (tokens * row_bytes < kParallelBytes || thread_count() == 1) return body(int64_t(0), tokens);
  int64_t chunk = (tokens + 4 * thread_count() - 1) / (4 * thread_count());
  auto task = [&](int64_t i) {
    int64_t begin = i * chunk, end = begin + chunk < tokens ? begin + chunk : tokens;
    body(begin, end);
  };
  parallel_for((tokens + chunk - 1) / chunk, task);
}

}  // namespace
}  // namespace kvmesh

using namespace kvmesh;

int kvmesh_cpu_abi_version() { return KVMESH_ABI_VERSION; }
const char* kvmesh_cpu_level() { return level().name; }
int kvmesh_cpu_set_level(const char* name) { return choose_level(name) ? KVMESH_OK : KVMESH_BAD_SHAPE; }
int kvmesh_cpu_num_threads() { return thread_count(); }
void kvmesh_cpu_set_num_threads(int count) { set_thread_count(count); }

int kvmesh_cpu_rms_norm(void* out, int64_t out_stride, const void* x, int64_t x_stride, const void* weight,
                                   int64_t tokens, int64_t groups, int64_t width, float eps, float weight_offset,
                                   int32_t dtype) {
  if (!is_compute_dtype(dtype)) return KVMESH_BAD_DTYPE;
  NormArgs args{out, nullptr, x, weight, out_stride, 0, x_stride, groups, width, eps, weight_offset};
  for_token_ranges(tokens, args.groups * width * dtype_bytes(dtype),
                   [&](int64_t begin, int64_t end) { level().rms_norm(args, dtype, begin, end); });
  return KVMESH_OK;
}

int kvmesh_cpu_add_rms_norm(void* out, int64_t out_stride, void* residual, int64_t residual_stride,
                                       const void* x, int64_t x_stride, const void* weight, int64_t tokens,
                                       int64_t width, float eps, float weight_offset, int32_t dtype) {
  if (!is_compute_dtype(dtype)) return KVMESH_BAD_DTYPE;
  NormArgs args{out, residual, x, weight, out_stride, residual_stride, x_stride, 1, width, eps, weight_offset};
  for_token_ranges(tokens, args.groups * width * dtype_bytes(dtype),
                   [&](int64_t begin, int64_t end) { level().rms_norm(args, dtype, begin, end); });
  return KVMESH_OK;
}

int kvmesh_cpu_silu_and_mul(void* out, int64_t out_stride, const void* gate_up, int64_t gate_up_stride,
                                       int64_t tokens, int64_t width, int32_t dtype) {
  if (!is_compute_dtype(dtype)) return KVMESH_BAD_DTYPE;
  GateArgs args{out, gate_up, out_stride, gate_up_stride, width};
  for_token_ranges(tokens, 2 * width * dtype_bytes(dtype),
                   [&](int64_t begin, int64_t end) { level().silu_and_mul(args, dtype, begin, end); });
  return KVMESH_OK;
}

int kvmesh_cpu_gelu_tanh_and_mul(void* out, int64_t out_stride, const void* gate_up, int64_t gate_up_stride,
                                            int64_t tokens, int64_t width, int32_t dtype) {
  if (!is_compute_dtype(dtype)) return KVMESH_BAD_DTYPE;
  GateArgs args{out, gate_up, out_stride, gate_up_stride, width};
  for_token_ranges(tokens, 2 * width * dtype_bytes(dtype),
                   [&](int64_t begin, int64_t end) { level().gelu_tanh_and_mul(args, dtype, begin, end); });
  return KVMESH_OK;
}

int kvmesh_cpu_store_kv(const void* k, int64_t k_stride, const void* v, int64_t v_stride, int32_t dtype,
                                   const kvmesh_paged_kv* kv, const int64_t* slots, int64_t tokens) {
  if (!is_compute_dtype(dtype) || !is_kv_dtype(kv->dtype)) return KVMESH_BAD_DTYPE;
  StoreArgs args{k, v, slots, k_stride, v_stride, dtype, *kv};
  for_token_ranges(tokens, int64_t(2) * kv->num_kv_heads * kv->head_dim * dtype_bytes(dtype),
                   [&](int64_t begin, int64_t end) { level().store_kv(args, begin, end); });
  return KVMESH_OK;
}

int kvmesh_cpu_rope_store_kv(void* q, int64_t q_stride, void* k, int64_t k_stride, const void* v,
                                        int64_t v_stride, int32_t dtype, const float* cos, const float* sin,
                                        const int32_t* positions, const kvmesh_paged_kv* kv, const int64_t* slots,
                                        int64_t tokens, int32_t q_heads, int32_t rotary_half) {
  if (!is_compute_dtype(dtype) || !is_kv_dtype(kv->dtype)) return KVMESH_BAD_DTYPE;
  if (2 * rotary_half > kv->head_dim) return KVMESH_BAD_SHAPE;
  RopeArgs rope_args{q, k, cos, sin, positions, q_stride, k_stride, q_heads, kv->num_kv_heads, kv->head_dim, rotary_half};
  StoreArgs store_args{k, v, slots, k_stride, v_stride, dtype, *kv};
  int64_t row_bytes = int64_t(q_heads + 2 * kv->num_kv_heads) * kv->head_dim * dtype_bytes(dtype);
  for_token_ranges(tokens, row_bytes, [&](int64_t begin, int64_t end) {
    level().rope(rope_args, dtype, begin, end);
    level().store_kv(store_args, begin, end);
  });
  return KVMESH_OK;
}

int kvmesh_cpu_philox(uint32_t* out, uint64_t key, uint64_t counter_low, uint64_t counter_high,
                                 int64_t blocks, int32_t rounds) {
  if (rounds < 1) return KVMESH_BAD_SHAPE;
  for (int64_t i = 0; i < blocks; ++i) {
    uint64_t low = counter_low + uint64_t(i);
    Philox4 block = philox4x32(key, low, counter_high + (low < counter_low ? 1 : 0), rounds);
    memcpy(out + 4 * i, block.x, sizeof(block.x));
  }
  return KVMESH_OK;
}
