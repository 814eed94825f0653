// How a warp reads 16 outputs of an expert's matrix, and multiplies them: bfloat16 as it is, or INT4 as repacked.
#pragma once
#include "fragments.cuh"
#include "moe_repack.cuh"

namespace kdtp {

// bfloat16 [.., in], from a step on. `row` counts the outputs of all experts; it is a multiple of 16.
struct DenseWeights {
  static constexpr int kStep = kBlock;  // inputs of one load
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

// Nibbles j and j + 4 of a word in the halves of a[j], each as the bfloat16 128 + n: a nibble n set into the low bits of
// 128. The weight is n - 8; 136 times the sum of the inputs is taken off elsewhere (Int4Weights::Start).
__device__ __forceinline__ void widen(uint32_t word, uint32_t (&a)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)  // (word >> 4 * j & 0x000f000f) | 0x43004300, in one instruction beside the shift
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(a[j]) : "r"(word >> 4 * j), "r"(0x000f000fu), "r"(0x43004300u));
}

// INT4 with a bfloat16 scale for every 32 inputs, as moe_repack lays them out. The scale is put on the float32 sum over
// its 32 inputs: weights stay exact. A kernel is bound by its instructions long before the tensor cores have enough to
// do, so they take the offset off, too: one product more for what would be a subtraction for each two weights.
struct Int4Weights {
  static constexpr int kStep = kInt4Ins;
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

  // What the sums of a block begin with: -136 times the sum of its inputs, the same for all outputs.
  struct Start {
    float part[4];

    __device__ explicit Start(const uint4& x) {
      const uint32_t offset[4] = {0xc308c308u, 0xc308c308u, 0xc308c308u, 0xc308c308u};
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
