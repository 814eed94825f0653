// Routed experts: what every form shares. A call is four kernels: pairs are assigned to items, the items' gate and up
// projections with their silu * up, their down projection, and the weighted sum of each row.
#pragma once
#include "../common/kdtp.cuh"
#include "../common/launch.cuh"

namespace kdtp {

constexpr int kMoeExpertsMost = 1024;  // one thread of the assigning block for each
constexpr int kItemHead = 4;           // ints before an item's pairs: expert, number of pairs, two of padding

// A pair is a row and one of its choices: row * topk + k. An item is one expert and up to `tile` of its pairs.
struct Moe {
  const void* x;         // [rows, hidden] T
  const int* ids;        // [rows, topk]
  const float* weights;  // [rows, topk]
  const void *w_gate_up, *w_down, *s_gate_up, *s_down;
  const void* add;  // [rows, hidden] T, or null
  void* out;     // [rows, hidden] T
  int* count;    // [1]: items; null: no list of items, each pair is one
  int* items;    // [items_most, kItemHead + tile]
  void* inner;   // [rows * topk, inter] T: silu(gate) * up, on tensor cores times the weights' kRowScale
  float* parts;  // [rows * topk, hidden]: what each pair adds, without its weight
  int rows, hidden, inter, experts, topk, tile;
  int items_most;  // that there can be
};

// The exclusive sum over 1024 threads.
__device__ __forceinline__ int sum_before(int mine) {
  __shared__ int sums[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int up_to = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, up_to, offset);
    if (lane >= offset) up_to += before;
  }
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  int total = up_to - mine;
  for (int i = 0; i < warp; ++i) total += sums[i];
  return total;
}

// Items of all experts that are hit, experts and pairs ascending: a counting sort by one block of 1024 threads.
__global__ void __launch_bounds__(1024, 1) moe_assign_kernel(const Moe p) {
  __shared__ int taken[kMoeExpertsMost], first[kMoeExpertsMost];  // pairs of each expert so far; its first item
  __shared__ int items;
  follow_kernel_before();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int pairs = p.rows * p.topk, stride = kItemHead + p.tile;
  taken[thread] = 0;
  __syncthreads();
  // As unsigned, an id below 0 is beyond every expert, too.
  for (int i = thread; i < pairs; i += 1024) {
    const unsigned id = p.ids[i];
    if (id < p.experts) atomicAdd(&taken[id], 1);
  }
  __syncthreads();
  const int mine = taken[thread], tiles = (mine + p.tile - 1) / p.tile, before = sum_before(tiles);
  first[thread] = before;
  taken[thread] = 0;
  for (int i = 0; i < tiles; ++i) {
    int* item = p.items + static_cast<int64_t>(before + i) * stride;
    const int count = min(p.tile, mine - i * p.tile);
    item[0] = thread, item[1] = count;
    for (int at = count; at < p.tile; ++at) item[kItemHead + at] = 0;  // read, and thrown away
  }
  if (thread == 1023) *p.count = items = before + tiles;
  __syncthreads();
  // Who reads items does so before it knows how many there are.
  for (int i = items * stride + thread; i < p.items_most * stride; i += 1024) p.items[i] = 0;
  for (int start = 0; start < pairs; start += 1024) {
    const int pair = start + thread, warps = min(32, (pairs - start + 31) / 32);
    const unsigned id = pair < pairs ? p.ids[pair] : ~0u;
    const bool valid = id < p.experts;
    const unsigned same = __match_any_sync(0xffffffffu, id);
    const int rank = __popc(same & ((1u << lane) - 1));
    int place = 0;
    // One warp after the other, so that the places go up with the pairs.
    for (int turn = 0; turn < warps; ++turn) {
      if (warp == turn) {
        if (valid) place = taken[id] + rank;
        __syncwarp();
        if (valid && rank == 0) taken[id] += __popc(same);
      }
      __syncthreads();
    }
    if (valid) p.items[static_cast<int64_t>(first[id] + place / p.tile) * stride + kItemHead + place % p.tile] = pair;
  }
}

constexpr int kSumThreads = 256, kSumAhead = 8;  // parts that a thread loads at a time
constexpr int kMoeTopkMost = 64;

// out[r] = sum over k, in order, of weights[r, k] * parts[r, k]. Grid: tiles of columns, rows.
template <typename T> __global__ void __launch_bounds__(kSumThreads) moe_sum_kernel(const Moe p) {
  __shared__ float weights[kMoeTopkMost];
  __shared__ bool valid[kMoeTopkMost];
  const int row = blockIdx.y, column = blockIdx.x * kSumThreads + threadIdx.x;
  if (threadIdx.x < kMoeTopkMost) {  // ids and weights are older than the kernel before
    const int pair = row * p.topk + threadIdx.x;
    const bool is = threadIdx.x < p.topk && static_cast<unsigned>(p.ids[pair]) < p.experts;
    valid[threadIdx.x] = is;
    weights[threadIdx.x] = is ? p.weights[pair] : 0.0f;
  }
  __syncthreads();
  wait_for_kernel_before();
  let_kernel_behind_start();  // no earlier: its weights would come in the way of those of the kernel before
  if (column >= p.hidden) return;
  const float* part = p.parts + static_cast<int64_t>(row) * p.topk * p.hidden + column;
  float sum = 0.0f;
  for (int start = 0; start < p.topk; start += kSumAhead) {
    float value[kSumAhead];
#pragma unroll
    for (int i = 0; i < kSumAhead; ++i) {
      const int k = start + i;
      value[i] = valid[k] ? part[static_cast<int64_t>(k) * p.hidden] : 0.0f;  // nobody wrote the parts of padding
    }
#pragma unroll
    for (int i = 0; i < kSumAhead; ++i) sum = fmaf(weights[start + i], value[i], sum);
  }
  const int64_t at = static_cast<int64_t>(row) * p.hidden + column;
  if (p.add != nullptr) sum += to_float(static_cast<const T*>(p.add)[at]);
  static_cast<T*>(p.out)[at] = from_float<T>(sum);
}
static_assert(kMoeTopkMost % kSumAhead == 0, "the last turn stays in bounds");

}  // namespace kdtp
