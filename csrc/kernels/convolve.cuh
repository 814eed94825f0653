// The grouped dynamic causal convolution of a drafter, over blocks of slots.
#pragma once
#include "../common/launch.cuh"
#include "../common/kdtp.cuh"
#include "../common/pack.cuh"

namespace kdtp {

constexpr int kConvolveThreads = 128;

struct ConvolveShape {
  int width, taps, groups, side, n;
};

// Grid: rows, columns. Each thread takes kWide channels; width is a multiple of kWide. A tap before the block multiplies
// zeros, as padding does: a factor that is not finite shows there too.
template <typename T, int kWide>
__global__ void __launch_bounds__(kConvolveThreads)
    convolve_kernel(const T* x, const T* dynamic, const T* __restrict__ base, T* out, const ConvolveShape s) {
  using Wide = Pack<T, kWide>;
  follow_kernel_before();
  const int column = (blockIdx.y * kConvolveThreads + threadIdx.x) * kWide;
  if (column >= s.width) return;
  const int64_t row = blockIdx.x, at = row * s.width + column;
  const int slot = static_cast<int>(row) % s.n, channels = s.width / s.groups;
  dynamic += (row * 2 + s.side) * s.taps * s.groups;
  base += static_cast<int64_t>(s.side) * s.taps * s.width + column;
  float sum[kWide] = {};
#pragma unroll 4
  for (int t = 0; t < s.taps; ++t) {
    const Wide fixed = *reinterpret_cast<const Wide*>(base + static_cast<int64_t>(t) * s.width);
    Wide shifted = {};
    if (t <= slot) shifted = *reinterpret_cast<const Wide*>(x + at - static_cast<int64_t>(t) * s.width);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float added = to_float(dynamic[t * s.groups + (column + i) / channels]);
      const float factor = to_float(from_float<T>(__fadd_rn(to_float(fixed.at[i]), added)));
      sum[i] = __fadd_rn(sum[i], to_float(from_float<T>(__fmul_rn(to_float(shifted.at[i]), factor))));
    }
  }
  Wide y;
#pragma unroll
  for (int i = 0; i < kWide; ++i) y.at[i] = from_float<T>(sum[i]);
  *reinterpret_cast<Wide*>(out + at) = y;
}

}  // namespace kdtp
