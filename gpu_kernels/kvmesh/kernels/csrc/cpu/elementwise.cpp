// Row-wise kernels: RMS norm, gated activations, rotary embedding and the store into pages. Compiled once per level.
#include <math.h>

#include "../core/activations.h"
#include "../core/paging.h"
#include "kernels.h"
#include "simd.h"

KVM_BEGIN
namespace {

// Normalises one row; with a residual, x is added to it first and the sum is what gets normalised.
template <class T>
void rms_norm_row(T* out, T* residual, const T* x, const T* weight, int64_t width, float eps,
                  float weight_offset) {
  int64_t whole = width / kLanes * kLanes;
  VFloat squares{};
  float tail = 0.0f;
  if (residual != nullptr) {
    for (int64_t i = 0; i < whole; i += kLanes)
      Lanes<T>::store(residual + i, Lanes<T>::load(residual + i) + Lanes<T>::load(x + i));
    for (int64_t i = whole; i < width; ++i) residual[i] = from_float<T>(to_float(residual[i]) + to_float(x[i]));
    x = residual;
  }
  for (int64_t i = 0; i < whole; i += kLanes) {
    VFloat v = Lanes<T>::load(x + i);
    squares += v * v;
  }
  for (int64_t i = whole; i < width; ++i) tail += to_float(x[i]) * to_float(x[i]);
  float inverse = 1.0f / sqrtf((sum(squares) + tail) / float(width) + eps);
  for (int64_t i = 0; i < whole; i += kLanes)
    Lanes<T>::store(out + i, Lanes<T>::load(x + i) * inverse * (Lanes<T>::load(weight + i) + weight_offset));
  for (int64_t i = whole; i < width; ++i)
    out[i] = from_float<T>(to_float(x[i]) * inverse * (to_float(weight[i]) + weight_offset));
}

template <class T>
void rms_norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t g = 0; g < a.groups; ++g) {
      T* residual = a.residual == nullptr ? nullptr : static_cast<T*>(a.residual) + t * a.residual_stride + g * a.width;
      rms_norm_row(static_cast<T*>(a.out) + t * a.out_stride + g * a.width, residual,
                   static_cast<const T*>(a.x) + t * a.x_stride + g * a.width, static_cast<const T*>(a.weight), a.width,
                   a.eps, a.weight_offset);
    }
  }
}

struct Silu {
  static VFloat of(VFloat x) { return sigmoid_times(x, x); }
  static float of(float x) { return x / (1.0f + expf(-x)); }
};

// The tanh approximation of GELU, x / 2 * (1 + tanh(y)), as x * sigmoid(2 y): that does not cancel where tanh is near -1.
struct GeluTanh {
  static VFloat of(VFloat x) { return sigmoid_times((x * x * x * kGeluCubic + x) * kGeluLinear, x); }
  static float of(float x) { return x / (1.0f + expf((x * x * x * kGeluCubic + x) * -kGeluLinear)); }
};

template <class Activation, class T>
void gate_rows(const GateArgs& a, int64_t begin, int64_t end) {
  int64_t whole = a.width / kLanes * kLanes;
  for (int64_t t = begin; t < end; ++t) {
    const T* gate = static_cast<const T*>(a.gate_up) + t * a.gate_up_stride;
    const T* up = gate + a.width;
    T* out = static_cast<T*>(a.out) + t * a.out_stride;
    for (int64_t i = 0; i < whole; i += kLanes)
      Lanes<T>::store(out + i, Activation::of(Lanes<T>::load(gate + i)) * Lanes<T>::load(up + i));
    for (int64_t i = whole; i < a.width; ++i)
      out[i] = from_float<T>(Activation::of(to_float(gate[i])) * to_float(up[i]));
  }
}

// Half-split rotary: pairs are (i, i + rotary_half) of each head.
template <class T>
void rotate_head(T* head, const float* cos, const float* sin, int32_t half) {
  int32_t whole = half / kLanes * kLanes;
  for (int32_t i = 0; i < whole; i += kLanes) {
    VFloat a = Lanes<T>::load(head + i), b = Lanes<T>::load(head + half + i);
    VFloat c = load(cos + i), s = load(sin + i);
    Lanes<T>::store(head + i, a * c - b * s);
    Lanes<T>::store(head + half + i, b * c + a * s);
  }
  for (int32_t i = whole; i < half; ++i) {
    float a = to_float(head[i]), b = to_float(head[half + i]);
    head[i] = from_float<T>(a * cos[i] - b * sin[i]);
    head[half + i] = from_float<T>(b * cos[i] + a * sin[i]);
  }
}

template <class T>
void rope_rows(const RopeArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const float* cos = a.cos + int64_t(a.positions[t]) * a.rotary_half;
    const float* sin = a.sin + int64_t(a.positions[t]) * a.rotary_half;
    T* q = static_cast<T*>(a.q) + t * a.q_stride;
    T* k = static_cast<T*>(a.k) + t * a.k_stride;
    for (int32_t h = 0; h < a.q_heads; ++h) rotate_head(q + int64_t(h) * a.head_dim, cos, sin, a.rotary_half);
    for (int32_t h = 0; h < a.k_heads; ++h) rotate_head(k + int64_t(h) * a.head_dim, cos, sin, a.rotary_half);
  }
}

template <class From, class To>
void convert_row(To* to, const From* from, int32_t width) {
  int32_t whole = width / kLanes * kLanes;
  for (int32_t i = 0; i < whole; i += kLanes) Lanes<To>::store(to + i, Lanes<From>::load(from + i));
  for (int32_t i = whole; i < width; ++i) to[i] = from_float<To>(to_float(from[i]));
}

template <class From, class To>
void store_rows(const StoreArgs& a, int64_t begin, int64_t end) {
  const kvmesh_paged_kv& kv = a.kv;
  for (int64_t t = begin; t < end; ++t) {
    int64_t slot = a.slots[t];
    if (slot < 0) continue;
    for (int32_t h = 0; h < kv.num_kv_heads; ++h) {
      const From* k = static_cast<const From*>(a.k) + t * a.k_stride + int64_t(h) * kv.head_dim;
      const From* v = static_cast<const From*>(a.v) + t * a.v_stride + int64_t(h) * kv.head_dim;
      convert_row(reinterpret_cast<To*>(slot_row(kv, slot, kv.k_offset_bytes, h)), k, kv.head_dim);
      convert_row(reinterpret_cast<To*>(slot_row(kv, slot, kv.v_offset_bytes, h)), v, kv.head_dim);
    }
  }
}

template <class From>
void store_rows_from(const StoreArgs& a, int64_t begin, int64_t end) {
  switch (a.kv.dtype) {
    case kFloat32: return store_rows<From, Float32>(a, begin, end);
    case kFloat16: return store_rows<From, Float16>(a, begin, end);
    case kBFloat16: return store_rows<From, BFloat16>(a, begin, end);
    case kFp8E4M3: return store_rows<From, Fp8E4M3>(a, begin, end);
    case kFp8E5M2: return store_rows<From, Fp8E5M2>(a, begin, end);
  }
}

template <class Activation>
void gate(const GateArgs& a, int32_t dtype, int64_t begin, int64_t end) {
  if (dtype == kFloat32) gate_rows<Activation, Float32>(a, begin, end);
  else if (dtype == kFloat16) gate_rows<Activation, Float16>(a, begin, end);
  else gate_rows<Activation, BFloat16>(a, begin, end);
}

}  // namespace

void rms_norm(const NormArgs& a, int32_t dtype, int64_t begin, int64_t end) {
  if (dtype == kFloat32) rms_norm_rows<Float32>(a, begin, end);
  else if (dtype == kFloat16) rms_norm_rows<Float16>(a, begin, end);
  else rms_norm_rows<BFloat16>(a, begin, end);
}

void silu_and_mul(const GateArgs& a, int32_t dtype, int64_t begin, int64_t end) {
  gate<Silu>(a, dtype, begin, end);
}

void gelu_tanh_and_mul(const GateArgs& a, int32_t dtype, int64_t begin, int64_t end) {
  gate<GeluTanh>(a, dtype, begin, end);
}

void rope(const RopeArgs& a, int32_t dtype, int64_t begin, int64_t end) {
  if (dtype == kFloat32) rope_rows<Float32>(a, begin, end);
  else if (dtype == kFloat16) rope_rows<Float16>(a, begin, end);
  else rope_rows<BFloat16>(a, begin, end);
}

void store_kv(const StoreArgs& a, int64_t begin, int64_t end) {
  if (a.input_dtype == kFloat32) store_rows_from<Float32>(a, begin, end);
  else if (a.input_dtype == kFloat16) store_rows_from<Float16>(a, begin, end);
  else store_rows_from<BFloat16>(a, begin, end);
}

KVM_END
