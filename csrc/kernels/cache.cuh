// Compaction of the KV cache: accepted rows to where they belong, in all layers.
#pragma once
#include "../common/kdtp.cuh"
#include "../common/pack.cuh"

namespace kdtp {

constexpr int kMoveThreads = 256;
constexpr int kMovesMost = 1025;  // of a group: a tree of the largest budget and its root

// Grid: groups, layers. Moves copy the same columns of other rows, so a group is moved slice of columns by slice: each
// slice is read whole before any of it is written, which makes every overlap right.
template <typename Word>
__global__ void __launch_bounds__(kMoveThreads)
    kv_move_kernel(Word* kv, const int64_t* __restrict__ source, const int64_t* __restrict__ target,
                   const int* __restrict__ offsets, int64_t layer_words, int words) {
  constexpr int kHeld = kMovesMost * 16 / sizeof(Word);  // at least a word of every move
  __shared__ Word held[kHeld];
  const int first = offsets[blockIdx.x], moves = offsets[blockIdx.x + 1] - first;
  if (moves == 0) return;
  if (moves < 0 || moves > kMovesMost) __trap();  // known to the device alone, so nothing could be refused
  kv += blockIdx.y * layer_words;
  source += first;
  target += first;
  const int slice = min(words, kHeld / moves);
  for (int start = 0; start < words; start += slice) {
    const int width = min(slice, words - start);
    for (int i = threadIdx.x; i < moves * width; i += kMoveThreads)
      held[i] = kv[source[i / width] * words + start + i % width];
    __syncthreads();
    for (int i = threadIdx.x; i < moves * width; i += kMoveThreads)
      kv[target[i / width] * words + start + i % width] = held[i];
    __syncthreads();
  }
}

}  // namespace kdtp
