// Products of many rows on tensor cores. Weights go through a ring in shared memory, each lane's own: registers would not
// do, as the compiler waits for all loads that live in a loop at once, and rows leave them little room. The rows come in
// chunks, 16 bytes by each thread: 128 bulk copies of a few hundred bytes take more time than their products.
#pragma once
#include "../common/async.cuh"
#include "linear_parts.cuh"

namespace kdtp {

template <class Tile, int kDepth> struct WideShared {
  static constexpr int kChunk = Tile::kParts == 8 && Tile::kRows > 16 ? 2 : 4;  // blocks of each part for which rows come at a time
  static constexpr int kUnits = Tile::kParts * kChunk * 4;  // 16-byte units of a row's chunk
  // No bank conflicts: a row has an odd number of half lines, as eight lanes read 64 bytes of two rows.
  static constexpr int kStride = kUnits + 4;
  static constexpr int kRing = kLinearWarps * kDepth * 1024, kRows = Tile::kRows * kStride * 16;
  static constexpr int kChunks = kDepth > kChunk + 1 ? 3 : 2;  // of rows; so many that weights need not wait for them
  static constexpr int kBytes = kRing + kChunks * kRows;
  static_assert(kRing + kRows >= Tile::kSumBytes, "sums take their place");
};

// Grid: as linear_mma_kernel. Blocks of 32 inputs on their way: kDepth - 1 of weights.
template <int kTiles, int kOutWarps, int kDepth>
__global__ void __launch_bounds__(kLinearThreads, 2) linear_wide_kernel(const Linear p) {
  using Tile = LinearTile<kTiles, kOutWarps>;
  using Shared = WideShared<Tile, kDepth>;
  constexpr int kChunk = Shared::kChunk;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int out_warp = warp % kOutWarps, part = warp / kOutWarps;
  const int out_tiles = (p.out + Tile::kOuts - 1) / Tile::kOuts, head = blockIdx.z / out_tiles;
  const int out0 = blockIdx.z % out_tiles * Tile::kOuts, row0 = blockIdx.y * Tile::kRows;
  const Parts parts = {p.in / kBlock, 31 - __clz(gridDim.x * Tile::kParts)};
  const Blocks mine = parts[blockIdx.x * Tile::kParts + part];

  // Beyond the last output the last one is taken again, and thrown away.
  const int out = min(out0 + 16 * out_warp + g, p.out - 1);
  const int out_high = min(out0 + 16 * out_warp + g + 8, p.out - 1);
  const __nv_bfloat16* w = static_cast<const __nv_bfloat16*>(p.w) + 8 * t + mine.first * kBlock +
                           (static_cast<int64_t>(head) * p.out + out) * p.in;
  const int to_high = (out_high - out) * p.in;
  uint4* const ring = reinterpret_cast<uint4*>(shared) + warp * kDepth * 64 + lane;
  int to_fetch = mine.last - mine.first, put = 0;
  const auto fetch_weights = [&] {
    if (to_fetch > 0) {
      stream_copy_16(ring + put, w);
      stream_copy_16(ring + put + 32, w + to_high);
    }
    w += kBlock, --to_fetch;
    put = put == (kDepth - 1) * 64 ? 0 : put + 64;
  };

  // A thread's place in a chunk, the same in all: a unit of every so-manieth row.
  const int unit = threadIdx.x % Shared::kUnits, from_row = threadIdx.x / Shared::kUnits;
  const Blocks theirs = parts[blockIdx.x * Tile::kParts + unit / (kChunk * 4)];
  const int rows = min(Tile::kRows, p.rows - row0), block = theirs.first + unit % (kChunk * 4) / 4;
  const __nv_bfloat16* const x = static_cast<const __nv_bfloat16*>(p.x) + (row0 + from_row) * p.x_row + head * p.x_head +
                                 block * kBlock + unit % 4 * 8;
  uint4* const chunks = reinterpret_cast<uint4*>(shared + Shared::kRing);
  const auto fetch_rows = [&](int chunk) {
    if (block + chunk * kChunk >= theirs.last) return;
    uint4* const to = chunks + (chunk % Shared::kChunks * Tile::kRows + from_row) * Shared::kStride + unit;
    constexpr int kAtOnce = kLinearThreads / Shared::kUnits;
#pragma unroll
    for (int row = 0; row < Tile::kRows; row += kAtOnce)
      if (from_row + row < rows) copy_16(to + row * Shared::kStride, x + row * p.x_row + chunk * kChunk * kBlock);
  };

  float sum[kTiles][4] = {};
  let_kernel_behind_start();
#pragma unroll
  for (int i = 0; i < kDepth - 1; ++i) fetch_weights();
  wait_for_kernel_before();
#pragma unroll
  for (int chunk = 0; chunk < Shared::kChunks - 1; ++chunk) fetch_rows(chunk);
  copies_commit();
#pragma unroll
  for (int i = 1; i < kDepth - 1; ++i) copies_commit();  // a group for each block
  const int count = mine.last - mine.first, most = parts.longest();
  int take = 0;
#pragma unroll 1
  for (int chunk = 0; chunk * kChunk < most; ++chunk) {
    const uint4* const x_chunk = chunks + (chunk % Shared::kChunks * Tile::kRows + g) * Shared::kStride + part * kChunk * 4 + t;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      copies_wait<kDepth - 2>();  // the rows are there, too: they were fetched long ago
      static_assert(kDepth - 2 < kChunk * (Shared::kChunks - 1), "with the first block of a chunk before");
      if (i == 0) {
        __syncthreads();  // the chunk is there for all, and nobody reads the one before any more
        fetch_rows(chunk + Shared::kChunks - 1);
      }
      fetch_weights();
      copies_commit();
      if (chunk * kChunk + i < count) {
        const Fragments fragments(ring[take], ring[take + 32], p.rows >> 31);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma_block(sum[n], fragments, x_chunk[8 * n * Shared::kStride + i * 4]);
      }
      take = take == (kDepth - 1) * 64 ? 0 : take + 64;
    }
  }

  __syncthreads();  // nothing else is read any more
  finish<Tile>(p, sum, reinterpret_cast<float*>(shared), row0, head, out0);
}

}  // namespace kdtp
