// Routed experts on tensor cores: 32 outputs at a time stream through a warp, with up to 8 * kTiles rows of an item.
//
// Few blocks, each with a run of columns, one behind the other: as long as the item is the same, the next weights are on
// their way while a column's sums are put together. The sum over inputs is split among the warps of a block for gate and
// up, and not at all for down: by the matrix, not by the rows.
#pragma once
#include "moe.cuh"
#include "moe_weights.cuh"

namespace kdtp {

constexpr int kMoeWarps = 8, kMoeThreads = 32 * kMoeWarps;

// An item, with the pairs of the lane's rows (g of each tile of 8). Behind the last pair the first one stands again:
// its row is multiplied once more, and thrown away.
template <int kTiles> struct Item {
  int expert, count, index, pair[kTiles];

  // All at once: one wait for memory. Past the L1: the down projection reads items while the kernel that follows their
  // writer still runs.
  __device__ void load(const Moe& p, int at) {
    index = at;
    if (p.count == nullptr) return load_pair(p);
    const int* item = p.items + static_cast<int64_t>(index) * (kItemHead + 8 * kTiles);
    const int2 head = __ldcg(reinterpret_cast<const int2*>(item));
    const int g = threadIdx.x % 32 / 4, first = __ldcg(item + kItemHead);
    expert = head.x, count = head.y;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int read = __ldcg(item + kItemHead + 8 * n + g);
      pair[n] = 8 * n + g < count ? read : first;
    }
  }

  // The pair of any of its rows.
  __device__ int pair_of(const Moe& p, int row) const {
    if (p.count == nullptr) return index;
    return __ldcg(p.items + static_cast<int64_t>(index) * (kItemHead + 8 * kTiles) + kItemHead + row);
  }

 private:
  // Without a list each pair is an item. One without an expert has no rows, and any weights.
  __device__ void load_pair(const Moe& p) {
    const int id = __ldcg(p.ids + index);
    const bool valid = static_cast<unsigned>(id) < p.experts;
    expert = valid ? id : 0, count = valid ? 1 : 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) pair[n] = index;
  }
};

__device__ __forceinline__ int items_of(const Moe& p) { return p.count == nullptr ? p.items_most : __ldcg(p.count); }

// The lane's share of rows of x: 16 bytes of row g of each tile for every 32 inputs.
template <int kTiles> struct Rows {
  const __nv_bfloat16* x[kTiles];  // input 8 t of the next block

  __device__ void load(uint4 (&to)[kTiles], int block, bool present) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) to[n] = load_16(x[n] + block * kBlock, present);
  }

  __device__ void advance(int blocks) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) x[n] += blocks * kBlock;
  }
};

// Products w x of an item, for kSets sets of 16 outputs at a time and then for those whose weights begin `jump` steps
// behind the end of these, if the steps are a multiple of kAhead. The weights of the next kAhead steps are always on
// their way, and a single tile's rows for the next kRowsAhead; more rows do not fit into registers, but come from
// caches. Pointers walk along, so that what is added to them is a constant. kScaleRows: rows are multiplied by what the
// weights want as they come; else they are already.
template <class Weights, int kTiles, int kSets, int kAhead, bool kScaleRows> struct Stream {
  static constexpr int kRowsAhead = kTiles == 1 ? kAhead : 0, kSlots = kRowsAhead == 0 ? 1 : kRowsAhead;
  static_assert(kAhead % kSlots == 0, "slots go round with the steps");
  static constexpr int kBlocks = Weights::kStep / kBlock;
  int steps, jump;
  Weights w[kSets];
  Rows<kTiles> rows;
  typename Weights::Held held[kAhead][kSets];
  uint4 x[kSlots][kBlocks][kTiles];

  __device__ void fetch(int i, int ahead, bool present) {
#pragma unroll
    for (int m = 0; m < kSets; ++m) held[i][m] = w[m].load(ahead, present);
  }

  __device__ void open_weights() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(i, i, i < steps);
  }

  __device__ void open_rows() {
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) rows.load(x[i][b], i * kBlocks + b, i < steps);
  }

  __device__ void advance_weights(int by) {
#pragma unroll
    for (int m = 0; m < kSets; ++m) w[m].advance(by);
  }

  // sum += w x; `more` products follow.
  __device__ void multiply(int count, bool more, float (&sum)[kSets][kTiles][4]) {
    const int behind = more ? kAhead : 0;
#pragma unroll 1
    for (int left = steps; left > 0; left -= kAhead) {
      if (left <= kAhead) {  // all that is fetched from here on belongs to the next product
        advance_weights(jump);
        if constexpr (kRowsAhead > 0) rows.advance(-steps * kBlocks);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= left) break;
        const bool next = i + kAhead < left + behind;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint4(&now)[kTiles] = x[i % kSlots][b];
          if constexpr (kRowsAhead == 0) rows.load(now, i * kBlocks + b, true);
          const auto block = [&](int m) { return typename Weights::Block(held[i][m], b, count >> 31); };
          const typename Weights::Block first = block(0), last = block(kSets - 1);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            if (n > 0 && 8 * n >= count) break;
            if constexpr (kScaleRows && Weights::kRowScale != 1.0f) scale_16(now[n], Weights::kRowScale);
            const typename Weights::Start start(now[n]);
            first.multiply(now[n], start, sum[0][n]);
            if constexpr (kSets == 2) last.multiply(now[n], start, sum[1][n]);
          }
          if constexpr (kRowsAhead > 0) rows.load(now, (i + kRowsAhead) * kBlocks + b, next);
        }
        fetch(i, i + kAhead, next);
      }
      advance_weights(kAhead);
      rows.advance(kAhead * kBlocks);
    }
    if constexpr (kRowsAhead == 0) rows.advance(-steps * kBlocks);
  }
};

// The share of block or warp `index` of `of` in so many jobs: one run, as long as the others' or one longer.
struct Share {
  int first, last;
  __device__ Share(int jobs, int index, int of)
      : first(static_cast<int64_t>(jobs) * index / of), last(static_cast<int64_t>(jobs) * (index + 1) / of) {}
};

constexpr int kSumStride = 36;  // floats: 16 of gate, 16 of up; no bank conflicts

template <int kTiles> constexpr int kGateUpSums = kMoeWarps * 8 * kTiles * kSumStride;
template <int kTiles> constexpr int gate_up_shared() { return 2 * 4 * kGateUpSums<kTiles>; }
static_assert(gate_up_shared<2>() <= kSharedMost, "a portable kernel");

// inner = silu(gate) * up, times what the weights want. A block does 16 columns of an item at a time; its warps split
// the inputs, and where a block has no more than one such job, gate from up as well (kSets 1): then twice as many warps
// wait for memory.
template <class Weights, int kTiles, int kSets>
__global__ void __launch_bounds__(kMoeThreads * 2 / kSets, kSets) moe_gate_up_kernel(const Moe p) {
  extern __shared__ float sums[];  // [2, kMoeWarps, 8 * kTiles, kSumStride]: one is read while the other is written
  wait_for_kernel_before();
  let_kernel_behind_start();
  constexpr int kAhead = kSets == 2 ? 2 : 4;  // as many as registers allow
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int part = warp * kSets / 2, set = kSets == 2 ? 0 : warp % 2;
  const int tiles = p.inter / 16, steps = p.hidden / Weights::kStep;
  const int first = steps * part / kMoeWarps, last = steps * (part + 1) / kMoeWarps;
  const bool in_a_row = steps % (kMoeWarps * kAhead) == 0;
  const auto* x = static_cast<const __nv_bfloat16*>(p.x) + first * Weights::kStep + 8 * t;
  const Share share(items_of(p) * tiles, blockIdx.x, gridDim.x);
  // In the end a thread looks after one column of one row.
  static_assert(8 * kTiles * 16 <= kMoeThreads, "as many as there are threads");
  const int column = threadIdx.x % 16;
  int buffer = 0;
  for (int job = share.first; job < share.last;) {
    const int tile = job % tiles, run = in_a_row ? min(share.last - job, tiles - tile) : 1;
    Item<kTiles> item;
    item.load(p, job / tiles);
    job += run;
    const int64_t row = static_cast<int64_t>(item.expert) * 2 * p.inter + tile * 16;
    Stream<Weights, kTiles, kSets, kAhead, true> stream;
    stream.steps = last - first, stream.jump = Weights::kRowsOfSet * steps - stream.steps;
#pragma unroll
    for (int m = 0; m < kSets; ++m)
      stream.w[m] = {p.w_gate_up, p.s_gate_up, row + (set + m) * p.inter, p.hidden, first};
    stream.open_weights();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      stream.rows.x[n] = x + static_cast<int64_t>(item.pair[n] / p.topk) * p.hidden;
    stream.open_rows();
    const int pair = item.pair_of(p, min(static_cast<int>(threadIdx.x) / 16, item.count - 1));
    for (int i = 0; i < run; ++i) {
      float sum[kSets][kTiles][4] = {};
      stream.multiply(item.count, i + 1 < run, sum);

      float* const all = sums + buffer * kGateUpSums<kTiles>;
      buffer ^= 1;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int m = 0; m < kSets; ++m) {
          float* to = all + (part * 8 * kTiles + 8 * n + 2 * t) * kSumStride + 16 * (set + m) + g;
          to[0] = sum[m][n][0], to[kSumStride] = sum[m][n][1], to[8] = sum[m][n][2], to[kSumStride + 8] = sum[m][n][3];
        }
      }
      __syncthreads();
      if (threadIdx.x < item.count * 16) {
        const float* from = all + threadIdx.x / 16 * kSumStride + column;
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int k = 0; k < kMoeWarps; ++k) {
          gate += from[k * 8 * kTiles * kSumStride];
          up += from[k * 8 * kTiles * kSumStride + 16];
        }
        const float unit = column < 8 ? Weights::kLowScale : Weights::kHighScale;
        static_cast<__nv_bfloat16*>(p.inner)[static_cast<int64_t>(pair) * p.inter + (tile + i) * 16 + column] =
            __float2bfloat16_rn(silu(gate * unit) * (up * unit) * Weights::kRowScale);
      }
    }
  }
}

// parts = inner * w_down. A warp does 32 columns of an item at a time.
template <class Weights, int kTiles>
__global__ void __launch_bounds__(kMoeThreads, 2) moe_down_kernel(const Moe p) {
  let_kernel_behind_start();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, tiles = p.hidden / 32;
  constexpr int kAhead = 2;
  const Share share(items_of(p) * tiles, blockIdx.x * kMoeWarps + threadIdx.x / 32, gridDim.x * kMoeWarps);
  for (int job = share.first; job < share.last;) {
    Stream<Weights, kTiles, 2, kAhead, false> stream;
    stream.steps = p.inter / Weights::kStep, stream.jump = (2 * Weights::kRowsOfSet - 1) * stream.steps;
    const int tile = job % tiles, run = stream.steps % kAhead == 0 ? min(share.last - job, tiles - tile) : 1;
    Item<kTiles> item;
    item.load(p, job / tiles);
    job += run;
    const int64_t row = static_cast<int64_t>(item.expert) * p.hidden + tile * 32;
#pragma unroll
    for (int m = 0; m < 2; ++m) stream.w[m] = {p.w_down, p.s_down, row + 16 * m, p.inter, 0};
    stream.open_weights();  // they do not depend on the kernel before
    wait_for_kernel_before();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      stream.rows.x[n] = static_cast<const __nv_bfloat16*>(p.inner) + static_cast<int64_t>(item.pair[n]) * p.inter + 8 * t;
    stream.open_rows();
    // The lane's sums are of rows 2 t and 2 t + 1 of each tile.
    float* to[kTiles][2];
    bool valid[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int pair = __shfl_sync(0xffffffffu, item.pair[n], 8 * t + 4 * odd);
        to[n][odd] = p.parts + static_cast<int64_t>(pair) * p.hidden + tile * 32 + g;
        valid[n][odd] = 8 * n + 2 * t + odd < item.count;
      }
    }
    for (int i = 0; i < run; ++i) {
      float sum[2][kTiles][4] = {};
      stream.multiply(item.count, i + 1 < run, sum);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float* const here = to[n][odd] + i * 32;
          if (!valid[n][odd]) continue;
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            here[16 * m] = sum[m][n][odd] * Weights::kLowScale;
            here[16 * m + 8] = sum[m][n][2 + odd] * Weights::kHighScale;
          }
        }
      }
    }
  }
  wait_for_kernel_before();  // also where there was nothing to do
}

}  // namespace kdtp
