// Conversions between float32 and the storage formats: fp16, bf16, fp8 (E4M3 and E5M2) and fp4 (E2M1).
//
// All conversions from float32 round to nearest even. The fp8 and fp4 ones saturate to the largest finite value,
// as KV caches want (an infinity would poison a whole attention row); NaN stays NaN where the format has one.
#pragma once

#include "platform.h"

KVM_BEGIN

enum DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFp8E4M3 = 3, kFp8E5M2 = 4 };

// One tag type per storage format; its only member is the stored bits.
struct Float32 { float bits; };
struct Float16 { uint16_t bits; };
struct BFloat16 { uint16_t bits; };
struct Fp8E4M3 { uint8_t bits; };
struct Fp8E5M2 { uint8_t bits; };

KVM_HD float bf16_to_float(uint16_t h) { return bit_cast<float>(uint32_t(h) << 16); }

KVM_HD uint16_t float_to_bf16(float f) {
  uint32_t u = bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);  // keep a NaN quiet and a NaN
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

KVM_HD float fp16_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16;
  uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Shifted into float32's fields the exponent is short by 112; one exact multiplication repairs normals and
  // subnormals alike, without a branch for either.
  float value = bit_cast<float>(magnitude << 13) * bit_cast<float>(0x77800000u);  // x 2^112
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

KVM_HD uint16_t float_to_fp16(float f) {
  uint32_t u = bit_cast<uint32_t>(f);
  uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to 65536 or more
  if (u < 0x38800000u) {                                  // subnormal: let a float addition do the rounding
    float shifted = bit_cast<float>(u) + bit_cast<float>(0x3f000000u);  // + 0.5: one ulp there is 2^-24
    return uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  u += 0xfffu + ((u >> 13) & 1u);
  return uint16_t(sign | ((u - 0x38000000u) >> 13));
}

// Rounds a positive finite float to a format of `exponent bias` and `mantissa bits`; the caller saturates first.
KVM_HD uint32_t round_small_float(float f, int bias, int mantissa_bits) {
  uint32_t u = bit_cast<uint32_t>(f);
  int exponent = int(u >> 23) - 127 + bias;
  if (exponent < 1) {  // subnormal: a multiple of 2^(1 - bias - mantissa_bits)
    float step_inverse = bit_cast<float>(uint32_t(127 - 1 + bias + mantissa_bits) << 23);
    float scaled = f * step_inverse + 12582912.0f;  // adding 1.5 x 2^23 rounds to nearest even
    return bit_cast<uint32_t>(scaled) - 0x4b400000u;
  }
  int drop = 23 - mantissa_bits;
  u += (1u << (drop - 1)) - 1u + ((u >> drop) & 1u);
  return (u >> drop) - (uint32_t(127 - bias) << mantissa_bits);
}

KVM_HD float e4m3_to_float(uint8_t b) {
  uint32_t sign = uint32_t(b & 0x80u) << 24;
  uint32_t magnitude = b & 0x7fu;
  if (magnitude == 0x7fu) return bit_cast<float>(sign | 0x7fc00000u);
  float value = bit_cast<float>(magnitude << 20) * bit_cast<float>(0x7b800000u);  // x 2^120
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

KVM_HD uint8_t float_to_e4m3(float f) {
  uint32_t u = bit_cast<uint32_t>(f);
  uint8_t sign = uint8_t((u >> 24) & 0x80u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint8_t(sign | 0x7fu);
  if (u >= 0x43e00000u) return uint8_t(sign | 0x7eu);  // 448 and above saturate
  uint32_t rounded = round_small_float(bit_cast<float>(u), 7, 3);
  return uint8_t(sign | (rounded > 0x7eu ? 0x7eu : rounded));
}

KVM_HD float e5m2_to_float(uint8_t b) { return fp16_to_float(uint16_t(b) << 8); }

KVM_HD uint8_t float_to_e5m2(float f) {
  uint32_t u = bit_cast<uint32_t>(f);
  uint8_t sign = uint8_t((u >> 24) & 0x80u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint8_t(sign | 0x7fu);
  if (u >= 0x47600000u) return uint8_t(sign | 0x7bu);  // 57344 and above saturate
  uint32_t rounded = round_small_float(bit_cast<float>(u), 15, 2);
  return uint8_t(sign | (rounded > 0x7bu ? 0x7bu : rounded));
}

// Four-bit E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; the code sits in the low four bits.
KVM_HD float e2m1_to_float(uint8_t b) {
  uint32_t magnitude = b & 7u;
  float value = magnitude < 2 ? 0.5f * float(magnitude)
                              : bit_cast<float>(((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22);
  return (b & 8u) ? -value : value;
}

KVM_HD uint8_t float_to_e2m1(float f) {
  uint32_t u = bit_cast<uint32_t>(f);
  uint8_t sign = uint8_t((u >> 28) & 8u);
  u &= 0x7fffffffu;
  if (u > 0x40a00000u) return uint8_t(sign | 7u);  // above 5 is 6; 5 itself ties to 4, whose code is even
  uint32_t rounded = round_small_float(bit_cast<float>(u), 1, 1);
  return uint8_t(sign | rounded);
}

KVM_HD float to_float(Float32 v) { return v.bits; }
KVM_HD float to_float(Float16 v) { return fp16_to_float(v.bits); }
KVM_HD float to_float(BFloat16 v) { return bf16_to_float(v.bits); }
KVM_HD float to_float(Fp8E4M3 v) { return e4m3_to_float(v.bits); }
KVM_HD float to_float(Fp8E5M2 v) { return e5m2_to_float(v.bits); }

template <class T> KVM_HD T from_float(float f);
template <> KVM_HD Float32 from_float<Float32>(float f) { return {f}; }
template <> KVM_HD Float16 from_float<Float16>(float f) { return {float_to_fp16(f)}; }
template <> KVM_HD BFloat16 from_float<BFloat16>(float f) { return {float_to_bf16(f)}; }
template <> KVM_HD Fp8E4M3 from_float<Fp8E4M3>(float f) { return {float_to_e4m3(f)}; }
template <> KVM_HD Fp8E5M2 from_float<Fp8E5M2>(float f) { return {float_to_e5m2(f)}; }

KVM_HD int64_t dtype_bytes(int32_t dtype) {
  return dtype == kFloat32 ? 4 : (dtype == kFloat16 || dtype == kBFloat16) ? 2 : 1;
}

KVM_END
