// The thread pool: tasks are claimed from one atomic word; idle workers sleep on a futex.
#include "thread_pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace kvmesh {
namespace {

// About 20 microseconds of spinning bridges the gap between two kernels of one layer; past it a worker sleeps.
constexpr int kSpins = 600;
constexpr uint32_t kClosed = UINT32_MAX;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

class Pool {
 public:
  // Threads start with the first parallel job, never at import: a process that only hashes stays single-threaded.
  void run(int64_t tasks, TaskFunction function, void* context) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    int wanted = target_.load(std::memory_order_relaxed);
    if (!owner.owns_lock() || wanted <= 1 || tasks <= 1 || tasks >= int64_t(kClosed)) {
      for (int64_t task = 0; task < tasks; ++task) function(context, task);
      return;
    }
    resize(wanted - 1);
    publish(uint32_t(tasks), function, context);
    work(epoch_.load(std::memory_order_relaxed));
    await_completion(uint32_t(tasks));
  }

  void set_target(int count) {
    target_.store(count < 1 ? 1 : count, std::memory_order_relaxed);
  }
  int target() const { return target_.load(std::memory_order_relaxed); }

  // After fork the child has none of the threads; forget them and start anew on demand.
  void forget_threads() {
    new (&owner_) std::mutex;
    for (std::thread& thread : threads_) new (&thread) std::thread;
    threads_.clear();
    sleeping_.store(0);
    caller_sleeping_.store(0);
  }

 private:
  // A claim word is (epoch << 32 | next task). While a job's fields change the word reads kClosed, and a worker
  // that had read the old word fails its compare-exchange: it can never run a task with another job's fields.
  void publish(uint32_t tasks, TaskFunction function, void* context) {
    uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    claim_.store(uint64_t(epoch) << 32 | kClosed, std::memory_order_seq_cst);
    tasks_.store(tasks, std::memory_order_relaxed);
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    claim_.store(uint64_t(epoch) << 32, std::memory_order_release);
    epoch_.store(epoch, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      int useful = int(tasks) - 1;
      futex_wake(epoch_, useful < int(threads_.size()) ? useful : int(threads_.size()));
    }
  }

  void work(uint32_t epoch) {
    uint32_t done = 0, tasks = 0;
    uint64_t word = claim_.load(std::memory_order_acquire);
    while (uint32_t(word >> 32) == epoch && uint32_t(word) != kClosed) {
      tasks = tasks_.load(std::memory_order_relaxed);
      TaskFunction function = function_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      if (uint32_t(word) >= tasks) break;
      if (!claim_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      function(context, uint32_t(word));
      ++done;
      word = claim_.load(std::memory_order_acquire);
    }
    // The job cannot be replaced before its claimed tasks are counted here, so `tasks` is still this job's.
    if (done > 0 && finished_.fetch_add(done, std::memory_order_seq_cst) + done == tasks &&
        caller_sleeping_.load(std::memory_order_seq_cst) != 0) {
      futex_wake(finished_, 1);
    }
  }

  void await_completion(uint32_t tasks) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (finished_.load(std::memory_order_acquire) == tasks) return;
      pause_cpu();
    }
    caller_sleeping_.store(1, std::memory_order_seq_cst);
    for (uint32_t seen = finished_.load(); seen != tasks; seen = finished_.load()) futex_wait(finished_, seen);
    caller_sleeping_.store(0, std::memory_order_relaxed);
  }

  void worker(size_t index, uint32_t seen) {
    while (true) {
      uint32_t epoch = epoch_.load(std::memory_order_acquire);
      for (int spin = 0; epoch == seen && spin < kSpins; ++spin) {
        pause_cpu();
        epoch = epoch_.load(std::memory_order_acquire);
      }
      if (epoch == seen) {
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        if (epoch_.load(std::memory_order_seq_cst) == seen) futex_wait(epoch_, seen);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        continue;
      }
      seen = epoch;
      if (index >= wanted_.load(std::memory_order_acquire)) return;
      work(epoch);
    }
  }

  // Called by the owner between jobs only.
  void resize(int workers) {
    size_t wanted = size_t(workers);
    if (threads_.size() == wanted) return;
    wanted_.store(wanted, std::memory_order_release);
    if (threads_.size() > wanted) {
      epoch_.fetch_add(1, std::memory_order_seq_cst);
      claim_.store(uint64_t(epoch_.load()) << 32 | kClosed, std::memory_order_release);
      futex_wake(epoch_, INT_MAX);
      while (threads_.size() > wanted) {
        threads_.back().join();
        threads_.pop_back();
      }
    }
    while (threads_.size() < wanted) {
      size_t index = threads_.size();
      uint32_t seen = epoch_.load(std::memory_order_relaxed);
      threads_.emplace_back([this, index, seen] { worker(index, seen); });
    }
  }

  std::mutex owner_;
  std::vector<std::thread> threads_;
  std::atomic<int> target_{1};
  std::atomic<size_t> wanted_{0};
  alignas(64) std::atomic<uint64_t> claim_{0};
  alignas(64) std::atomic<uint32_t> finished_{0};
  std::atomic<uint32_t> caller_sleeping_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> sleeping_{0};
  std::atomic<uint32_t> tasks_{0};
  std::atomic<TaskFunction> function_{nullptr};
  std::atomic<void*> context_{nullptr};
};

// Never destroyed: workers sleep inside it until the process ends.
Pool& pool() {
  static Pool* instance = [] {
    Pool* created = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool().forget_threads(); });
    return created;
  }();
  return *instance;
}

class Scratch {
 public:
  ~Scratch() { free(data_); }
  void* reserve(size_t bytes) {
    if (bytes > capacity_) {
      size_t rounded = (bytes + bytes / 2 + 4095) & ~size_t(4095);
      void* grown = aligned_alloc(64, rounded);
      if (grown == nullptr) return nullptr;
      free(data_);
      data_ = grown;
      capacity_ = rounded;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace

int thread_count() { return pool().target(); }
void set_thread_count(int count) { pool().set_target(count); }
void parallel_for(int64_t tasks, TaskFunction function, void* context) { pool().run(tasks, function, context); }

void* thread_scratch(ScratchSlot slot, size_t bytes) {
  static thread_local Scratch scratch[kScratchSlots];
  return scratch[slot].reserve(bytes);
}

}  // namespace kvmesh
