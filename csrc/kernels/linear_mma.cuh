// Products of a few rows on tensor cores: bfloat16, `in` a multiple of 32, 16-byte aligned rows.
//
// The blocks of a cluster share a tile of outputs and split its inputs; within a block, too, warps may split them.
// Which inputs go where depends on the matrix alone, and partial sums are added in the order of the inputs.
#pragma once
#include "../common/launch.cuh"
#include "fragments.cuh"
#include "linear.cuh"

namespace kdtp {

constexpr int kLinearWarps = 8, kLinearThreads = 32 * kLinearWarps;

// kTiles: tiles of 8 rows. kOutWarps: warps side by side over outputs; the others split the inputs.
template <int kTiles, int kOutWarps> struct LinearTile {
  static constexpr int kRows = 8 * kTiles, kOuts = 16 * kOutWarps, kParts = kLinearWarps / kOutWarps;
  static constexpr int kAhead = kTiles <= 2 ? 8 : 4;  // blocks of a warp that are on their way, as registers allow
  static constexpr int kUnits = 4 * kAhead * kParts;  // 16-byte units of a row of x that are staged at a time
  // No bank conflicts: 64 bytes behind each row, as eight lanes read 64 bytes of two rows; 4 floats behind each sum.
  static constexpr int kStride = (kUnits + 3) / 8 * 8 + 4, kPadded = kOuts + 4;
  static constexpr int kStageBytes = kRows * kStride * 16, kSumBytes = kParts * kRows * kPadded * 4;
  static constexpr int kShared = 2 * kStageBytes > kSumBytes ? 2 * kStageBytes : kSumBytes;
  static_assert(kShared <= kSharedMost, "a portable kernel");
};

// Blocks of 32 inputs, first .. last - 1.
struct Blocks {
  int first, last;

  // The part-th of so many near equal parts.
  __device__ Blocks part(int index, int parts) const {
    const int all = last - first;
    return {first + all * index / parts, first + all * (index + 1) / parts};
  }
};

// Copy the next kAhead blocks of every part of `mine`, from their `done`-th on; zeros where no row or block is.
template <class Tile>
__device__ __forceinline__ void stage(uint4* to, const __nv_bfloat16* x, int64_t x_row, int rows, Blocks mine,
                                      int done) {
  constexpr int kAll = Tile::kRows * Tile::kUnits;
#pragma unroll(kAll > 2 * kLinearThreads ? 1 : 2)  // more at once would cost more registers than there are
  for (int start = 0; start < kAll; start += kLinearThreads) {
    const int i = start + threadIdx.x, row = i / Tile::kUnits, unit = i % Tile::kUnits;
    if (kAll % kLinearThreads != 0 && i >= kAll) break;
    const Blocks part = mine.part(unit / (4 * Tile::kAhead), Tile::kParts);
    const int block = part.first + done + unit / 4 % Tile::kAhead;
    const bool present = row < rows && block < part.last;
    const __nv_bfloat16* from = present ? x + row * x_row + block * kBlock + unit % 4 * 8 : x;
    cp_async_16(to + row * Tile::kStride + unit, from, present);
  }
}

// Add up the partial sums of all parts and blocks, in the order of the inputs, and store. Each block does its share.
template <class Tile>
__device__ __forceinline__ void join(const Linear& p, const float* sums, int row0, int head, int out0) {
  const int rows = min(Tile::kRows, p.rows - row0), splits = gridDim.x;
  for (int i = blockIdx.x * kLinearThreads + threadIdx.x; i < rows * Tile::kOuts; i += splits * kLinearThreads) {
    const int row = i / Tile::kOuts, out = i % Tile::kOuts;
    float total = 0.0f;
#pragma unroll 4
    for (int split = 0; split < splits; ++split)
#pragma unroll
      for (int part = 0; part < Tile::kParts; ++part)
        total += cluster_float(sums + (part * Tile::kRows + row) * Tile::kPadded + out, split);
    if (out0 + out < p.out) store<__nv_bfloat16>(p, row0 + row, head, out0 + out, total);
  }
}

// Grid: splits (one cluster), tiles of rows, tiles of outputs of all heads.
template <int kTiles, int kOutWarps>
__global__ void __launch_bounds__(kLinearThreads, 2) linear_mma_kernel(const Linear p) {
  using Tile = LinearTile<kTiles, kOutWarps>;
  constexpr int kAhead = Tile::kAhead;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int out_warp = warp % kOutWarps, part = warp / kOutWarps;
  const int out_tiles = (p.out + Tile::kOuts - 1) / Tile::kOuts, head = blockIdx.z / out_tiles;
  const int out0 = blockIdx.z % out_tiles * Tile::kOuts, row0 = blockIdx.y * Tile::kRows;
  const Blocks split = Blocks{0, p.in / kBlock}.part(blockIdx.x, gridDim.x);
  const Blocks mine = split.part(part, Tile::kParts);
  const int most = (split.last - split.first + Tile::kParts - 1) / Tile::kParts;  // blocks of the longest part

  const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(p.x) + row0 * p.x_row + head * p.x_head;
  // Beyond the last output the last one is taken again, and thrown away.
  const int out = min(out0 + 16 * out_warp + g, p.out - 1);
  const int out_high = min(out0 + 16 * out_warp + g + 8, p.out - 1);
  const __nv_bfloat16* w = static_cast<const __nv_bfloat16*>(p.w) + 8 * t + mine.first * kBlock +
                           (static_cast<int64_t>(head) * p.out + out) * p.in;
  const int to_high = (out_high - out) * p.in;
  int left = mine.last - mine.first;

  uint4 low[kAhead], high[kAhead];
  const auto fetch = [&](int i, int ahead) {
    low[i] = stream_16(w + ahead * kBlock, ahead < left);
    high[i] = stream_16(w + ahead * kBlock + to_high, ahead < left);
  };
  uint4* const staging = reinterpret_cast<uint4*>(shared);
  const auto stage_from = [&](int done) {
    uint4* to = staging + done / kAhead % 2 * (Tile::kStageBytes / 16);
    if (done < most) stage<Tile>(to, x, p.x_row, p.rows - row0, split, done);
    cp_async_commit();
  };

  float sum[kTiles][4] = {};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i, i);
  stage_from(0);
#pragma unroll 1
  for (int done = 0; done < most; done += kAhead) {
    cp_async_wait<0>();
    __syncthreads();  // the rows are there, and nobody reads those before any more
    stage_from(done + kAhead);
    const uint4* rows = staging + done / kAhead % 2 * (Tile::kStageBytes / 16) + g * Tile::kStride + t;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i >= left) break;
      const Fragments fragments(low[i], high[i], p.rows >> 31);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        mma_block(sum[n], fragments, rows[8 * n * Tile::kStride + (part * kAhead + i) * 4]);
      fetch(i, i + kAhead);
    }
    w += kAhead * kBlock, left -= kAhead;
  }

  float* const sums = reinterpret_cast<float*>(shared);  // [kParts, kRows, kPadded]
  __syncthreads();                                       // x is no longer read
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float* to = sums + (part * Tile::kRows + 8 * n + 2 * t) * Tile::kPadded + 16 * out_warp + g;
    to[0] = sum[n][0], to[Tile::kPadded] = sum[n][1], to[8] = sum[n][2], to[Tile::kPadded + 8] = sum[n][3];
  }
  cluster_barrier();
  join<Tile>(p, sums, row0, head, out0);
  cluster_leave();  // a block's memory lives as long as others read it
}

}  // namespace kdtp
