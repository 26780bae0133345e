// Chooses the instruction-set level: the best one of this CPU, until another is asked for.
#include "level.h"

#include <string.h>

#include <atomic>

namespace kvmesh {

namespace baseline { const LevelTable& table(); }
#if defined(__x86_64__)
namespace avx2 { const LevelTable& table(); }
namespace avx512 { const LevelTable& table(); }
#endif

namespace {

// The table of the named level, or of the best one for a null name; null where this CPU lacks the named one.
const LevelTable* find(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (name == nullptr || strcmp(name, "avx512") == 0)) return &avx512::table();
  if (has_avx2 && (name == nullptr || strcmp(name, "avx2") == 0)) return &avx2::table();
#endif
  if (name == nullptr || strcmp(name, "baseline") == 0) return &baseline::table();
  return nullptr;
}

std::atomic<const LevelTable*> chosen{nullptr};

}  // namespace

const LevelTable& level() {
  const LevelTable* table = chosen.load(std::memory_order_relaxed);
  if (table == nullptr) {
    table = find(nullptr);
    chosen.store(table, std::memory_order_relaxed);
  }
  return *table;
}

bool choose_level(const char* name) {
  const LevelTable* table = find(name);
  if (table != nullptr) chosen.store(table, std::memory_order_relaxed);
  return table != nullptr;
}

}  // namespace kvmesh
