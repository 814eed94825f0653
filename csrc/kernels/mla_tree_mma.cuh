// MLA tree attention in bfloat16 on tensor cores by mma.sync: any GPU since sm_80, within sm_120's shared memory.
//
// Keys are on the 16-side of the product and query columns on the 8-side: S^T = K Q^T, O^T = V^T P^T. A column is one
// head of one row; 8 heads of a row make a group, which fills the 8-side, so that a single row wastes nothing and no
// column's arithmetic depends on what other columns are there, or whether there are any.
#pragma once
#include "mla_tree_items.cuh"

namespace kdtp::mla {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 32;             // keys of one softmax update; part of the arithmetic
constexpr int kQuarters = 4;           // the scores' inner dimension is summed in four parts, each by its own warps
constexpr int kPartStride = kBlock + 4;  // floats; a warp's stores of one fragment go to 32 banks
constexpr int kProbStride = kBlock + 8;  // bfloat16; eight rows of ldmatrix lie in different banks
constexpr int kSharedMost = 101376;

template <int kLora_, int kRope_> struct Shape {
  static constexpr int kLora = kLora_;
  static constexpr int kWidth = kLora_ + kRope_;
  static constexpr int kStride = kWidth + 8;  // an odd number of 16-byte pieces: ldmatrix without bank conflicts
  static constexpr int kSteps = kWidth / 16;
  static constexpr int kStepsPerWarp = (kSteps + kQuarters - 1) / kQuarters;
  static constexpr int kTiles = kLora / 16;
  static constexpr int kTilesPerWarp = (kTiles + kWarps - 1) / kWarps;
  static_assert(kLora % 16 == 0 && kWidth % 16 == 0, "whole tiles");
};

template <int kCount> struct alignas(4 * kCount) Floats {
  float x[kCount];
};

template <class S, int kGroups, int kStages> struct Shared {
  alignas(16) __nv_bfloat16 keys[kStages][kBlock * S::kStride];
  alignas(16) float parts[kQuarters][kGroups * 8 * kPartStride];  // scores by column and key
  alignas(16) __nv_bfloat16 probs[kGroups * 8 * kProbStride];
  alignas(16) float scales[kGroups * 8];  // what each column's O is multiplied with before the block is added
  Fold folds[kGroups * 8];
  int places[kGroups * 8];
};

// One thread block at work on kGroups groups: columns 8 g .. 8 g + 7 are the heads of group g.
template <class S, int kGroups, int kStages> class Worker {
 public:
  __device__ Worker(const Problem& problem, Shared<S, kGroups, kStages>& shared)
      : problem_(problem), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  // The splits from the one at `begin` to the one that ends at `end`; the state of the i-th goes to slot + i, or,
  // folded, all to `slot`.
  __device__ void run(const int (&groups)[kGroups], const Row& row, int begin, int end, int slot, bool folded) {
    __syncthreads();  // a run before this one is done with shared memory
    if (threadIdx.x < kColumns) shared_.places[threadIdx.x] = place_of(groups, threadIdx.x);
    next_ = look_up(row, begin, end);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch(s, row, begin + kBlock * s, end);
    __syncthreads();
    load_queries();
    reset();
    bool first = begin == 0;
    int border = split_end(begin), stage = 0;
    for (int at = begin; at < end; at += kBlock) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // the block is there for all, and all are done with the block before it
      fetch(stage == 0 ? kStages - 1 : stage - 1, row, at + kBlock * (kStages - 1), end);
      block(shared_.keys[stage], end - at);
      if (at + kBlock == border || at + kBlock >= end) {
        finish(slot, folded && !first);
        reset();
        border = split_end(at + kBlock);
        slot += folded ? 0 : 1;
        first = false;
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();
  }

 private:
  static constexpr int kColumns = kGroups * 8;
  static constexpr int kLanesPerColumn = 32 / kGroups;  // in the softmax, where a warp has kGroups columns
  static constexpr int kPieces = S::kWidth / 8;         // of 16 bytes in a cache row
  static constexpr int kLanesPerKey = kThreads / kBlock;

  __device__ int split_end(int position) const {
    const Splits& splits = problem_.batch.splits;
    return splits.begin(splits.of(position) + 1);
  }

  // Row and head of a column as one index; -1 for a column that is none.
  __device__ int place_of(const int (&groups)[kGroups], int column) const {
    int group = -1;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) group = column / 8 == g ? groups[g] : group;
    const int head = group % problem_.octets * 8 + column % 8;
    return group >= 0 && head < problem_.batch.heads ? group / problem_.octets * problem_.batch.heads + head : -1;
  }

  // Fragments of Q^T for this warp's part of the inner dimension; zeros for columns that are none.
  __device__ void load_queries() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int place = shared_.places[g * 8 + lane_ / 4];
      const __nv_bfloat16* q = problem_.q + static_cast<int64_t>(place) * S::kWidth + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < S::kStepsPerWarp; ++i) {
        const int step = warp_ % kQuarters * S::kStepsPerWarp + i;
        const bool there = place >= 0 && step < S::kSteps;
        q_[i][g][0] = there ? *reinterpret_cast<const uint32_t*>(q + step * 16) : 0u;
        q_[i][g][1] = there ? *reinterpret_cast<const uint32_t*>(q + step * 16 + 8) : 0u;
      }
    }
  }

  __device__ void reset() {
    m_ = -INFINITY;
    l_ = 0.0f;
#pragma unroll
    for (int t = 0; t < S::kTilesPerWarp; ++t)
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[t][g][i] = 0.0f;
  }

  // Cache row of this lane's key of a block: a warp copies 4 keys, 8 lanes each. -1 behind the last visible one.
  __device__ int look_up(const Row& row, int at, int end) const {
    const int key = at + threadIdx.x / kLanesPerKey;
    return key < end ? row.cache_row(key) : -1;
  }

  // Start copying the block at `at`, whose rows were looked up one call earlier, and look up those of the next.
  __device__ void fetch(int stage, const Row& row, int at, int end) {
    if (at < end) {
      const int piece = threadIdx.x % kLanesPerKey;
      __nv_bfloat16* to = shared_.keys[stage] + threadIdx.x / kLanesPerKey * S::kStride + piece * 8;
      const __nv_bfloat16* from = problem_.kv + static_cast<int64_t>(max(next_, 0)) * S::kWidth + piece * 8;
#pragma unroll
      for (int i = 0; i < kPieces; i += kLanesPerKey)
        if (i + piece < kPieces) cp_async_16(to + i * 8, from + i * 8, next_ >= 0);
      next_ = look_up(row, at + kBlock, end);
    }
    cp_async_commit();
  }

  // One softmax update of all columns with a block of keys, of which the first `visible` are seen.
  __device__ void block(const __nv_bfloat16* keys, int visible) {
    scores(keys);
    __syncthreads();
    softmax(visible);
    __syncthreads();
    weigh(keys);
  }

  // This warp's part of S^T: 16 keys, all columns, a quarter of the inner dimension.
  __device__ void scores(const __nv_bfloat16* keys) {
    const int quarter = warp_ % kQuarters, half = warp_ / kQuarters;
    float s[kGroups][4] = {};
    const __nv_bfloat16* k = keys + (half * 16 + lane_ % 16) * S::kStride + lane_ / 16 * 8;
#pragma unroll
    for (int i = 0; i < S::kStepsPerWarp; ++i) {
      const int step = quarter * S::kStepsPerWarp + i;
      if (step < S::kSteps) {
        uint32_t a[4];
        ldmatrix_x4(a, k + step * 16);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) mma_m16n8k16(s[g], a, q_[i][g][0], q_[i][g][1]);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float* part = &shared_.parts[quarter][(g * 8 + lane_ % 4 * 2) * kPartStride + half * 16 + lane_ / 4];
      part[0] = s[g][0];
      part[kPartStride] = s[g][1];
      part[8] = s[g][2];
      part[kPartStride + 8] = s[g][3];
    }
  }

  // A warp has kGroups columns, a lane kGroups neighbouring keys of one of them. The sum goes over neighbours first,
  // then over lanes: the same tree over the block's keys whatever kGroups is.
  __device__ void softmax(int visible) {
    const int column = warp_ * kGroups + lane_ / kLanesPerColumn;
    const int key = lane_ % kLanesPerColumn * kGroups;
    Floats<kGroups> part[kQuarters];
#pragma unroll
    for (int i = 0; i < kQuarters; ++i)
      part[i] = *reinterpret_cast<const Floats<kGroups>*>(&shared_.parts[i][column * kPartStride + key]);
    float s[kGroups], top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float sum = __fadd_rn(__fadd_rn(part[0].x[i], part[1].x[i]), __fadd_rn(part[2].x[i], part[3].x[i]));
      s[i] = key + i < visible ? __fmul_rn(sum, problem_.scale) : -INFINITY;
      top = fmaxf(top, s[i]);
    }
#pragma unroll
    for (int offset = 1; offset < kLanesPerColumn; offset <<= 1)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    const float m = fmaxf(m_, top);
    const float scale = fast_exp2(m_ - m);
    float p[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      // l sums the rounded weights, those that O sums with.
      const __nv_bfloat16 rounded = __float2bfloat16_rn(fast_exp2(s[i] - m));
      shared_.probs[column * kProbStride + key + i] = rounded;
      p[i] = __bfloat162float(rounded);
    }
#pragma unroll
    for (int width = 1; width < kGroups; width <<= 1)
#pragma unroll
      for (int i = 0; i < kGroups; i += 2 * width) p[i] = __fadd_rn(p[i], p[i + width]);
    float sum = p[0];
#pragma unroll
    for (int offset = 1; offset < kLanesPerColumn; offset <<= 1)
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
    m_ = m;
    l_ = __fmaf_rn(l_, scale, sum);
    if (lane_ % kLanesPerColumn == 0) shared_.scales[column] = scale;
  }

  // O^T = O^T * scale + V^T P^T for this warp's rows of O^T, all columns.
  __device__ void weigh(const __nv_bfloat16* keys) {
    uint32_t p[kGroups][4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      ldmatrix_x4(p[g], shared_.probs + (g * 8 + lane_ % 8) * kProbStride + lane_ / 8 * 8);
#pragma unroll
    for (int t = 0; t < S::kTilesPerWarp; ++t) {
      const int tile = warp_ * S::kTilesPerWarp + t;
      if (tile >= S::kTiles) break;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) rescale(o_[t][g], g);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        const int key = half * 16 + lane_ % 8 + lane_ / 16 * 8;
        ldmatrix_x4_trans(a, keys + key * S::kStride + tile * 16 + lane_ / 8 % 2 * 8);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) mma_m16n8k16(o_[t][g], a, p[g][2 * half], p[g][2 * half + 1]);
      }
    }
  }

  __device__ void rescale(float (&o)[4], int g) const {
    const float2 scale = *reinterpret_cast<const float2*>(&shared_.scales[g * 8 + lane_ % 4 * 2]);
    o[0] = __fmul_rn(o[0], scale.x);
    o[1] = __fmul_rn(o[1], scale.y);
    o[2] = __fmul_rn(o[2], scale.x);
    o[3] = __fmul_rn(o[3], scale.y);
  }

  __device__ int64_t state(int slot, int place) const {
    return static_cast<int64_t>(slot) * problem_.batch.rows * problem_.batch.heads + place;
  }

  // Write the state of a finished split, or fold it into the one that is there.
  __device__ void finish(int slot, bool folded) {
    const int column = warp_ * kGroups + lane_ / kLanesPerColumn;
    const int place = shared_.places[column];
    if (lane_ % kLanesPerColumn == 0 && place >= 0) {
      float2& to = problem_.states.sums[state(slot, place)];
      const float2 before = folded ? to : make_float2(-INFINITY, 0.0f);
      const Fold weights = fold_weights(before.x, m_);
      shared_.folds[column] = weights;
      to = folded ? make_float2(fmaxf(before.x, m_), fold(weights, before.y, l_)) : make_float2(m_, l_);
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      write_column(g, 0, slot, folded);
      write_column(g, 1, slot, folded);
    }
  }

  __device__ void write_column(int g, int odd, int slot, bool folded) {
    const int column = g * 8 + lane_ % 4 * 2 + odd, place = shared_.places[column];
    if (place < 0) return;
    float* out = problem_.states.outs + state(slot, place) * S::kLora + lane_ / 4;
    const Fold weights = shared_.folds[column];
#pragma unroll
    for (int t = 0; t < S::kTilesPerWarp; ++t) {
      const int tile = warp_ * S::kTilesPerWarp + t;
      if (tile >= S::kTiles) break;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        float& to = out[tile * 16 + below * 8];
        const float o = o_[t][g][2 * below + odd];
        to = folded ? fold(weights, to, o) : o;
      }
    }
  }

  const Problem& problem_;
  Shared<S, kGroups, kStages>& shared_;
  const int warp_, lane_;
  int next_;       // this lane's row of the block that is fetched next
  float m_, l_;    // of this lane's column in the softmax
  uint32_t q_[S::kStepsPerWarp][kGroups][2];
  float o_[S::kTilesPerWarp][kGroups][4];
};

extern __shared__ __align__(128) unsigned char mla_shared[];

template <class S, int kGroups, int kStages, int kMost>
__device__ __forceinline__ void work_on(const Problem& p, const Tile<kMost>& tile, int begin, int end, int slot) {
  int groups[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) groups[g] = tile.groups[g];
  Worker<S, kGroups, kStages> worker(p, *reinterpret_cast<Shared<S, kGroups, kStages>*>(mla_shared));
  worker.run(groups, tile.row, begin, end, slot, p.batch.folded && slot == 0);
}

// Fewer groups than the most get code of their own; what they compute is the same.
template <class S, int kMost, int kStages>
__device__ __forceinline__ void work(const Problem& p, const Tile<kMost>& tile, int begin, int end, int slot) {
  if (begin >= end) return;
  if (tile.count == 1) {
    work_on<S, 1, kStages>(p, tile, begin, end, slot);
  } else if constexpr (kMost > 1) {
    if (tile.count == 2) work_on<S, 2, kStages>(p, tile, begin, end, slot);
    else work_on<S, kMost, kStages>(p, tile, begin, end, slot);
  }
}

// The shared splits of a tile: one, or all of them one after the other, as long as any of its rows has more.
template <class S, int kMost, int kStages> __device__ __forceinline__ void work_shared(const Problem& p, int item) {
  const int base = tile_base<kMost>(p, item % p.tiles);
  if (base < 0) return;
  const Splits& splits = p.batch.splits;
  int split = p.batch.folded ? 0 : p.shared_splits - 1 - item / p.tiles;
  do {
    const Tile<kMost> tile = shared_tile<kMost>(p, base, split);
    if (tile.count == 0) return;
    const int until = p.batch.folded ? tile.until : split + 1;
    work<S, kMost, kStages>(p, tile, splits.begin(split), splits.begin(until), p.batch.folded ? 0 : split);
    split = until;
  } while (p.batch.folded);
}

// A row's keys behind its shared splits, which are its alone.
template <class S, int kMost, int kStages> __device__ __forceinline__ void work_open(const Problem& p, int item) {
  const Tile<kMost> tile = open_tile<kMost>(p, item);
  if (tile.row.padding) return;
  const int begin = p.batch.splits.begin(tile.row.shared);
  work<S, kMost, kStages>(p, tile, begin, tile.row.position + 1, p.batch.folded ? 1 : tile.row.shared);
}

// One thread block per item: first the open ones, then the shared splits, those of the highest positions first, since
// they are the longest.
template <class S, int kMost, int kStages>
__global__ void __launch_bounds__(kThreads, 1) attend_kernel(const __grid_constant__ Problem p) {
  const int item = blockIdx.x;
  if (item < p.open_items) work_open<S, kMost, kStages>(p, item);
  else work_shared<S, kMost, kStages>(p, item - p.open_items);
}

}  // namespace kdtp::mla
