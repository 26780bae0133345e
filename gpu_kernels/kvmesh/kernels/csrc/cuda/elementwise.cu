// Row-wise kernels on the GPU: RMS norm, gated activations, rotary embedding, the store into pages. One block per token.
#include "../core/activations.h"
#include "../core/paging.h"
#include "common.cuh"

KVM_BEGIN
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void rms_norm_kernel(T* out, int64_t out_stride, T* residual, int64_t residual_stride, const T* x,
                                int64_t x_stride, const T* weight, int64_t width, float eps, float weight_offset) {
  float* partial = reinterpret_cast<float*>(kvmesh_dynamic_memory);
  int64_t token = blockIdx.x, group = int64_t(blockIdx.y) * width;
  const T* source = x + token * x_stride + group;
  T* sums = residual == nullptr ? nullptr : residual + token * residual_stride + group;
  T* target = out + token * out_stride + group;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    float value = to_float(source[i]);
    if (sums != nullptr) {
      sums[i] = from_float<T>(value + to_float(sums[i]));
      value = to_float(sums[i]);
    }
    squares += value * value;
  }
  squares = warp_sum(squares);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = squares;
  __syncthreads();
  float total = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) total += partial[warp];
  float inverse = 1.0f / sqrtf(total / float(width) + eps);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    float value = to_float(sums != nullptr ? sums[i] : source[i]);
    target[i] = from_float<T>(value * inverse * (to_float(weight[i]) + weight_offset));
  }
}

struct Silu {
  static __device__ __forceinline__ float of(float x) { return x / (1.0f + expf(-x)); }
};

// The tanh approximation of GELU.
struct GeluTanh {
  static __device__ __forceinline__ float of(float x) {
    return x / (1.0f + expf((x * x * x * kGeluCubic + x) * -kGeluLinear));
  }
};

template <class Activation, class T>
__global__ void gate_kernel(T* out, int64_t out_stride, const T* gate_up, int64_t gate_up_stride, int64_t width) {
  int64_t token = blockIdx.x;
  const T* gate = gate_up + token * gate_up_stride;
  for (int64_t i = int64_t(blockIdx.y) * blockDim.x + threadIdx.x; i < width; i += int64_t(gridDim.y) * blockDim.x) {
    out[token * out_stride + i] = from_float<T>(Activation::of(to_float(gate[i])) * to_float(gate[width + i]));
  }
}

template <class From, class To>
__device__ __forceinline__ void store_token(const From* k, const From* v, const kvmesh_paged_kv& kv, int64_t slot) {
  if (slot < 0) return;
  for (int i = threadIdx.x; i < kv.num_kv_heads * kv.head_dim; i += blockDim.x) {
    int head = i / kv.head_dim, d = i % kv.head_dim;
    reinterpret_cast<To*>(slot_row(kv, slot, kv.k_offset_bytes, head))[d] = from_float<To>(to_float(k[i]));
    reinterpret_cast<To*>(slot_row(kv, slot, kv.v_offset_bytes, head))[d] = from_float<To>(to_float(v[i]));
  }
}

template <class From, class To>
__global__ void store_kernel(const From* k, int64_t k_stride, const From* v, int64_t v_stride, kvmesh_paged_kv kv,
                             const int64_t* slots) {
  int64_t token = blockIdx.x;
  store_token<From, To>(k + token * k_stride, v + token * v_stride, kv, slots[token]);
}

template <class T>
__device__ __forceinline__ void rotate(T* heads, int count, int head_dim, const float* cos, const float* sin, int half) {
  for (int i = threadIdx.x; i < count * half; i += blockDim.x) {
    T* pair = heads + i / half * head_dim + i % half;
    float a = to_float(pair[0]), b = to_float(pair[half]), c = cos[i % half], s = sin[i % half];
    pair[0] = from_float<T>(a * c - b * s);
    pair[half] = from_float<T>(b * c + a * s);
  }
}

template <class From, class To>
__global__ void rope_store_kernel(From* q, int64_t q_stride, From* k, int64_t k_stride, const From* v, int64_t v_stride,
                                  const float* cos, const float* sin, const int32_t* positions, kvmesh_paged_kv kv,
                                  const int64_t* slots, int q_heads, int half) {
  int64_t token = blockIdx.x, angle = int64_t(positions[token]) * half;
  rotate(q + token * q_stride, q_heads, kv.head_dim, cos + angle, sin + angle, half);
  rotate(k + token * k_stride, kv.num_kv_heads, kv.head_dim, cos + angle, sin + angle, half);
  __syncthreads();  // other threads store what this one rotated
  store_token<From, To>(k + token * k_stride, v + token * v_stride, kv, slots[token]);
}

template <class T>
int norm(void* out, int64_t out_stride, void* residual, int64_t residual_stride, const void* x, int64_t x_stride,
         const void* weight, int64_t tokens, int64_t groups, int64_t width, float eps, float weight_offset,
         void* stream) {
  return launch(rms_norm_kernel<T>, dim3(unsigned(tokens), unsigned(groups)), kThreads,
                kThreads / kWarp * sizeof(float), stream, static_cast<T*>(out), out_stride, static_cast<T*>(residual),
                residual_stride, static_cast<const T*>(x), x_stride, static_cast<const T*>(weight), width, eps,
                weight_offset);
}

template <class Activation>
int gate(void* out, int64_t out_stride, const void* gate_up, int64_t gate_up_stride, int64_t tokens, int64_t width,
         int32_t dtype, void* stream) {
  return with_compute_type(dtype, [&](auto type) {
    using T = decltype(type);
    unsigned columns = unsigned((width + kThreads - 1) / kThreads);
    return launch(gate_kernel<Activation, T>, dim3(unsigned(tokens), columns), kThreads, 0, stream,
                  static_cast<T*>(out), out_stride, static_cast<const T*>(gate_up), gate_up_stride, width);
  });
}

}  // namespace
KVM_END

using namespace kvmesh;

KVMESH_API int kvmesh_cuda_abi_version() { return KVMESH_ABI_VERSION; }

KVMESH_API int kvmesh_cuda_rms_norm(void* out, int64_t out_stride, const void* x, int64_t x_stride, const void* weight,
                                    int64_t tokens, int64_t groups, int64_t width, float eps, float weight_offset,
                                    int32_t dtype, void* stream) {
  return with_compute_type(dtype, [&](auto type) {
    return norm<decltype(type)>(out, out_stride, nullptr, 0, x, x_stride, weight, tokens, groups, width, eps,
                               weight_offset, stream);
  });
}

KVMESH_API int kvmesh_cuda_add_rms_norm(void* out, int64_t out_stride, void* residual, int64_t residual_stride,
                                        const void* x, int64_t x_stride, const void* weight, int64_t tokens,
                                        int64_t width, float eps, float weight_offset, int32_t dtype,
                                        void* stream) {
  return with_compute_type(dtype, [&](auto type) {
    return norm<decltype(type)>(out, out_stride, residual, residual_stride, x, x_stride, weight, tokens, 1, width, eps,
                                weight_offset, stream);
  });
}

KVMESH_API int kvmesh_cuda_silu_and_mul(void* out, int64_t out_stride, const void* gate_up, int64_t gate_up_stride,
                                        int64_t tokens, int64_t width, int32_t dtype, void* stream) {
  return gate<Silu>(out, out_stride, gate_up, gate_up_stride, tokens, width, dtype, stream);
}

KVMESH_API int kvmesh_cuda_gelu_tanh_and_mul(void* out, int64_t out_stride, const void* gate_up, int64_t gate_up_stride,
                                             int64_t tokens, int64_t width, int32_t dtype, void* stream) {
  return gate<GeluTanh>(out, out_stride, gate_up, gate_up_stride, tokens, width, dtype, stream);
}

KVMESH_API int kvmesh_cuda_store_kv(const void* k, int64_t k_stride, const void* v, int64_t v_stride, int32_t dtype,
                                    const kvmesh_paged_kv* kv, const int64_t* slots, int64_t tokens, void* stream) {
  return with_compute_type(dtype, [&](auto from) {
    return with_kv_type(kv->dtype, [&](auto to) {
      using From = decltype(from);
      return launch(store_kernel<From, decltype(to)>, dim3(unsigned(tokens)), kThreads, 0, stream,
                    static_cast<const From*>(k), k_stride, static_cast<const From*>(v), v_stride, *kv, slots);
    });
  });
}

KVMESH_API int kvmesh_cuda_rope_store_kv(void* q, int64_t q_stride, void* k, int64_t k_stride, const void* v,
                                         int64_t v_stride, int32_t dtype, const float* cos, const float* sin,
                                         const int32_t* positions, const kvmesh_paged_kv* kv, const int64_t* slots,
                                         int64_t tokens, int32_t q_heads, int32_t rotary_half, void* stream) {
  if (2 * rotary_half > kv->head_dim) return KVMESH_BAD_SHAPE;
  return with_compute_type(dtype, [&](auto from) {
    return with_kv_type(kv->dtype, [&](auto to) {
      using From = decltype(from);
      return launch(rope_store_kernel<From, decltype(to)>, dim3(unsigned(tokens)), kThreads, 0, stream,
                    static_cast<From*>(q), q_stride, static_cast<From*>(k), k_stride, static_cast<const From*>(v),
                    v_stride, cos, sin, positions, *kv, slots, q_heads, rotary_half);
    });
  });
}
