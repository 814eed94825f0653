// Products of a few rows on tensor cores: bfloat16, `in` a multiple of 32, 16-byte aligned rows.
//
// The blocks of a cluster share a tile of outputs and split its inputs; within a block, too, warps may split them. Which
// inputs go where depends on the matrix alone, and partial sums are added in the order of the inputs.
#pragma once
#include "../common/launch.cuh"
#include "fragments.cuh"
#include "linear.cuh"

namespace kdtp {

constexpr int kLinearWarps = 8, kLinearThreads = 32 * kLinearWarps;

// kTiles: tiles of 8 rows. kOutWarps: warps side by side over outputs; the others split the inputs.
template <int kTiles, int kOutWarps> struct LinearTile {
  static constexpr int kRows = 8 * kTiles, kOuts = 16 * kOutWarps;
  static constexpr int kParts = kLinearWarps / kOutWarps;
  // Blocks of 32 inputs that a warp loads at a time; the next as many are then on their way. Where warps split the
  // inputs it decides which take which, and may not depend on the rows.
  static constexpr int kAhead = kTiles == 8 ? 2 : 4;
  static_assert(kAhead == 4 || kParts == 1, "a row's sums would depend on the others");
  static constexpr int kChunkBlocks = kAhead * kParts, kChunk = kBlock * kChunkBlocks;  // inputs of a turn of the loop
  static constexpr int kPadded = kOuts + 4;                                             // floats; no bank conflicts
  static constexpr int kStageBytes = kRows * kChunk * 2, kSumBytes = kParts * kRows * kPadded * 4;
  static constexpr int kShared = 2 * kStageBytes > kSumBytes ? 2 * kStageBytes : kSumBytes;
  static_assert(kShared <= kSharedMost, "a portable kernel");
};

// Where 16 bytes of a staged row lie: odd rows swap the halves of each 128 bytes, so that the two rows that eight lanes
// read together are in different banks.
template <class Tile> __device__ __forceinline__ int staged(int row, int unit) {
  return row * Tile::kChunk + (unit ^ row % 2 * 4) * 8;
}

// Copy a chunk of x to shared memory; zeros beyond the last row and the last input.
template <class Tile>
__device__ __forceinline__ void stage(__nv_bfloat16* to, const __nv_bfloat16* x, int64_t x_row, int rows, int from,
                                      int end) {
  constexpr int kUnits = Tile::kChunk / 8;
#pragma unroll
  for (int i = threadIdx.x; i < Tile::kRows * kUnits; i += kLinearThreads) {
    const int row = i / kUnits, unit = i % kUnits, k = from + unit * 8;
    const bool present = row < rows && k < end;
    cp_async_16(to + staged<Tile>(row, unit), present ? x + row * x_row + k : x, present);
  }
}

// Add up the partial sums of all warps and blocks, in the order of the inputs, and store. Each block does its share.
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
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int out_warp = warp % kOutWarps, part = warp / kOutWarps;
  const int out_tiles = (p.out + Tile::kOuts - 1) / Tile::kOuts, head = blockIdx.z / out_tiles;
  const int out0 = blockIdx.z % out_tiles * Tile::kOuts, row0 = blockIdx.y * Tile::kRows;
  const int blocks = p.in / kBlock, split = blockIdx.x, splits = gridDim.x;
  const int first = blocks * split / splits, last = blocks * (split + 1) / splits;
  const int chunks = (last - first + Tile::kChunkBlocks - 1) / Tile::kChunkBlocks;

  const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(p.x) + row0 * p.x_row + head * p.x_head;
  // Beyond the last output the last one is taken again, and thrown away.
  const int out = out0 + 16 * out_warp + g;
  const __nv_bfloat16* const w = static_cast<const __nv_bfloat16*>(p.w) + 8 * t +
                                 (static_cast<int64_t>(head) * p.out + min(out, p.out - 1)) * p.in;
  const int to_high = (min(out + 8, p.out - 1) - min(out, p.out - 1)) * p.in;

  constexpr int kAhead = Tile::kAhead;
  uint4 low[2][kAhead], high[2][kAhead];
  const auto load = [&](int chunk, uint4(&low_ones)[kAhead], uint4(&high_ones)[kAhead]) {
    const int block = first + chunk * Tile::kChunkBlocks + part * kAhead;
    const __nv_bfloat16* from = w + block * kBlock;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      low_ones[j] = stream_16(from + j * kBlock, block + j < last);
      high_ones[j] = stream_16(from + j * kBlock + to_high, block + j < last);
    }
  };
  __nv_bfloat16* const staging = reinterpret_cast<__nv_bfloat16*>(shared);
  const auto stage_chunk = [&](int chunk) {
    if (chunk < chunks)
      stage<Tile>(staging + chunk % 2 * (Tile::kStageBytes / 2), x, p.x_row, p.rows - row0,
                  (first + chunk * Tile::kChunkBlocks) * kBlock, last * kBlock);
    cp_async_commit();
  };

  float sum[kTiles][4] = {};
  load(0, low[0], high[0]);
  stage_chunk(0);
  for (int pair = 0; pair < chunks; pair += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // both by constant index: they stay in registers
      const int chunk = pair + i;
      if (chunk >= chunks) break;
      load(chunk + 1, low[1 - i], high[1 - i]);
      cp_async_wait<0>();
      __syncthreads();  // the chunk is there, and nobody reads the one before any more
      stage_chunk(chunk + 1);
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int at = staged<Tile>(8 * n + g, (part * kAhead + j) * 4 + t);
          mma_block(sum[n], low[i][j], high[i][j],
                    *reinterpret_cast<const uint4*>(staging + i * (Tile::kStageBytes / 2) + at));
        }
    }
  }

  float* const sums = reinterpret_cast<float*>(shared);  // [kParts, kRows, kPadded]
  __syncthreads();  // x is no longer read
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float* to = sums + (part * Tile::kRows + 8 * n + 2 * t) * Tile::kPadded + 16 * out_warp + g;
    to[0] = sum[n][0], to[Tile::kPadded] = sum[n][1], to[8] = sum[n][2], to[Tile::kPadded + 8] = sum[n][3];
  }
  cluster_barrier();
  join<Tile>(p, sums, row0, head, out0);
  cluster_barrier();  // a block's memory lives as long as others read it
}

}  // namespace kdtp
