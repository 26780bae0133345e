// Chooses the instruction-set level once per process.
#include "level.h"

#include <stdlib.h>
#include <string.h>

namespace kvmesh {

namespace baseline { const LevelTable& table(); }
#if defined(__x86_64__)
namespace avx2 { const LevelTable& table(); }
namespace avx512 { const LevelTable& table(); }
#endif

namespace {

const LevelTable& choose() {
#if defined(__x86_64__)
  const char* limit = getenv("KVMESH_CPU_LEVEL");
  bool any = limit == nullptr || *limit == 0;
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (any || strcmp(limit, "avx512") == 0)) return avx512::table();
  if (has_avx2 && (any || strcmp(limit, "baseline") != 0)) return avx2::table();
#endif
  return baseline::table();
}

}  // namespace

const LevelTable& level() {
  static const LevelTable& chosen = choose();
  return chosen;
}

}  // namespace kvmesh
