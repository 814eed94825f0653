// MLA tree attention: where a row's keys lie, how positions are cut, and the merge of the pieces.
//
// A row sees the positions 0 .. start + depth of its own text. They are cut into splits by absolute position alone. The
// state of a split (m: maximum score, l: sum of weights, O: weighted sum of latents) starts empty and takes the split's
// keys in order; the states are then folded in order. Nothing in this arithmetic knows the batch, the tree or which
// thread block did it, so a tree node gets, bit for bit, what decoding the same text gives it.
#pragma once
#include "../common/kdtp.cuh"
#include "../common/launch.cuh"
#include "../common/mma.cuh"

namespace kdtp::mla {

constexpr int kLogPage = 6, kPage = 1 << kLogPage;

// Splits are shorter near position 0: a short context needs many of them to fill the device, a long one has them
// anyway, and every split costs a state to write and to fold. `split` is a power of two, at least 64.
struct Splits {
  static constexpr int kTiers = 4;
  int log;  // of the longest ones' positions

  // Positions of a tier's splits, as a power of two, and where the tier ends; the last has no end.
  __host__ __device__ int size(int tier) const { return log - 3 + tier > kLogPage ? log - 3 + tier : kLogPage; }
  __host__ __device__ int end(int tier) const { return (tier == 2 ? 16 : 2 << tier) << log; }

  // The split that holds `position`; as many lie wholly below it.
  __host__ __device__ int of(int position) const {
    int below = 0, begin = 0;
#pragma unroll
    for (int tier = 0; tier < kTiers - 1; ++tier) {
      if (position < end(tier)) return below + ((position - begin) >> size(tier));
      below += (end(tier) - begin) >> size(tier);
      begin = end(tier);
    }
    return below + ((position - begin) >> size(kTiers - 1));
  }

  // Its first position.
  __host__ __device__ int begin(int split) const {
    int below = 0, begin = 0;
#pragma unroll
    for (int tier = 0; tier < kTiers - 1; ++tier) {
      const int count = (end(tier) - begin) >> size(tier);
      if (split < below + count) return begin + ((split - below) << size(tier));
      below += count;
      begin = end(tier);
    }
    return begin + ((split - below) << size(kTiers - 1));
  }
};

// The rows of a call, and the slots of the workspace that hold their states.
struct Batch {
  const int* row_seq;
  const int* row_depth;
  const int* path;
  const int* starts;
  const int* first_row;
  const int* pages;
  int rows;
  int seqs;
  int heads;
  int max_depth;
  int max_pages;
  Splits splits;
  bool folded;  // all shared states of a row are folded into slot 0 as they come; the others follow from slot 1
};

// Where the keys of one row lie. Row i of the sequence is stored at start + i, which is also its position where all
// rows before it are its ancestors: the whole of a chain, so that a prefill chunk is as regular as a prefix.
struct Row {
  const int* pages;
  const int* path;  // null if every key is stored at its position
  int start;
  int position;
  int shared;  // splits whose keys are stored at their positions, all of them visible
  bool padding;

  __device__ int cache_row(int key) const {
    const int at = path == nullptr || key < start ? key : start + path[key - start];
    return pages[at / kPage] * kPage + at % kPage;
  }
};

__device__ __forceinline__ Row row_of(const Batch& batch, int row) {
  Row r{};
  const int seq = batch.row_seq[row];
  r.padding = seq < 0;
  if (r.padding) return r;
  const int depth = batch.row_depth[row];
  const bool chain = depth == row - batch.first_row[seq];
  r.start = batch.starts[seq];
  r.position = r.start + depth;
  r.pages = batch.pages + static_cast<int64_t>(seq) * batch.max_pages;
  r.path = chain ? nullptr : batch.path + static_cast<int64_t>(row) * batch.max_depth;
  r.shared = batch.splits.of(chain ? r.position + 1 : r.start);
  return r;
}

// States by slot, row and head: (m, l) of each, behind them O [lora] of each.
struct States {
  float2* sums;
  float* outs;

  __host__ __device__ States(void* workspace, int64_t slots, int64_t rows, int64_t heads)
      : sums(static_cast<float2*>(workspace)),
        // Padded to 16 bytes; kdtp_mla_tree_workspace counts the same.
        outs(static_cast<float*>(workspace) + (slots * rows * heads * 2 + 3) / 4 * 4) {}
};

// m, l and O of a fold go on as O * kept + O' * added, and l alike: one formula wherever a state is folded in.
struct Fold {
  float kept;
  float added;
};

__device__ __forceinline__ Fold fold_weights(float m, float next) {
  const float top = fmaxf(m, next);
  return {fast_exp2(m - top), fast_exp2(next - top)};
}

__device__ __forceinline__ float fold(Fold weights, float total, float next) {
  return __fmaf_rn(total, weights.kept, __fmul_rn(next, weights.added));
}

constexpr int kMergeThreads = 128;
constexpr int kMergeBatch = 16;

// One warp: the weights of folding states 1 .. count - 1 into state 0, in order. The running maximum is a prefix
// maximum, which is exact in any order, so that all weights are made at once.
__device__ __forceinline__ void merge_weights(const float2* sums, int64_t stride, int count, float4* weights) {
  const int lane = threadIdx.x & 31;
  float before = -INFINITY;
  for (int base = 0; base < count; base += 32) {
    const int i = base + lane;
    const float2 sum = i < count ? sums[i * stride] : make_float2(-INFINITY, 0.0f);
    float top = sum.x;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const float other = __shfl_up_sync(0xffffffffu, top, offset);
      if (lane >= offset) top = fmaxf(top, other);
    }
    const float above = __shfl_up_sync(0xffffffffu, top, 1);
    const float m = lane == 0 ? before : fmaxf(before, above);
    const Fold fold = fold_weights(m, sum.x);
    if (i < count) weights[i] = make_float4(fold.kept, fold.added, sum.y, 0.0f);
    before = fmaxf(before, __shfl_sync(0xffffffffu, top, 31));
  }
}

// out = O / l after the fold. Grid: (row and head, columns in tiles of kMergeThreads). Shared memory: a float4 a slot.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const Batch batch, const States states, T* __restrict__ out, int lora) {
  extern __shared__ float4 merge_shared[];
  const int64_t place = blockIdx.x;
  const int column = blockIdx.y * kMergeThreads + threadIdx.x;
  let_kernel_behind_start();
  const Row row = row_of(batch, blockIdx.x / batch.heads);
  if (row.padding) {
    wait_for_kernel_before();
    if (column < lora) out[place * lora + column] = from_float<T>(0.0f);
    return;
  }
  const int last = batch.splits.of(row.position);
  const int begin = batch.folded && row.shared == 0 ? 1 : 0;
  const int count = (batch.folded ? last + 1 - row.shared + 1 : last + 1) - begin;
  const int64_t stride = static_cast<int64_t>(batch.rows) * batch.heads;
  wait_for_kernel_before();
  if (threadIdx.x < 32) merge_weights(states.sums + begin * stride + place, stride, count, merge_shared);
  __syncthreads();
  if (column >= lora) return;
  const float* states_of = states.outs + (begin * stride + place) * lora + column;
  float total = states_of[0], l = merge_shared[0].z;
#pragma unroll 1
  for (int first = 1; first < count; first += kMergeBatch) {
    float next[kMergeBatch];  // loaded together: one latency for all of them
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) next[i] = first + i < count ? states_of[(first + i) * stride * lora] : 0.0f;
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      if (first + i >= count) break;
      const float4 w = merge_shared[first + i];
      total = fold({w.x, w.y}, total, next[i]);
      l = fold({w.x, w.y}, l, w.z);
    }
  }
  out[place * lora + column] = from_float<T>(__fdiv_rn(total, l));
}

}  // namespace kdtp::mla
