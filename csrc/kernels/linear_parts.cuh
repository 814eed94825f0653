// Products on tensor cores: bfloat16, `in` a multiple of 32, 16-byte aligned rows. What they have in common for few and
// for many rows.
//
// The inputs are cut into parts, by the matrix alone. A warp does one part for 16 outputs; the warps of a block, or the
// blocks of a cluster, do the others, as is best for the number of rows. Partial sums are added in the order of the
// parts, whoever made them.
#pragma once
#include "fragments.cuh"
#include "linear.cuh"

namespace kdtp {

constexpr int kLinearWarps = 8, kLinearThreads = 32 * kLinearWarps;

// kTiles: tiles of 8 rows. kOutWarps: warps side by side over outputs; the others split the inputs.
template <int kTiles, int kOutWarps> struct LinearTile {
  static constexpr int kRows = 8 * kTiles, kOuts = 16 * kOutWarps, kParts = kLinearWarps / kOutWarps;
  static constexpr int kPadded = kOuts + 4;           // floats of a row's sums, without bank conflicts
  static constexpr int kSumBytes = kParts * kRows * kPadded * 4;
};

// A part of the inputs: blocks of 32, first .. last - 1.
struct Blocks {
  int first, last;
};

// How the blocks of 32 inputs are cut into 1 << shift near equal parts.
struct Parts {
  int blocks, shift;

  __device__ Blocks operator[](int index) const { return {blocks * index >> shift, blocks * (index + 1) >> shift}; }
  __device__ int longest() const { return (blocks + (1 << shift) - 1) >> shift; }
};

// Add up the partial sums of all parts and blocks, in the order of the inputs, and store. Each block does its share.
template <class Tile>
__device__ __forceinline__ void join(const Linear& p, const float* sums, int row0, int head, int out0) {
  const int rows = min(Tile::kRows, p.rows - row0), splits = gridDim.x;
  for (int i = blockIdx.x * kLinearThreads + threadIdx.x; i < rows * Tile::kOuts; i += splits * kLinearThreads) {
    const int row = i / Tile::kOuts, out = i % Tile::kOuts;
    float total = 0.0f;
    const float* const from = sums + row * Tile::kPadded + out;
    if (splits == 1) {
#pragma unroll
      for (int part = 0; part < Tile::kParts; ++part) total += from[part * Tile::kRows * Tile::kPadded];
    } else {
#pragma unroll 4
      for (int split = 0; split < splits; ++split)
#pragma unroll
        for (int part = 0; part < Tile::kParts; ++part)
          total += cluster_float(from + part * Tile::kRows * Tile::kPadded, split);
    }
    if (out0 + out < p.out) store<__nv_bfloat16>(p, row0 + row, head, out0 + out, total);
  }
}

// The end of a kernel: its warps lay their partial sums of tiles of 8 rows into `sums` [kParts, kRows, kPadded], where
// nobody reads or writes anything else any more, and the blocks of the cluster join them.
template <class Tile, int kTiles>
__device__ __forceinline__ void finish(const Linear& p, const float (&sum)[kTiles][4], float* sums, int row0, int head,
                                       int out0) {
  constexpr int kOutWarps = Tile::kOuts / 16;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = warp / kOutWarps * Tile::kRows + 8 * n + 2 * t;
    float* const to = sums + row * Tile::kPadded + 16 * (warp % kOutWarps) + g;
    to[0] = sum[n][0], to[Tile::kPadded] = sum[n][1], to[8] = sum[n][2], to[Tile::kPadded + 8] = sum[n][3];
  }
  const bool alone = gridDim.x == 1;
  if (alone) __syncthreads();
  else cluster_barrier();
  join<Tile>(p, sums, row0, head, out0);
  if (!alone) cluster_leave();  // a block's memory lives as long as others read it
}

}  // namespace kdtp
