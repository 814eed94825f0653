// How a warp reads 16 outputs of an expert's matrix, and multiplies them: bfloat16 as it is, or INT4 as repacked.
#pragma once
#include "fragments.cuh"
#include "moe_repack.cuh"

namespace kdtp {

// bfloat16 [.., in], from a step on. `row` counts the outputs of all experts; it is a multiple of 16.
struct DenseWeights {
  static constexpr int kStep = kBlock;                // inputs of one load
  static constexpr int kAhead = 3, kRowsAhead = 3;  // loads on their way, as many as registers allow
  struct Held {
    uint4 low, high;
  };
  const __nv_bfloat16* w;  // output g, from input 8 t
  int to_high;             // elements from output g to output g + 8

  __device__ DenseWeights(const void* all, const void*, int64_t row, int in, int step)
      : w(static_cast<const __nv_bfloat16*>(all) + (row + threadIdx.x % 32 / 4) * in + step * kStep +
          threadIdx.x % 4 * 8),
        to_high(8 * in) {}

  __device__ Held load(int ahead, bool present) const {
    const __nv_bfloat16* from = w + ahead * kStep;
    return {stream_16(from, present), stream_16(from + to_high, present)};
  }

  __device__ void advance(int steps) { w += steps * kStep; }

  // sum += w x for one block of a step, in each tile of 8 rows that has any of the `count`.
  template <int kTiles>
  __device__ static void multiply(const Held& held, int, const uint4 (&x)[kTiles], int count, float (&sum)[kTiles][4]) {
    const Fragments fragments(held.low, held.high, count >> 31);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      if (n == 0 || 8 * n < count) mma_block(sum[n], fragments, x[n]);
  }
};

// Nibbles j and j + 4 of a word, less 8, in the halves of a[j]. Set into the low bits of the bfloat16 128, a nibble n
// makes 128 + n; subtracting 136 is exact.
__device__ __forceinline__ void dequantise(uint32_t word, uint32_t (&a)[4]) {
  const __nv_bfloat162 offset = __bfloat162bfloat162(__ushort_as_bfloat16(0x4308));  // 136
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t bits;  // (word >> 4 * j & 0x000f000f) | 0x43004300, in one instruction beside the shift
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word >> 4 * j), "r"(0x000f000fu), "r"(0x43004300u));
    const __nv_bfloat162 value = __hsub2(reinterpret_cast<const __nv_bfloat162&>(bits), offset);
    a[j] = reinterpret_cast<const uint32_t&>(value);
  }
}

// INT4 with a bfloat16 scale for every 32 inputs, as moe_repack lays them out. The scale is put on the float32 sum over
// its 32 inputs: weights stay exact.
struct Int4Weights {
  static constexpr int kStep = kInt4Ins, kAhead = 4, kRowsAhead = 2;
  struct Held {
    uint4 w;
    uint2 scales;
  };
  const uint4* w;
  const uint2* scales;

  __device__ Int4Weights(const void* all, const void* all_scales, int64_t row, int in, int step) {
    const int64_t tile = row / kInt4Outs * (in / kInt4Ins) + step;
    w = static_cast<const uint4*>(all) + tile * 32 + threadIdx.x % 32;
    scales = static_cast<const uint2*>(all_scales) + tile * 8 + threadIdx.x % 32 / 4;
  }

  __device__ Held load(int ahead, bool present) const {
    return {stream_16(w + ahead * 32, present), stream_8(scales + ahead * 8, present)};
  }

  __device__ void advance(int steps) { w += steps * 32, scales += steps * 8; }

  template <int kTiles>
  __device__ static void multiply(const Held& held, int block, const uint4 (&x)[kTiles], int count,
                                  float (&sum)[kTiles][4]) {
    uint32_t first[4], second[4];
    dequantise(block == 0 ? held.w.x : held.w.z, first);
    dequantise(block == 0 ? held.w.y : held.w.w, second);
    const uint32_t both = block == 0 ? held.scales.x : held.scales.y;
    const float low = __uint_as_float(both << 16), high = __uint_as_float(both & 0xffff0000u);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      if (n == 0 || 8 * n < count) {
        float part[4];
        mma_m16n8k16_first(part, first, x[n].x, x[n].y);
        mma_m16n8k16(part, second, x[n].z, x[n].w);
        sum[n][0] = fmaf(low, part[0], sum[n][0]);
        sum[n][1] = fmaf(low, part[1], sum[n][1]);
        sum[n][2] = fmaf(high, part[2], sum[n][2]);
        sum[n][3] = fmaf(high, part[3], sum[n][3]);
      }
  }
};

}  // namespace kdtp
