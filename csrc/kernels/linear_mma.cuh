// Products of up to 16 rows on tensor cores: weights in registers, rows brought by bulk copies.
#pragma once
#include "../common/async.cuh"
#include "linear_parts.cuh"

namespace kdtp {

constexpr int kBuffersMost = 4;

// Blocks of a warp that are on their way, as registers and the room for rows allow.
template <class Tile> constexpr int kBlocksAhead = Tile::kRows == 8 || Tile::kOuts > 16 ? 8 : 4;

// How a block's rows of x are laid into shared memory: so many blocks of 32 inputs of each of its parts at a time.
struct Chunks {
  int blocks;   // all there are, or a multiple of kBlocksAhead
  int rows;     // that there is room for
  int stride;   // 16-byte units of a row, those of its parts one behind the other
  int buffers;  // 1: all at once; more: the next ones come while these are used
};

// The block's rows of x in shared memory. There may be fewer than a tile has: what stands in the places of the others is
// multiplied, too, into sums that nobody reads.
template <class Tile> struct Staging {
  uint4* shared;
  Barrier* full;  // [kBuffersMost]
  const __nv_bfloat16* x;
  int64_t x_row;
  int rows;
  Parts parts;
  Chunks chunks;

  __device__ uint4* at(int chunk) const { return shared + chunk % chunks.buffers * chunks.rows * chunks.stride; }

  // By one thread; the block synchronizes before the first fetch.
  __device__ void init() const {
    for (int i = 0; i < chunks.buffers; ++i) barrier_init(&full[i], rows * Tile::kParts);
    barrier_init_done();
  }

  // By all threads: one copies a part of a row, if there is such a chunk. Nobody reads what was in its place any more.
  __device__ void fetch(int chunk) const {
    static_assert(Tile::kRows * Tile::kParts <= kLinearThreads, "a thread a copy");
    const int row = threadIdx.x / Tile::kParts, part = threadIdx.x % Tile::kParts;
    if (row >= rows || chunk * chunks.blocks >= parts.longest()) return;
    const Blocks all = parts[blockIdx.x * Tile::kParts + part];
    const int first = all.first + chunk * chunks.blocks, bytes = max(0, min(chunks.blocks, all.last - first)) * kBlock * 2;
    Barrier* const barrier = &full[chunk % chunks.buffers];
    barrier_arrive_expect(barrier, bytes);
    uint4* const to = at(chunk) + row * chunks.stride + part * chunks.blocks * 4;
    if (bytes > 0) copy_bulk(to, x + row * x_row + first * kBlock, bytes, barrier);
  }

  __device__ void wait(int chunk) const { barrier_wait(&full[chunk % chunks.buffers], chunk / chunks.buffers % 2); }
};

// Grid: blocks that share the parts (one cluster), tiles of rows, tiles of outputs of all heads.
template <int kTiles, int kOutWarps>
__global__ void __launch_bounds__(kLinearThreads, 2) linear_mma_kernel(const Linear p, const Chunks chunks) {
  using Tile = LinearTile<kTiles, kOutWarps>;
  constexpr int kAhead = kBlocksAhead<Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int out_warp = warp % kOutWarps, part = warp / kOutWarps;
  const int out_tiles = (p.out + Tile::kOuts - 1) / Tile::kOuts, head = blockIdx.z / out_tiles;
  const int out0 = blockIdx.z % out_tiles * Tile::kOuts, row0 = blockIdx.y * Tile::kRows;
  const Parts parts = {p.in / kBlock, 31 - __clz(gridDim.x * Tile::kParts)};
  const Blocks mine = parts[blockIdx.x * Tile::kParts + part];
  const int most = parts.longest();

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
  float sum[kTiles][4] = {};
  let_kernel_behind_start();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i, i);
  // They go no further: fetched into the L2 ahead of their time, they came back slower than from memory (H200).
  __shared__ Barrier full[kBuffersMost];
  const Staging<Tile> staging = {reinterpret_cast<uint4*>(shared), full,
                                 static_cast<const __nv_bfloat16*>(p.x) + row0 * p.x_row + head * p.x_head, p.x_row,
                                 min(Tile::kRows, p.rows - row0), parts, chunks};
  if (threadIdx.x == 0) staging.init();
  __syncthreads();
  wait_for_kernel_before();
  staging.fetch(0);
  for (int chunk = 1; chunk < chunks.buffers - 1; ++chunk) staging.fetch(chunk);
  const int row = kTiles == 1 ? min(g, p.rows - 1) : g;  // a single tile has no place for rows that are not there
  int chunk = 0;
#pragma unroll 1
  for (int done = 0; done < most; done += chunks.blocks, ++chunk) {
    if (chunk > 0) __syncthreads();  // nobody reads the chunk before any more
    if (chunks.buffers > 1) staging.fetch(chunk + chunks.buffers - 1);
    staging.wait(chunk);
    const uint4* rows = staging.at(chunk) + row * chunks.stride + part * chunks.blocks * 4 + t;
#pragma unroll 1
    for (int turn = 0; turn < chunks.blocks; turn += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= left) break;
        const Fragments fragments(low[i], high[i], p.rows >> 31);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma_block(sum[n], fragments, rows[8 * n * chunks.stride + i * 4]);
        fetch(i, i + kAhead);
      }
      w += kAhead * kBlock, left -= kAhead, rows += kAhead * 4;
    }
  }

  __syncthreads();  // x is no longer read
  finish<Tile>(p, sum, reinterpret_cast<float*>(shared), row0, head, out0);
}

}  // namespace kdtp
