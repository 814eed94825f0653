// Between a drafter's projections and its attention: norm of each head, rotation, keys and values one behind the other.
#pragma once
#include "../common/launch.cuh"
#include "../common/kdtp.cuh"
#include "../common/order.cuh"

namespace kdtp {

constexpr int kGqaWarps = 4;
constexpr int kGqaWidthMost = 256;
constexpr int kGqaPairs = kGqaWidthMost / 2 / 32;  // that a lane turns, at most

struct GqaShape {
  int heads, kv_heads, width;
  float eps;
};

// One head by a warp. Products and sums are not fused: where torch rounds, this does.
template <typename T>
__device__ __forceinline__ void norm_and_rotate(const T* from, T* to, const float* weight, const float* cos,
                                                const float* sin, int width, float eps) {
  const int lane = threadIdx.x % 32, half = width / 2;
  float low[kGqaPairs], high[kGqaPairs], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kGqaPairs; ++i) {
    const int j = lane + 32 * i;
    low[i] = j < half ? to_float(from[j]) : 0.0f;
    high[i] = j < half ? to_float(from[j + half]) : 0.0f;
    square = __fadd_rn(square, __fmul_rn(low[i], low[i]));
    square = __fadd_rn(square, __fmul_rn(high[i], high[i]));
  }
  const float root = sqrtf(warp_sum(square) / width + eps);
#pragma unroll
  for (int i = 0; i < kGqaPairs; ++i) {
    const int j = lane + 32 * i;
    if (j >= half) break;
    const float a = to_float(from_float<T>(low[i] / root * weight[j]));
    const float b = to_float(from_float<T>(high[i] / root * weight[j + half]));
    to[j] = from_float<T>(__fsub_rn(__fmul_rn(a, cos[j]), __fmul_rn(b, sin[j])));
    to[j + half] = from_float<T>(__fadd_rn(__fmul_rn(b, cos[j]), __fmul_rn(a, sin[j])));
  }
}

// Grid: rows, heads. A warp takes one head: of the queries, then of the keys, then of the values.
template <typename T>
__global__ void __launch_bounds__(32 * kGqaWarps)
    gqa_prep_kernel(const T* q, const T* kv, const float* __restrict__ q_weight, const float* __restrict__ k_weight,
                    const float* cos, const float* sin, T* q_out, T* kv_out, const GqaShape s) {
  follow_kernel_before();
  const int64_t row = blockIdx.x, rows = gridDim.x;
  const int head = blockIdx.y * kGqaWarps + threadIdx.x / 32, key = head - s.heads, value = key - s.kv_heads;
  cos += row * (s.width / 2);
  sin += row * (s.width / 2);
  if (key < 0) {
    const int64_t at = (row * s.heads + head) * s.width;
    norm_and_rotate(q + at, q_out + at, q_weight, cos, sin, s.width, s.eps);
    return;
  }
  const T* const from = kv + (row * 2 * s.kv_heads + key) * s.width;
  if (value < 0) {
    norm_and_rotate(from, kv_out + (row * s.kv_heads + key) * s.width, k_weight, cos, sin, s.width, s.eps);
  } else if (value < s.kv_heads) {
    T* const to = kv_out + ((rows + row) * s.kv_heads + value) * s.width;
    for (int i = threadIdx.x % 32; i < s.width; i += 32) to[i] = from[i];
  }
}

}  // namespace kdtp
