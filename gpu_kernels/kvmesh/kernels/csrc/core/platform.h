// What lets one source serve nvcc, g++ and every CPU level: function qualifiers and the level's namespace.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// The hot CPU sources are compiled once per instruction-set level and linked into one library. Every symbol
// lives in a namespace named after its level: were two levels to share an inline function, the linker could
// keep the AVX-512 body and a machine without AVX-512 would execute it.
#ifndef KVM_LEVEL
#define KVM_LEVEL portable
#endif
#define KVM_BEGIN namespace kvmesh { inline namespace KVM_LEVEL {
#define KVM_END } }

#if defined(__CUDACC__)
#define KVM_HD __host__ __device__ __forceinline__
#else
#define KVM_HD inline __attribute__((always_inline))
#endif

KVM_BEGIN

// Reinterprets the bits of a value; memcpy is the one form that is defined in every language mode used here.
template <class To, class From>
KVM_HD To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

KVM_END
