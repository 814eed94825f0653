// Routed experts on tensor cores: 32 outputs at a time stream through a warp, with up to 8 * kTiles rows of an item.
//
// Few blocks, each going through many items: the weights of a next item are all that a block waits for. The sum over
// inputs is split among the warps of a block for gate and up, and not at all for down: by the matrix, not by the rows.
#pragma once
#include "moe.cuh"
#include "moe_weights.cuh"

namespace kdtp {

constexpr int kMoeWarps = 8, kMoeThreads = 32 * kMoeWarps;

// An item, with the pairs of the lane's rows (g of each tile of 8). Behind the last pair the first one stands again:
// its row is multiplied once more, and thrown away.
template <int kTiles> struct Item {
  int expert, count, pair[kTiles];

  // All at once, whether there is such an item or not: one wait for memory. Past the L1: the down projection reads
  // items while the kernel that follows their writer still runs.
  __device__ void load(const Moe& p, int index) {
    if (p.count == nullptr) return load_pair(p, min(index, p.items_most - 1));
    const int* item = p.items + static_cast<int64_t>(min(index, p.items_most - 1)) * (kItemHead + 8 * kTiles);
    const int2 head = __ldcg(reinterpret_cast<const int2*>(item));
    const int g = threadIdx.x % 32 / 4, first = __ldcg(item + kItemHead);
    expert = head.x, count = head.y;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int read = __ldcg(item + kItemHead + 8 * n + g);
      pair[n] = 8 * n + g < count ? read : first;
    }
  }

 private:
  // Without a list each pair is an item. One without an expert has no rows, and any weights.
  __device__ void load_pair(const Moe& p, int index) {
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

// sum += w x over so many steps, for kSets sets of 16 outputs. The weights of the next kAhead steps are always on their
// way, and a single tile's rows for the next kRowsAhead; more rows do not fit into registers, but come from caches.
// Pointers walk along, so that what is added to them is a constant.
template <class Weights, int kTiles, int kSets, int kAhead> struct Stream {
  static constexpr int kRowsAhead = kTiles == 1 ? kAhead : 0, kSlots = kRowsAhead == 0 ? 1 : kRowsAhead;
  static_assert(kAhead % kSlots == 0, "slots go round with the steps");
  static constexpr int kBlocks = Weights::kStep / kBlock;
  Weights w[kSets];
  typename Weights::Held held[kAhead][kSets];

  __device__ void fetch(int i, int ahead, bool present) {
#pragma unroll
    for (int m = 0; m < kSets; ++m) held[i][m] = w[m].load(ahead, present);
  }

  __device__ void open(int steps) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(i, i, i < steps);
  }

  __device__ void run(Rows<kTiles> rows, int count, int steps, float (&sum)[kSets][kTiles][4]) {
    uint4 x[kSlots][kBlocks][kTiles];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) rows.load(x[i][b], i * kBlocks + b, i < steps);
#pragma unroll 1
    for (int left = steps; left > 0; left -= kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= left) break;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint4(&now)[kTiles] = x[i % kSlots][b];
          if constexpr (kRowsAhead == 0) rows.load(now, i * kBlocks + b, true);
          const auto block = [&](int m) { return typename Weights::Block(held[i][m], b, count >> 31); };
          const typename Weights::Block first = block(0), last = block(kSets - 1);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            if (n > 0 && 8 * n >= count) break;
            const typename Weights::Start start(now[n]);
            first.multiply(now[n], start, sum[0][n]);
            if constexpr (kSets == 2) last.multiply(now[n], start, sum[1][n]);
          }
          if constexpr (kRowsAhead > 0) rows.load(now, (i + kRowsAhead) * kBlocks + b, i + kRowsAhead < left);
        }
        fetch(i, i + kAhead, i + kAhead < left);
      }
#pragma unroll
      for (int m = 0; m < kSets; ++m) w[m].advance(kAhead);
      rows.advance(kAhead * kBlocks);
    }
  }
};

constexpr int kSumStride = 36;  // floats: 16 of gate, 16 of up; no bank conflicts

template <int kTiles> constexpr int gate_up_shared() { return kMoeWarps * 8 * kTiles * kSumStride * 4; }
static_assert(gate_up_shared<2>() <= kSharedMost, "a portable kernel");

// inner = silu(gate) * up. A block does 16 columns of an item at a time; its warps split the inputs, and where a block
// has no more than one such job, gate from up as well (kSets 1): then twice as many warps wait for memory.
template <class Weights, int kTiles, int kSets>
__global__ void __launch_bounds__(kMoeThreads * 2 / kSets, kSets) moe_gate_up_kernel(const Moe p) {
  extern __shared__ float sums[];  // [kMoeWarps, 8 * kTiles, kSumStride]
  __shared__ int pairs[8 * kTiles];
  wait_for_kernel_before();
  let_kernel_behind_start();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int part = warp * kSets / 2, set = kSets == 2 ? 0 : warp % 2;
  const int tiles = p.inter / 16, jobs = items_of(p) * tiles, steps = p.hidden / Weights::kStep;
  const int first = steps * part / kMoeWarps, last = steps * (part + 1) / kMoeWarps;
  Item<kTiles> item, next;
  next.load(p, blockIdx.x / tiles);
  for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
    item = next;
    const int column = job % tiles * 16;
    const int64_t row = static_cast<int64_t>(item.expert) * 2 * p.inter + column;
    constexpr int kAhead = kTiles == 2 ? 2 : kSets == 2 ? 3 : 5;  // as many as registers allow
    Stream<Weights, kTiles, kSets, kAhead> stream;
#pragma unroll
    for (int m = 0; m < kSets; ++m)
      stream.w[m] = {p.w_gate_up, p.s_gate_up, row + (set + m) * p.inter, p.hidden, first};
    stream.open(last - first);
    next.load(p, (job + gridDim.x) / tiles);
    Rows<kTiles> rows;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      rows.x[n] = static_cast<const __nv_bfloat16*>(p.x) + static_cast<int64_t>(item.pair[n] / p.topk) * p.hidden +
                  first * Weights::kStep + 8 * t;
    float sum[kSets][kTiles][4] = {};
    stream.run(rows, item.count, last - first, sum);

    float* const mine = sums + part * 8 * kTiles * kSumStride;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kSets; ++m) {
        float* to = mine + (8 * n + 2 * t) * kSumStride + 16 * (set + m) + g;
        to[0] = sum[m][n][0], to[kSumStride] = sum[m][n][1], to[8] = sum[m][n][2], to[kSumStride + 8] = sum[m][n][3];
      }
      if (warp == 0 && t == 0) pairs[8 * n + g] = item.pair[n];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < item.count * 16; i += blockDim.x) {
      const float* from = sums + i / 16 * kSumStride + i % 16;
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int k = 0; k < kMoeWarps; ++k) {
        gate += from[k * 8 * kTiles * kSumStride];
        up += from[k * 8 * kTiles * kSumStride + 16];
      }
      static_cast<__nv_bfloat16*>(p.inner)[static_cast<int64_t>(pairs[i / 16]) * p.inter + column + i % 16] =
          __float2bfloat16_rn(silu(gate) * up);
    }
    __syncthreads();  // the sums are free again
  }
}

// parts = inner * w_down. A warp does 32 columns of an item at a time. Two steps are on their way: a rank has few (four
// of Kimi K2's on one of eight), and the last ones of an odd turn would come alone (H200: 47 and 45 us, of 16 rows).
template <class Weights, int kTiles>
__global__ void __launch_bounds__(kMoeThreads, 2) moe_down_kernel(const Moe p) {
  let_kernel_behind_start();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, stride = gridDim.x * kMoeWarps;
  const int tiles = p.hidden / 32, jobs = items_of(p) * tiles, steps = p.inter / Weights::kStep;
  int job = blockIdx.x * kMoeWarps + threadIdx.x / 32;
  Item<kTiles> item, next;
  next.load(p, job / tiles);
  for (; job < jobs; job += stride) {
    item = next;
    const int column = job % tiles * 32;
    const int64_t row = static_cast<int64_t>(item.expert) * p.hidden + column;
    Stream<Weights, kTiles, 2, 2> stream = {
        {{p.w_down, p.s_down, row, p.inter, 0}, {p.w_down, p.s_down, row + 16, p.inter, 0}}};
    stream.open(steps);  // they do not depend on the kernel before
    next.load(p, (job + stride) / tiles);
    wait_for_kernel_before();
    Rows<kTiles> rows;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      rows.x[n] = static_cast<const __nv_bfloat16*>(p.inner) + static_cast<int64_t>(item.pair[n]) * p.inter + 8 * t;
    float sum[2][kTiles][4] = {};
    stream.run(rows, item.count, steps, sum);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      // The lane's sums are of rows 2 t and 2 t + 1 of the tile.
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int pair = __shfl_sync(0xffffffffu, item.pair[n], 8 * t + 4 * odd);
        if (8 * n + 2 * t + odd >= item.count) continue;
        float* to = p.parts + static_cast<int64_t>(pair) * p.hidden + column + g;
#pragma unroll
        for (int m = 0; m < 2; ++m) to[16 * m] = sum[m][n][odd], to[16 * m + 8] = sum[m][n][2 + odd];
      }
    }
  }
  wait_for_kernel_before();  // also where there was nothing to do
}

}  // namespace kdtp
