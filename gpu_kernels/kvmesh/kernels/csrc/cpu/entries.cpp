// The operations by name, callable with an array of values: adapters derived from the C signatures.
#include <string.h>

#include <type_traits>
#include <utility>

#include "exports.h"

namespace {

template <class T>
T take(kvmesh_value value) {
  if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(value.i);
  else if constexpr (std::is_floating_point_v<T>) return static_cast<T>(value.f);
  else return static_cast<T>(value.i);
}

template <auto Function, class Signature>
struct Adapter;

template <auto Function, class... Parameters>
struct Adapter<Function, int (*)(Parameters...)> {
  static_assert(sizeof...(Parameters) <= KVMESH_MAX_ARGUMENTS);
  static constexpr char kSignature[] = {(std::is_floating_point_v<Parameters> ? 'f' : 'i')..., 0};

  template <size_t... Index>
  static int expand(const kvmesh_value* arguments, std::index_sequence<Index...>) {
    return Function(take<Parameters>(arguments[Index])...);
  }
  static int call(const kvmesh_value* arguments) {
    return expand(arguments, std::index_sequence_for<Parameters...>());
  }
};

template <auto Function>
constexpr kvmesh_entry entry(const char* name) {
  using Adapted = Adapter<Function, decltype(Function)>;
  return {name, Adapted::kSignature, Adapted::call};
}

constexpr kvmesh_entry kEntries[] = {
    entry<kvmesh_cpu_rms_norm>("rms_norm"),
    entry<kvmesh_cpu_add_rms_norm>("add_rms_norm"),
    entry<kvmesh_cpu_silu_and_mul>("silu_and_mul"),
    entry<kvmesh_cpu_gelu_tanh_and_mul>("gelu_tanh_and_mul"),
    entry<kvmesh_cpu_store_kv>("store_kv"),
    entry<kvmesh_cpu_rope_store_kv>("rope_store_kv"),
    entry<kvmesh_cpu_paged_attention>("paged_attention"),
    entry<kvmesh_cpu_philox>("philox"),
    entry<kvmesh_cpu_gather_pages>("gather_pages"),
    entry<kvmesh_cpu_scatter_pages>("scatter_pages"),
    entry<kvmesh_cpu_copy_pages>("copy_pages"),
    entry<kvmesh_cpu_copy_pages_checksummed>("copy_pages_checksummed"),
    entry<kvmesh_cpu_gather_lists>("gather_lists"),
    entry<kvmesh_cpu_scatter_lists>("scatter_lists"),
    entry<kvmesh_cpu_checksum_pages>("checksum_pages"),
    entry<kvmesh_cpu_pack_weight>("pack_weight"),
    entry<kvmesh_cpu_quantized_linear>("quantized_linear"),
    entry<kvmesh_cpu_dequantize_rows>("dequantize_rows"),
};

}  // namespace

const kvmesh_entry* kvmesh_cpu_entry(const char* name) {
  for (const kvmesh_entry& candidate : kEntries)
    if (strcmp(candidate.name, name) == 0) return &candidate;
  return nullptr;
}
