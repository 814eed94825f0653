// Before attention: rotary embedding of queries and key, norm of the latent, the new rows of the KV cache.
#pragma once
#include "../common/launch.cuh"
#include "../common/kdtp.cuh"

namespace kdtp {

constexpr int kPrepThreads = 256;

struct PrepShape {
  int heads, nope, rope, lora;
  int64_t q_stride, kv_stride;  // elements between rows
  float eps;
};

// Entry j of a vector of 2 * half turns with entry j + half, by the angle j of its row.
template <typename T>
__device__ __forceinline__ void rotate(const T* from, T* to, const float* cos, const float* sin, int j, int half) {
  const float low = to_float(from[j]), high = to_float(from[j + half]);
  to[j] = from_float<T>(low * cos[j] - high * sin[j]);
  to[j + half] = from_float<T>(high * cos[j] + low * sin[j]);
}

// The rope parts of one row's queries, behind the place of each head's absorbed part.
template <typename T>
__device__ __forceinline__ void prep_queries(const T* q, T* absorbed, const float* cos, const float* sin,
                                             const PrepShape& s) {
  const int half = s.rope / 2;
  for (int i = threadIdx.x; i < s.heads * half; i += kPrepThreads) {
    const int head = i / half;
    rotate(q + head * (s.nope + s.rope) + s.nope, absorbed + head * (s.lora + s.rope) + s.lora, cos, sin, i % half,
           half);
  }
}

// One row of the cache: the normed latent, then the rotated key.
template <typename T>
__device__ __forceinline__ void prep_kv(const T* from, const float* weight, T* kv, const float* cos, const float* sin,
                                        const PrepShape& s) {
  __shared__ float scratch[kPrepThreads / 32];
  float square = 0.0f;
  for (int i = threadIdx.x; i < s.lora; i += kPrepThreads) square += to_float(from[i]) * to_float(from[i]);
  const float root = sqrtf(block_sum(square, scratch) / s.lora + s.eps);
  for (int i = threadIdx.x; i < s.lora; i += kPrepThreads) kv[i] = from_float<T>(to_float(from[i]) / root * weight[i]);
  const int half = s.rope / 2;
  for (int j = threadIdx.x; j < half; j += kPrepThreads) rotate(from + s.lora, kv + s.lora, cos, sin, j, half);
}

// Grid: rows, and the row's queries or its KV row.
template <typename T>
__global__ void __launch_bounds__(kPrepThreads)
    mla_prep_kernel(const T* q, const T* kv_new, const float* __restrict__ weight, const float* cos, const float* sin,
                    const int64_t* kv_rows, T* absorbed, T* kv, const PrepShape s) {
  follow_kernel_before();
  const int64_t row = blockIdx.x, half = s.rope / 2, width = s.lora + s.rope;
  if (blockIdx.y == 0) {
    prep_queries(q + row * s.q_stride, absorbed + row * s.heads * width, cos + row * half, sin + row * half, s);
  } else if (kv_rows[row] >= 0) {
    prep_kv(kv_new + row * s.kv_stride, weight, kv + kv_rows[row] * width, cos + row * half, sin + row * half, s);
  }
}

}  // namespace kdtp
