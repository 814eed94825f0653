// Enough of CUDA to run kernels from their own source on a CPU, for tests/cpu/cuda_on_cpu.py.
//
// The threads of a block are coroutines of one thread. They change at barriers and warp operations only, in an order
// that is shuffled each time, so that what relies on an order shows; what none of them can pass aborts.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static  // one block runs at a time

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
inline int cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(int) { return "none"; }
template <typename F> int cudaFuncSetAttribute(F*, int, int) { return cudaSuccess; }

struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
struct dim3 {
  unsigned x, y, z;
  dim3(int64_t x = 1, int64_t y = 1, int64_t z = 1)
      : x(static_cast<unsigned>(x)), y(static_cast<unsigned>(y)), z(static_cast<unsigned>(z)) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr int kStack = 1 << 16;
constexpr int kGarbage = 0xCD;  // each byte of dynamic shared memory at a block's start

// Threads that wait for each other: a warp, or the block.
struct Group {
  int alive = 0, arrived = 0, generation = 0;
  bool vote = false, result = false;
  uint64_t lanes[32];
};

struct Thread {
  ucontext_t context;  // where it starts; _setjmp and _longjmp, which ask nothing of the kernel, do the rest
  jmp_buf place;
  bool started;
  std::unique_ptr<char[]> stack{new char[kStack]};
  unsigned index;
  bool done;
};

inline std::vector<std::unique_ptr<Thread>> threads;
inline std::vector<Group> warps;
inline Group block;
inline Thread* current;
inline jmp_buf scheduler;
inline const std::function<void()>* body;
inline std::unique_ptr<char[]> dynamic_shared;
inline std::mt19937 shuffler;
inline bool progress;

inline Group& warp() { return warps[threadIdx.x / 32]; }

inline void open(Group& group) {
  group.result = group.vote;
  group.vote = false;
  group.arrived = 0;
  ++group.generation;
  progress = true;
}

inline bool wait(Group& group, bool vote = false) {
  const int generation = group.generation;
  group.vote |= vote;
  if (++group.arrived == group.alive) open(group);
  while (group.generation == generation) {
    if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
    threadIdx.x = current->index;
  }
  return group.result;
}

inline void leave(Group& group) {
  if (--group.alive > 0 && group.arrived == group.alive) open(group);
}

inline void run_thread() {
  threadIdx.x = current->index;
  (*body)();
  current->done = progress = true;
  leave(warp());
  leave(block);
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(Thread* thread) {
  current = thread;
  if (_setjmp(scheduler) != 0) return;
  if (thread->started) _longjmp(thread->place, 1);
  thread->started = true;
  setcontext(&thread->context);
}

inline Thread* made(unsigned index) {
  if (index == threads.size()) threads.push_back(std::make_unique<Thread>());
  Thread* thread = threads[index].get();
  thread->index = index;
  thread->started = thread->done = false;
  getcontext(&thread->context);
  thread->context.uc_stack.ss_sp = thread->stack.get();
  thread->context.uc_stack.ss_size = kStack;
  makecontext(&thread->context, run_thread, 0);
  return thread;
}

inline void run_block(unsigned count) {
  std::vector<Thread*> left;
  warps.assign((count + 31) / 32, Group{});
  block = Group{};
  block.alive = static_cast<int>(count);
  for (unsigned i = 0; i < count; ++i) {
    left.push_back(made(i));
    ++warps[i / 32].alive;
  }
  while (!left.empty()) {
    std::shuffle(left.begin(), left.end(), shuffler);
    progress = false;
    for (Thread* thread : left) resume(thread);
    left.erase(std::remove_if(left.begin(), left.end(), [](Thread* thread) { return thread->done; }), left.end());
    if (!progress) fprintf(stderr, "block %u, %u: its threads wait for each other for ever\n", blockIdx.x, blockIdx.y), abort();
  }
}

inline void launch(dim3 blocks, int count, size_t shared, cudaStream_t, const std::function<void()>& kernel) {
  body = &kernel;
  gridDim = blocks;
  blockDim = dim3(count);
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      dynamic_shared.reset(new char[shared]);
      memset(dynamic_shared.get(), kGarbage, shared);
      run_block(blockDim.x);
    }
  }
  body = nullptr;
}

// What every lane of the warp gives; `use` sees all before any lane goes on.
template <typename T, typename Use> auto among_warp(T value, Use use) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  Group& group = warp();
  group.lanes[threadIdx.x % 32] = bits;
  wait(group);
  const auto result = use(group.lanes);
  wait(group);
  return result;
}

template <typename T> T from_lane(T value, int lane) {
  return among_warp(value, [&](const uint64_t* lanes) {
    T found = value;
    if (lane >= 0 && lane < 32) memcpy(&found, &lanes[lane], sizeof found);
    return found;
  });
}

}  // namespace cuda_on_cpu

inline int lane_of_thread() { return static_cast<int>(threadIdx.x % 32); }
inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::block); }
inline int __syncthreads_or(int vote) { return cuda_on_cpu::wait(cuda_on_cpu::block, vote != 0); }
inline void __syncwarp() { cuda_on_cpu::wait(cuda_on_cpu::warp()); }
template <typename T> T __shfl_up_sync(unsigned, T x, int by) { return cuda_on_cpu::from_lane(x, lane_of_thread() - by); }
template <typename T> T __shfl_down_sync(unsigned, T x, int by) {
  return cuda_on_cpu::from_lane(x, lane_of_thread() + by);
}
template <typename T> T __shfl_xor_sync(unsigned, T x, int by) {
  return cuda_on_cpu::from_lane(x, lane_of_thread() ^ by);
}
template <typename T> T __shfl_sync(unsigned, T x, int lane) { return cuda_on_cpu::from_lane(x, lane); }
inline unsigned __ballot_sync(unsigned, int vote) {
  return cuda_on_cpu::among_warp<uint64_t>(vote != 0, [](const uint64_t* lanes) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(lanes[i] & 1) << i;
    return bits;
  });
}
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
inline int __reduce_add_sync(unsigned, int x) {
  return cuda_on_cpu::among_warp<int64_t>(x, [](const uint64_t* lanes) {
    int sum = 0;
    for (int i = 0; i < 32; ++i) sum += static_cast<int>(lanes[i]);
    return sum;
  });
}

inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  return cuda_on_cpu::among_warp<uint64_t>(x, [](const uint64_t* lanes) {
    return static_cast<unsigned>(*std::min_element(lanes, lanes + 32));
  });
}

inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  return cuda_on_cpu::among_warp<uint64_t>(x, [](const uint64_t* lanes) {
    return static_cast<unsigned>(*std::max_element(lanes, lanes + 32));
  });
}

inline float __fadd_rn(float x, float y) { return x + y; }  // with -ffp-contract=off, nothing is fused
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline int atomicAdd(int* at, int x) { return std::exchange(*at, *at + x); }
inline int atomicMin(int* at, int x) { return std::exchange(*at, std::min(*at, x)); }
using std::max;
using std::min;
