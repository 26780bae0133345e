// Runs CUDA kernels on the CPU: just enough of the runtime for csrc/cuda to compile with g++ and be tested without a GPU.
//
// Every thread of a block is a fiber; fibers run one after another and switch only at barriers and shuffles. A barrier
// that some thread of the block (or lane of the warp) never reaches stops the program, as it would hang a GPU.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint4 { unsigned x, y, z, w; };

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
alignas(64) inline unsigned char kvmesh_dynamic_memory[227 << 10];

namespace emulation {

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = State::kReady;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline size_t current;
inline float lanes[1024];
constexpr size_t kStackBytes = 256 << 10;

inline void wait(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void enter() {
  body();
  fibers[current].state = State::kDone;
}

// Lets fibers [begin, end) pass `barrier` if all of them that still run have come to it.
inline bool release(size_t begin, size_t end, State barrier) {
  bool waiting = false;
  for (size_t i = begin; i < end; ++i) {
    if (fibers[i].state != barrier && fibers[i].state != State::kDone) return false;
    waiting |= fibers[i].state == barrier;
  }
  for (size_t i = begin; i < end; ++i)
    if (fibers[i].state == barrier) fibers[i].state = State::kReady;
  return waiting;
}

inline void run_block(unsigned threads) {
  fibers.clear();
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  bool progress = true;
  while (progress) {
    progress = false;
    for (current = 0; current < threads; ++current) {
      if (fibers[current].state != State::kReady) continue;
      threadIdx = dim3(unsigned(current), 0, 0);
      swapcontext(&scheduler, &fibers[current].context);
      progress = true;
    }
    for (size_t warp = 0; warp < threads; warp += 32) progress |= release(warp, warp + 32, State::kAtWarpBarrier);
    progress |= release(0, threads, State::kAtBlockBarrier);
  }
  for (Fiber& fiber : fibers) {
    if (fiber.state == State::kDone) continue;
    fprintf(stderr, "a barrier was not reached by all threads\n");
    abort();
  }
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::State::kAtBlockBarrier); }
inline void __syncwarp() { emulation::wait(emulation::State::kAtWarpBarrier); }

inline float __shfl_xor_sync(unsigned, float value, int mask) {
  emulation::lanes[threadIdx.x] = value;
  __syncwarp();
  float other = emulation::lanes[threadIdx.x ^ unsigned(mask)];
  __syncwarp();
  return other;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

inline cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  *memory = malloc(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  free(memory);
  return cudaSuccess;
}

template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Parameters... arguments) {
  if (config->dynamicSmemBytes > sizeof(kvmesh_dynamic_memory)) abort();
  emulation::body = [&] { kernel(arguments...); };
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = dim3(x, y, z);
        for (unsigned char& byte : kvmesh_dynamic_memory) byte = 0xff;  // shared memory starts undefined: NaN
        emulation::run_block(blockDim.x);
      }
  return cudaSuccess;
}
