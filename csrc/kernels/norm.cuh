// RMS norm, with or without the residual sum before it: one block per row.
#pragma once
#include "../common/kdtp.cuh"

namespace kdtp {

constexpr int kNormThreads = 256;
constexpr int kNormWidthMost = 16384;

// Each thread keeps its share of the row in registers between the two passes.
template <typename T, int kShare>
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(const T* __restrict__ x, T* residual,
                                                               const float* __restrict__ weight, T* __restrict__ out,
                                                               int width, float eps) {
  __shared__ float scratch[kNormThreads / 32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
  float held[kShare];
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int column = threadIdx.x + i * kNormThreads;
    if (column >= width) break;
    float value = to_float(x[row + column]);
    if (residual != nullptr) {
      // Rounded to T before it is normed: the next layer adds to exactly this.
      const T sum = from_float<T>(value + to_float(residual[row + column]));
      residual[row + column] = sum;
      value = to_float(sum);
    }
    held[i] = value;
    square += value * value;
  }
  const float root = sqrtf(block_sum(square, scratch) / width + eps);
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int column = threadIdx.x + i * kNormThreads;
    if (column >= width) break;
    out[row + column] = from_float<T>(held[i] / root * weight[column]);
  }
}

}  // namespace kdtp
