// MLA tree attention for any shape and both element types, all arithmetic in float32: for golden checks, and for
// bfloat16 shapes that the tensor-core kernel is not compiled for. One thread block does 8 heads of a row from the
// first key to the last, so that there is nothing to merge.
#pragma once
#include "mla_tree.cuh"

namespace kdtp::mla {

constexpr int kSimtThreads = 128;
constexpr int kSimtWarps = kSimtThreads / 32;
constexpr int kSimtHeads = 8;
constexpr int kSimtBlock = 64;
constexpr int kSimtWidthMost = 1024;  // lora + rope: queries in 32 KB of shared memory, O in 64 registers

template <typename T> struct SimtProblem {
  Batch batch;
  const T* q;
  const T* kv;
  T* out;
  int lora;
  int width;
  float scale;  // times log2(e)
};

struct SimtShared {
  float queries[kSimtHeads * kSimtWidthMost];
  float scores[kSimtHeads][kSimtBlock];  // then weights
  float scales[kSimtHeads];
  int rows[kSimtBlock];
};

// Scores of the first `count` keys: a warp a key, lanes along the row.
template <typename T>
__device__ __forceinline__ void simt_scores(const SimtProblem<T>& p, SimtShared& shared, int count) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int key = warp; key < count; key += kSimtWarps) {
    const T* row = p.kv + static_cast<int64_t>(shared.rows[key]) * p.width;
    float sums[kSimtHeads] = {};
    for (int i = lane; i < p.width; i += 32) {
      const float k = to_float(row[i]);
#pragma unroll
      for (int h = 0; h < kSimtHeads; ++h) sums[h] = __fmaf_rn(shared.queries[h * p.width + i], k, sums[h]);
    }
#pragma unroll
    for (int h = 0; h < kSimtHeads; ++h) {
#pragma unroll
      for (int offset = 16; offset > 0; offset >>= 1)
        sums[h] = __fadd_rn(sums[h], __shfl_xor_sync(0xffffffffu, sums[h], offset));
      if (lane == 0) shared.scores[h][key] = __fmul_rn(sums[h], p.scale);
    }
  }
}

// Scores become weights; lane i of a head's warp has keys i and i + 32. Returns the factor for what was summed before.
__device__ __forceinline__ float simt_softmax(float* scores, int count, float& m, float& l) {
  const int lane = threadIdx.x % 32;
  const float first = lane < count ? scores[lane] : -INFINITY;
  const float second = lane + 32 < count ? scores[lane + 32] : -INFINITY;
  float top = fmaxf(first, second);
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
  top = fmaxf(m, top);
  const float scale = exp2f(m - top), p = exp2f(first - top), p32 = exp2f(second - top);
  scores[lane] = p;
  scores[lane + 32] = p32;
  float sum = __fadd_rn(p, p32);
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
  m = top;
  l = __fmaf_rn(l, scale, sum);
  return scale;
}

// O = O * scale + P V for this thread's columns.
template <typename T, int kShare>
__device__ __forceinline__ void simt_weigh(const SimtProblem<T>& p, const SimtShared& shared, int count,
                                           float (&o)[kShare][kSimtHeads]) {
#pragma unroll
  for (int share = 0; share < kShare; ++share) {
    const int column = share * kSimtThreads + threadIdx.x;
    if (column >= p.lora) break;
#pragma unroll
    for (int h = 0; h < kSimtHeads; ++h) o[share][h] = __fmul_rn(o[share][h], shared.scales[h]);
    for (int key = 0; key < count; ++key) {
      const float v = to_float(p.kv[static_cast<int64_t>(shared.rows[key]) * p.width + column]);
#pragma unroll
      for (int h = 0; h < kSimtHeads; ++h) o[share][h] = __fmaf_rn(shared.scores[h][key], v, o[share][h]);
    }
  }
}

// Grid: (row, 8 heads). kShare columns of O to a thread.
template <typename T, int kShare>
__global__ void __launch_bounds__(kSimtThreads) simt_kernel(const __grid_constant__ SimtProblem<T> p) {
  __shared__ SimtShared shared;
  constexpr int kHeadsPerWarp = kSimtHeads / kSimtWarps;
  follow_kernel_before();
  const int warp = threadIdx.x / 32;
  const int first_head = blockIdx.y * kSimtHeads, heads = min(kSimtHeads, p.batch.heads - first_head);
  const int64_t place = static_cast<int64_t>(blockIdx.x) * p.batch.heads + first_head;
  const Row row = row_of(p.batch, blockIdx.x);
  const int end = row.padding ? 0 : row.position + 1;
  for (int i = threadIdx.x; i < kSimtHeads * p.width; i += kSimtThreads)
    shared.queries[i] = i < heads * p.width && end > 0 ? to_float(p.q[place * p.width + i]) : 0.0f;
  float o[kShare][kSimtHeads] = {};
  float m[kHeadsPerWarp], l[kHeadsPerWarp] = {};  // of heads warp, warp + 4
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) m[i] = -INFINITY;
  for (int at = 0; at < end; at += kSimtBlock) {
    const int count = min(kSimtBlock, end - at);
    __syncthreads();  // the block before this one is done
    if (static_cast<int>(threadIdx.x) < count) shared.rows[threadIdx.x] = row.cache_row(at + threadIdx.x);
    __syncthreads();
    simt_scores(p, shared, count);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kHeadsPerWarp; ++i) {
      const int head = i * kSimtWarps + warp;
      shared.scales[head] = simt_softmax(shared.scores[head], count, m[i], l[i]);
    }
    __syncthreads();
    simt_weigh<T, kShare>(p, shared, count, o);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) shared.scales[i * kSimtWarps + warp] = l[i];
  __syncthreads();
#pragma unroll
  for (int share = 0; share < kShare; ++share) {
    const int column = share * kSimtThreads + threadIdx.x;
    if (column >= p.lora) break;
#pragma unroll
    for (int h = 0; h < kSimtHeads; ++h) {
      const float result = row.padding ? 0.0f : __fdiv_rn(o[share][h], shared.scales[h]);
      if (h < heads) p.out[(place + h) * p.lora + column] = from_float<T>(result);
    }
  }
}

}  // namespace kdtp::mla
