// Products of a few rows with matrices stored [out, in]: what both forms share, and the plain one.
#pragma once
#include "../common/launch.cuh"
#include "dot.cuh"

namespace kdtp {

// y[r, h] = w[h] x[r, h]. A plain product is one with a single head.
struct Linear {
  const void* x;
  const void* w;  // [heads, out, in]
  void* y;
  int rows, in, out, heads;
  int64_t x_row, x_head, y_row, y_head;  // elements
  bool y_f32;                            // y is float32 whatever x and w are
};

template <typename T> __device__ __forceinline__ void store(const Linear& p, int row, int head, int out, float value) {
  const int64_t at = row * p.y_row + head * p.y_head + out;
  if (p.y_f32) static_cast<float*>(p.y)[at] = value;
  else static_cast<T*>(p.y)[at] = from_float<T>(value);
}

// Any size, any alignment. Grid: tiles of outputs, tiles of rows, heads.
template <typename T> __global__ void __launch_bounds__(kDotThreadsMost, 2) linear_kernel(const Linear p) {
  const int out = blockIdx.x * kDotOuts, row = blockIdx.y * kDotRows, head = blockIdx.z;
  follow_kernel_before();
  const T *w[kDotOuts], *x[kDotRows];
  // Beyond the edge the last one is taken again, and its sums are thrown away.
#pragma unroll
  for (int o = 0; o < kDotOuts; ++o)
    w[o] = static_cast<const T*>(p.w) + (static_cast<int64_t>(head) * p.out + min(out + o, p.out - 1)) * p.in;
#pragma unroll
  for (int r = 0; r < kDotRows; ++r)
    x[r] = static_cast<const T*>(p.x) + min(row + r, p.rows - 1) * p.x_row + head * p.x_head;
  const float sum = block_dots(w, x, p.in);
  const int o = threadIdx.x / kDotRows, r = threadIdx.x % kDotRows;
  if (o < kDotOuts && out + o < p.out && row + r < p.rows) store<T>(p, row + r, head, out + o, sum);
}

}  // namespace kdtp
