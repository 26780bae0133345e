// The exported paged attention: cuts the batch into tasks that no other sequence influences, and runs them.
#include <atomic>
#include <new>

#include "../core/float_formats.h"
#include "exports.h"
#include "level.h"
#include "thread_pool.h"

namespace kvmesh {
namespace {

// Keys of one decode task. Fixed, so that a sequence's result does not depend on the batch or the threads.
constexpr int kDecodeSplit = 256;
// Keys x rows below which all tasks run on the calling thread: less than a wake-up's worth of work.
constexpr int64_t kParallelWork = 512;

// The decode tasks of one (sequence, KV head) whose partial results the last finisher merges.
struct Group {
  AttentionTask* first;
  int count;
  std::atomic<int> unfinished;
};

struct Plan {
  AttentionTask* tasks;
  Group** groups;  // of each task; null: its result is final
  int64_t count;
  int64_t work;
};

struct Sequence {
  int queries, rows, context, first_key;
};

Sequence describe(const AttentionArgs& a, int index) {
  int queries = a.query_start[index + 1] - a.query_start[index];
  int context = a.context_lens[index];
  int first_key = a.window > 0 ? context - queries - a.window + 1 : 0;
  return {queries, queries * (a.num_heads / a.kv.num_kv_heads), context, first_key > 0 ? first_key : 0};
}

int splits_of(const Sequence& s) { return (s.context - 1) / kDecodeSplit - s.first_key / kDecodeSplit + 1; }

int tiles_of(const Sequence& s) { return (s.rows + level().attention_tile_rows - 1) / level().attention_tile_rows; }

void plan_decode(const AttentionArgs& a, Plan& plan, const Sequence& s, int sequence, int head, Group* group,
                 float* partial) {
  int splits = splits_of(s);
  size_t part_floats = level().partial_floats(a, s.rows);
  if (splits > 1) new (group) Group{plan.tasks + plan.count, splits, {splits}};
  for (int i = 0; i < splits; ++i) {
    int begin = (s.first_key / kDecodeSplit + i) * kDecodeSplit, end = begin + kDecodeSplit;
    plan.groups[plan.count] = splits > 1 ? group : nullptr;
    plan.tasks[plan.count++] = {sequence, head, 0, s.rows, begin > s.first_key ? begin : s.first_key,
                                end < s.context ? end : s.context, false,
                                splits > 1 ? partial + i * part_floats : nullptr};
  }
}

void plan_prefill(const AttentionArgs& a, Plan& plan, const Sequence& s, int sequence, int head) {
  int group = a.num_heads / a.kv.num_kv_heads, tile = level().attention_tile_rows;
  for (int i = tiles_of(s) - 1; i >= 0; --i) {  // the tile with most keys first, for balance
    int row_end = (i + 1) * tile < s.rows ? (i + 1) * tile : s.rows;
    int first_position = s.context - s.queries + i * tile / group;
    int last_position = s.context - s.queries + (row_end - 1) / group;
    int begin = a.window > 0 && first_position - a.window + 1 > 0 ? first_position - a.window + 1 : 0;
    plan.groups[plan.count] = nullptr;
    plan.tasks[plan.count++] = {sequence, head, i * tile, row_end, begin, last_position + 1, true, nullptr};
  }
}

// Lays out tasks, groups and partial results in the caller's scratch. False without memory.
bool make_plan(const AttentionArgs& a, int sequences, Plan& plan) {
  int heads = a.kv.num_kv_heads;
  size_t tasks = 0, groups = 0, floats = 0;
  for (int i = 0; i < sequences; ++i) {
    Sequence s = describe(a, i);
    if (s.rows == 0) continue;
    plan.work += int64_t(s.rows) * (s.context - s.first_key);
    if (s.rows > kDecodeRows) {
      tasks += size_t(tiles_of(s)) * heads;
    } else {
      size_t splits = size_t(splits_of(s));
      tasks += splits * heads;
      groups += splits > 1 ? heads : 0;
      floats += splits > 1 ? splits * heads * level().partial_floats(a, s.rows) : 0;
    }
  }
  size_t bytes = floats * sizeof(float) + tasks * (sizeof(AttentionTask) + sizeof(Group*)) + groups * sizeof(Group);
  char* memory = static_cast<char*>(thread_scratch(kCallScratch, bytes));
  if (memory == nullptr) return false;
  float* partial = reinterpret_cast<float*>(memory);
  Group* group = reinterpret_cast<Group*>(partial + floats);
  plan.tasks = reinterpret_cast<AttentionTask*>(group + groups);
  plan.groups = reinterpret_cast<Group**>(plan.tasks + tasks);
  for (int i = 0; i < sequences; ++i) {
    Sequence s = describe(a, i);
    if (s.rows == 0) continue;
    for (int head = 0; head < heads; ++head) {
      if (s.rows > kDecodeRows) {
        plan_prefill(a, plan, s, i, head);
      } else {
        plan_decode(a, plan, s, i, head, group, partial);
        if (splits_of(s) > 1) {
          partial += size_t(splits_of(s)) * level().partial_floats(a, s.rows);
          ++group;
        }
      }
    }
  }
  return true;
}

bool valid(const AttentionArgs& a, int sequences) {
  if (a.kv.head_dim < 1 || a.kv.tokens_per_block < 1 || a.kv.num_kv_heads < 1) return false;
  if (a.num_heads % a.kv.num_kv_heads != 0) return false;
  for (int i = 0; i < sequences; ++i) {
    int queries = a.query_start[i + 1] - a.query_start[i];
    if (queries < 0 || (queries > 0 && a.context_lens[i] < queries)) return false;
  }
  return true;
}

}  // namespace
}  // namespace kvmesh

using namespace kvmesh;

int kvmesh_cpu_paged_attention(void* out, int64_t out_stride, const void* q, int64_t q_stride, int32_t dtype,
                                          const kvmesh_paged_kv* kv, const int32_t* block_tables,
                                          int64_t block_table_stride, const int32_t* query_start,
                                          const int32_t* context_lens, int64_t tokens, int32_t sequences,
                                          int32_t num_heads, float scale, int32_t window, float soft_cap) {
  if (dtype < kFloat32 || dtype > kBFloat16 || kv->dtype < kFloat32 || kv->dtype > kFp8E5M2) return KVMESH_BAD_DTYPE;
  AttentionArgs args{out,      q,     block_tables, query_start, context_lens, out_stride, q_stride, block_table_stride,
                     dtype, num_heads, window,       scale,       soft_cap,     *kv};
  if (!valid(args, sequences) || query_start[sequences] > tokens) return KVMESH_BAD_SHAPE;
  Plan plan{};
  if (!make_plan(args, sequences, plan)) return KVMESH_NO_MEMORY;
  const LevelTable& kernels = level();
  size_t scratch_bytes = kernels.attention_scratch_bytes(args);
  std::atomic<bool> out_of_memory{false};
  auto run = [&](int64_t index) {
    const AttentionTask& task = plan.tasks[index];
    void* scratch = thread_scratch(kTaskScratch, scratch_bytes);
    if (scratch == nullptr) return out_of_memory.store(true);
    (task.blocked ? kernels.attention_prefill : kernels.attention_decode)(args, task, scratch);
    Group* group = plan.groups[index];
    if (group != nullptr && group->unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1)
      kernels.attention_merge(args, group->first, group->count, scratch);
  };
  if (plan.work < kParallelWork) {
    for (int64_t i = 0; i < plan.count; ++i) run(i);
  } else {
    parallel_for(plan.count, run);
  }
  return out_of_memory.load() ? KVMESH_NO_MEMORY : KVMESH_OK;
}
