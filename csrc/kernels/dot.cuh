// Dot products on the plain cores: any size, float32 or bfloat16, every product and sum a float32 FMA.
#pragma once
#include "../common/kdtp.cuh"

namespace kdtp {

// A block makes one tile: 4 outputs of 8 rows, so that at the end each lane of a warp has one sum to look after.
constexpr int kDotOuts = 4, kDotRows = 8, kDotThreadsMost = 256;

// Threads of a block: by the length of the sums alone, for it decides their order.
inline int dot_threads(int in) { return in >= kDotThreadsMost ? kDotThreadsMost : (in + 31) / 32 * 32; }

// The warp's sum of each of 32 values; lane i gets that of value i. In every round a lane gives away half of what it
// has: 31 exchanges in place of 160. The order is the same for all values. (Rounds by recursion: a loop's arrays would
// end up in local memory.)
template <int kHalf = 16> __device__ __forceinline__ float warp_sums(const float (&value)[2 * kHalf]) {
  const bool upper = threadIdx.x & kHalf;
  float kept[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float given = upper ? value[i] : value[i + kHalf];
    kept[i] = (upper ? value[i + kHalf] : value[i]) + __shfl_xor_sync(0xffffffffu, given, kHalf);
  }
  if constexpr (kHalf > 1) return warp_sums<kHalf / 2>(kept);
  else return kept[0];
}

// w[o] . x[r] for a tile; lane o * 8 + r of the first warp gets it, the other warps nothing. Once per block.
template <typename T>
__device__ __forceinline__ float block_dots(const T* const (&w)[kDotOuts], const T* const (&x)[kDotRows], int in) {
  __shared__ float scratch[kDotThreadsMost / 32][32];
  float sums[kDotOuts * kDotRows] = {};
#pragma unroll 2
  for (int k = threadIdx.x; k < in; k += blockDim.x) {
    float weight[kDotOuts];
#pragma unroll
    for (int o = 0; o < kDotOuts; ++o) weight[o] = to_float(w[o][k]);
#pragma unroll
    for (int r = 0; r < kDotRows; ++r) {
      const float value = to_float(x[r][k]);
#pragma unroll
      for (int o = 0; o < kDotOuts; ++o) sums[o * kDotRows + r] = fmaf(weight[o], value, sums[o * kDotRows + r]);
    }
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  scratch[warp][lane] = warp_sums(sums);
  __syncthreads();
  float total = 0.0f;
  if (warp == 0)
    for (int i = 0; i < blockDim.x / 32; ++i) total += scratch[i][lane];
  return total;
}

}  // namespace kdtp
