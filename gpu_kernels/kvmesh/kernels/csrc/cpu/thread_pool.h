// A persistent thread pool: parallel_for over task numbers, short spin then sleep when idle.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmesh {

using TaskFunction = void (*)(void* context, int64_t task);

// Threads that take part in a parallel_for, the caller included. At least 1.
int thread_count();
void set_thread_count(int count);

// Runs function(context, t) for t in [0, tasks) and returns when all have finished. When another thread is inside
// parallel_for the caller runs its tasks by itself: a transfer thread never waits behind a decode step.
void parallel_for(int64_t tasks, TaskFunction function, void* context);

template <class F>
void parallel_for(int64_t tasks, F& body) {
  parallel_for(tasks, [](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &body);
}

// Grow-only scratch of the calling thread, 64-byte aligned; `slot` keeps nested users apart. Null without memory.
enum ScratchSlot { kCallScratch = 0, kTaskScratch = 1, kScratchSlots = 2 };
void* thread_scratch(ScratchSlot slot, size_t bytes);

}  // namespace kvmesh
