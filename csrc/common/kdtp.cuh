// What every op shares: refusals, launch checks, element types.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "../params.h"

namespace kdtp {

// Says why arguments are refused, in this thread's text for kdtp_error(); returns KDTP_ILLEGAL.
int refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

// The launch's own error; a sticky one of an earlier launch surfaces here too.
inline int launched() { return static_cast<int>(cudaGetLastError()); }

template <typename T> __device__ __forceinline__ float to_float(T x);
template <> __device__ __forceinline__ float to_float<float>(float x) { return x; }
template <> __device__ __forceinline__ float to_float<__nv_bfloat16>(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Sum over the block in an order that depends on the block's size alone. `scratch` holds one float per warp; every
// thread gets the sum. blockDim.x is a multiple of 32.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  __syncthreads();  // scratch may still be read from an earlier call
  if ((threadIdx.x & 31) == 0) scratch[warp] = x;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < warps; ++i) total += scratch[i];
  return total;
}

}  // namespace kdtp

// Refuse unless `condition` holds: KDTP_WANT(a->rows >= 0, "rms_norm: rows %lld: must be at least 0", a->rows)
#define KDTP_WANT(condition, ...) \
  if (!(condition)) return kdtp::refuse(__VA_ARGS__)

// Run `body` with T as the element type of `dtype`; refuse another.
#define KDTP_DISPATCH(op, dtype, ...)                                                     \
  switch (dtype) {                                                                        \
    case KDTP_F32: { using T = float; __VA_ARGS__; break; }                               \
    case KDTP_BF16: { using T = __nv_bfloat16; __VA_ARGS__; break; }                      \
    default: return kdtp::refuse(op ": dtype %lld: must be 0 (f32) or 1 (bf16)", (long long)(dtype)); \
  }
