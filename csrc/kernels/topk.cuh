// The best of rows of logits: each row is read by a cluster of blocks, which compare notes through shared memory. How a
// row is dealt out to threads depends on its length alone.
#pragma once
#include <cooperative_groups.h>

#include "../common/launch.cuh"
#include "../common/kdtp.cuh"
#include "../common/order.cuh"

namespace kdtp {

constexpr int kRowBlocks = 8;  // of a cluster: as many as every device with clusters allows
constexpr int kArgmaxThreads = 256;
constexpr int kArgmaxQuads = 4;  // of a thread under way at once
constexpr int kTopkThreads = 512;
constexpr int kTopkMost = 64;
constexpr int kPairs = kTopkThreads / 2;

struct Rows {
  const float* logits;
  int64_t stride;
  int vocab;
  bool wide;  // every row can be read four logits at a time
};

// The row's four logits from `column` on; -inf beyond the vocabulary.
__device__ __forceinline__ float4 load_quad(const Rows& rows, const float* row, int column) {
  if (rows.wide && column + 4 <= rows.vocab) return *reinterpret_cast<const float4*>(row + column);
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = column + i < rows.vocab ? row[column + i] : -INFINITY;
  return make_float4(x[0], x[1], x[2], x[3]);
}

__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_kernel(const Rows rows, int64_t vocab_start, float* values, int64_t* ids) {
  constexpr int kStep = 4 * kArgmaxThreads * kRowBlocks;
  __shared__ uint64_t warp_best[kArgmaxThreads / 32];
  __shared__ uint64_t block_best;
  follow_kernel_before();
  const auto cluster = cooperative_groups::this_cluster();
  const int64_t r = blockIdx.x / kRowBlocks;
  const int block = cluster.block_rank(), lane = threadIdx.x % 32;
  const float* const row = rows.logits + r * rows.stride;
  uint64_t best = 0;
  for (int start = 4 * (block * kArgmaxThreads + threadIdx.x); start < rows.vocab; start += kArgmaxQuads * kStep) {
    float4 quads[kArgmaxQuads];
#pragma unroll
    for (int i = 0; i < kArgmaxQuads; ++i) quads[i] = load_quad(rows, row, start + i * kStep);
#pragma unroll
    for (int i = 0; i < 4 * kArgmaxQuads; ++i) {
      const int column = start + i / 4 * kStep + i % 4;
      if (column < rows.vocab) best = max(best, ranked_key(reinterpret_cast<const float*>(quads)[i], column));
    }
  }
  best = warp_max(best);
  if (lane == 0) warp_best[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = warp_max(lane < kArgmaxThreads / 32 ? warp_best[lane] : 0);
    if (lane == 0) block_best = best;
  }
  cluster.sync();
  if (block == 0 && threadIdx.x < 32) {
    best = warp_max(lane < kRowBlocks ? *cluster.map_shared_rank(&block_best, lane) : 0);
    if (lane == 0) {
      values[r] = row[ranked_id(best)];  // not the key's: that of -0 is 0
      ids[r] = vocab_start + ranked_id(best);
    }
  }
  cluster.sync();  // a block's shared memory must live until it has been read
}

// What a block of topk_kernel keeps in shared memory, beside its candidates.
struct TopkShared {
  uint64_t pair_best[kPairs];
  uint64_t list[kTopkMost];                         // the block's k best, largest first; 0 where it has fewer
  uint64_t lists[kRowBlocks][kTopkMost + 1];        // of all blocks of the cluster; padded against bank conflicts
  float maxima[kRowBlocks], sums[kRowBlocks];       // of all blocks
  float scratch[kTopkThreads / 32];
  uint64_t bound;                                   // no key below it is among the k best
  float max, sum;                                   // of the block's logits; sum of exp(logit - max)
  int candidates;
};

// Finite, so that -inf - shift is -inf and not NaN. (NaN and +inf stay, and make every sum NaN.)
__device__ __forceinline__ float shift_of(float max) { return max == -INFINITY ? 0.0f : max; }

// The block's maximum, and a bound that at most 2 * kElements * k keys reach: the k-th largest of the pairs' bests.
__device__ __forceinline__ void find_bound(TopkShared& s, uint64_t best, int k) {
  const int part = threadIdx.x % 2;  // the two threads of a pair compare it with half of the others each
  const uint64_t mine = max(best, __shfl_xor_sync(kWholeWarp, best, 1));
  if (part == 0) s.pair_best[threadIdx.x / 2] = mine;
  if (threadIdx.x == 0) s.bound = 1, s.max = -INFINITY, s.candidates = 0;
  if (threadIdx.x < kTopkMost) s.list[threadIdx.x] = 0;
  __syncthreads();
  int rank = 0;
#pragma unroll 8
  for (int i = part; i < kPairs; i += 2) rank += s.pair_best[i] > mine;
  rank += __shfl_xor_sync(kWholeWarp, rank, 1);
  if (part == 0 && mine != 0 && rank == 0) s.max = ranked_value(mine);
  if (part == 0 && mine != 0 && rank == k - 1) s.bound = mine;
  __syncthreads();
}

// The k largest of the candidates, into the list; their order does not matter. Four threads share a candidate.
__device__ __forceinline__ void sort_candidates(TopkShared& s, const uint64_t* candidates, int k) {
  const int part = threadIdx.x % 4, count = s.candidates;
  for (int start = 0; start < count; start += kTopkThreads / 4) {
    const int at = start + threadIdx.x / 4;
    const uint64_t mine = at < count ? candidates[at] : 0;
    int rank = 0;
#pragma unroll 4
    for (int i = part; i < count; i += 4) rank += candidates[i] > mine;
    rank += __shfl_xor_sync(kWholeWarp, rank, 1);
    rank += __shfl_xor_sync(kWholeWarp, rank, 2);
    if (part == 0 && mine != 0 && rank < k) s.list[rank] = mine;
  }
}

// How many keys of a list, largest first, are above `key`.
__device__ __forceinline__ int count_above(const uint64_t* list, int k, uint64_t key) {
  int low = 0, high = k;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list[middle] > key) low = middle + 1;
    else high = middle;
  }
  return low;
}

// log(sum of exp(logit - max)) over the whole row, and its max. NaN if the row holds NaN or +inf.
__device__ __forceinline__ float log_sum(const TopkShared& s, float& max) {
  max = -INFINITY;
  for (int b = 0; b < kRowBlocks; ++b) max = fmaxf(max, s.maxima[b]);
  float total = 0.0f;
  for (int b = 0; b < kRowBlocks; ++b) total += s.sums[b] * expf(s.maxima[b] - shift_of(max));
  return logf(total);
}

// Each block's list and sum to every block; then each block puts its own keys where they rank among all.
__device__ __forceinline__ void merge(TopkShared& s, int k, float* lp, int64_t* ids) {
  static_assert(kTopkThreads == kTopkMost * kRowBlocks, "one thread for each pair of key and list");
  const auto cluster = cooperative_groups::this_cluster();
  const int block = cluster.block_rank(), entry = threadIdx.x / kRowBlocks, other = threadIdx.x % kRowBlocks;
  cluster.sync();
  const TopkShared& theirs = *cluster.map_shared_rank(&s, other);
  s.lists[other][entry] = theirs.list[entry];
  if (entry == 0) s.maxima[other] = theirs.max, s.sums[other] = theirs.sum;
  cluster.sync();  // also the last that a block reads of another's memory
  const uint64_t mine = s.lists[block][entry];
  int rank = count_above(s.lists[other], k, mine);
#pragma unroll
  for (int offset = 1; offset < kRowBlocks; offset *= 2) rank += __shfl_xor_sync(kWholeWarp, rank, offset);
  if (other != 0) return;
  float max;
  const float log_total = log_sum(s, max);
  if (isnan(log_total)) {
    if (block == 0 && entry < k) lp[entry] = NAN, ids[entry] = entry;
  } else if (mine != 0 && rank < k) {
    const float value = ranked_value(mine);
    lp[rank] = value == -INFINITY ? -INFINITY : fminf((value - max) - log_total, 0.0f);
    ids[rank] = ranked_id(mine);
  }
}

// A thread holds kQuads * 4 logits. Dynamic shared memory: the candidates, k * 2 * kQuads * 4 keys.
template <int kQuads>
__global__ void __launch_bounds__(kTopkThreads)
    topk_kernel(const Rows rows, int k, float* lp, int64_t* ids) {
  constexpr int kElements = 4 * kQuads, kStep = 4 * kTopkThreads * kRowBlocks;
  extern __shared__ uint64_t candidates[];
  __shared__ TopkShared s;
  follow_kernel_before();
  const int64_t r = blockIdx.x / kRowBlocks;
  const int block = cooperative_groups::this_cluster().block_rank();
  const int start = 4 * (block * kTopkThreads + threadIdx.x);
  float4 quads[kQuads];
  const float* const x = reinterpret_cast<const float*>(quads);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) quads[i] = load_quad(rows, rows.logits + r * rows.stride, start + i * kStep);
  float most = x[0];
  int column = start;
#pragma unroll
  for (int i = 1; i < kElements; ++i) {  // columns rise with i: the first of equals stays
    if (x[i] > most) most = x[i], column = start + i / 4 * kStep + i % 4;
  }
  find_bound(s, column < rows.vocab ? ranked_key(most, column) : 0, k);
  const uint64_t bound = s.bound;
  const float least = bound > 1 ? ranked_value(bound) : -INFINITY, shift = shift_of(s.max);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    sum += expf(x[i] - shift);
    const int id = start + i / 4 * kStep + i % 4;
    if (x[i] >= least && id < rows.vocab && ranked_key(x[i], id) >= bound)
      candidates[atomicAdd(&s.candidates, 1)] = ranked_key(x[i], id);
  }
  sum = block_sum(sum, s.scratch);
  if (threadIdx.x == 0) s.sum = sum;
  sort_candidates(s, candidates, k);
  merge(s, k, lp + r * k, ids + r * k);
}

}  // namespace kdtp
