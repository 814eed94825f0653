// How a warp reads 16 outputs of an expert's matrix, and multiplies them: bfloat16 as it is, or INT4 as repacked.
#pragma once
#include "fragments.cuh"
#include "moe_repack.cuh"

namespace kdtp {

// bfloat16 [.., in], from a step on. `row` counts the outputs of all experts; it is a multiple of 16.
struct DenseWeights {
  static constexpr int kStep = kBlock;  // inputs of one load
  static constexpr int kRowsOfSet = kInt4Outs;  // of memory, each as long as all inputs: 16 outputs one below the other
  static constexpr float kRowScale = 1.0f, kLowScale = 1.0f, kHighScale = 1.0f;  // see Int4Weights
  struct Held {
    uint4 low, high;
  };
  const __nv_bfloat16* w;  // output g, from input 8 t
  int to_high;             // elements from output g to output g + 8

  DenseWeights() = default;
  __device__ DenseWeights(const void* all, const void*, int64_t row, int in, int step)
      : w(static_cast<const __nv_bfloat16*>(all) + (row + threadIdx.x % 32 / 4) * in + step * kStep +
          threadIdx.x % 4 * 8),
        to_high(8 * in) {}

  __device__ Held load(int ahead, bool present) const {
    const __nv_bfloat16* from = w + ahead * kStep;
    return {stream_16(from, present), stream_16(from + to_high, present)};
  }

  __device__ void advance(int steps) { w += steps * kStep; }

  struct Start {
    __device__ explicit Start(const uint4&) {}
  };

  // A block of 32 inputs of a step, ready for the tensor cores.
  struct Block {
    Fragments w;

    __device__ Block(const Held& held, int, uint32_t zero) : w(held.low, held.high, zero) {}
    __device__ void multiply(const uint4& x, const Start&, float (&sum)[4]) const { mma_block(sum, w, x); }
  };
};

// Nibbles j and j + 4 of a word in the halves of a[j], where they stand: a bfloat16 below 2^-125 is its lower eight bits
// times 2^-133, so a nibble n is n * 2^-133 as a half's lowest four bits and 16 times that as the next. One shift does
// for eight weights; with any exponent there is room for four bits only, and it takes three.
__device__ __forceinline__ void widen(uint32_t word, uint32_t (&a)[4]) {
  const uint32_t lower = 0x000f000fu, upper = 0x00f000f0u;
  a[0] = word & lower, a[1] = word & upper;
  a[2] = word >> 8 & lower, a[3] = word >> 8 & upper;
}

// INT4 with a bfloat16 scale for every 32 inputs, as moe_repack lays them out. The scale is put on the float32 sum over
// its 32 inputs: weights stay exact. A kernel is bound by its instructions long before the tensor cores have enough to
// do, so they take the nibbles' offset of 8 off, too: one product more for what would be a subtraction for each two
// weights.
//
// Weights are as small as widen() makes them, 16 times larger for output g + 8 than for g. Inputs times kRowScale keep
// the products within float32; kLowScale and kHighScale undo both at the end. All are powers of two: nothing is lost of
// inputs between 2^-57 and 2^64; larger ones become infinite, and with the offset every sum of their row NaN.
struct Int4Weights {
  static constexpr int kStep = kInt4Ins;
  static constexpr int kRowsOfSet = 1;  // 16 outputs side by side
  static constexpr float kRowScale = 0x1p64f, kLowScale = 0x1p69f, kHighScale = 0x1p65f;
  struct Held {
    uint4 w;
    uint2 scales;
  };
  const uint4* w;
  const uint2* scales;

  Int4Weights() = default;
  __device__ Int4Weights(const void* all, const void* all_scales, int64_t row, int in, int step) {
    const int64_t tile = row / kInt4Outs * (in / kInt4Ins) + step;
    w = static_cast<const uint4*>(all) + tile * 32 + threadIdx.x % 32;
    scales = static_cast<const uint2*>(all_scales) + tile * 8 + threadIdx.x % 32 / 4;
  }

  __device__ Held load(int ahead, bool present) const {
    return {stream_16(w + ahead * 32, present), stream_8(scales + ahead * 8, present)};
  }

  __device__ void advance(int steps) { w += steps * 32, scales += steps * 8; }

  // What the sums of a block begin with: -8 times the sum of its inputs, in the units of either output.
  struct Start {
    float part[4];

    __device__ explicit Start(const uint4& x) {
      const uint32_t low = 0x80088008u, high = 0x80808080u, offset[4] = {low, high, low, high};
      mma_m16n8k16_first(part, offset, x.x, x.y);
      mma_m16n8k16(part, offset, x.z, x.w);
    }
  };

  // A block of 32 inputs of a step, ready for the tensor cores.
  struct Block {
    uint32_t first[4], second[4];
    float low, high;  // scales of outputs g and g + 8

    __device__ Block(const Held& held, int block, uint32_t) {
      widen(block == 0 ? held.w.x : held.w.z, first);
      widen(block == 0 ? held.w.y : held.w.w, second);
      const uint32_t both = block == 0 ? held.scales.x : held.scales.y;
      low = __uint_as_float(both << 16), high = __uint_as_float(both & 0xffff0000u);
    }

    __device__ void multiply(const uint4& x, const Start& start, float (&sum)[4]) const {
      float part[4] = {start.part[0], start.part[1], start.part[2], start.part[3]};
      mma_m16n8k16(part, first, x.x, x.y);
      mma_m16n8k16(part, second, x.z, x.w);
      sum[0] = fmaf(low, part[0], sum[0]), sum[1] = fmaf(low, part[1], sum[1]);
      sum[2] = fmaf(high, part[2], sum[2]), sum[3] = fmaf(high, part[3], sum[3]);
    }
  };
};

}  // namespace kdtp
