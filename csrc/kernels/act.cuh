// The gate of a SwiGLU MLP.
#pragma once
#include "../common/launch.cuh"
#include "../common/kdtp.cuh"
#include "../common/pack.cuh"

namespace kdtp {

constexpr int kActThreads = 128;

// Grid: rows, columns. Each thread takes kWide elements of gate and up; width is a multiple of kWide.
template <typename T, int kWide>
__global__ void __launch_bounds__(kActThreads) silu_mul_kernel(const T* x, T* out, int width) {
  using Wide = Pack<T, kWide>;
  follow_kernel_before();
  const int column = (blockIdx.y * kActThreads + threadIdx.x) * kWide;
  if (column >= width) return;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * width + column;
  const T* const gate_at = x + at + static_cast<int64_t>(blockIdx.x) * width;
  const Wide gate = *reinterpret_cast<const Wide*>(gate_at);
  const Wide up = *reinterpret_cast<const Wide*>(gate_at + width);
  Wide y;
#pragma unroll
  for (int i = 0; i < kWide; ++i) y.at[i] = from_float<T>(silu(to_float(gate.at[i])) * to_float(up.at[i]));
  *reinterpret_cast<Wide*>(out + at) = y;
}

}  // namespace kdtp
