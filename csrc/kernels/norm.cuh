// RMS norm, with or without the residual sum before it: one block per row, which stays in registers between the sum of
// squares and the division.
#pragma once
#include "../common/launch.cuh"
#include "../common/kdtp.cuh"
#include "../common/pack.cuh"

namespace kdtp {

constexpr int kNormThreadsMost = 1024;
constexpr int kNormWidthMost = 16384;

// Elements that a thread takes side by side: 16 bytes of T. Who adds what is the same with and without wide accesses.
template <typename T> constexpr int kNormPack = 16 / sizeof(T);

template <typename T, bool kWide> __device__ __forceinline__ Pack<T, kNormPack<T>> load_pack(const T* from, int left) {
  using P = Pack<T, kNormPack<T>>;
  if constexpr (kWide) return *reinterpret_cast<const P*>(from);
  P pack;
#pragma unroll
  for (int j = 0; j < kNormPack<T>; ++j) pack.at[j] = j < left ? from[j] : from_float<T>(0.0f);
  return pack;
}

template <typename T, bool kWide>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, kNormPack<T>>& pack, int left) {
  if constexpr (kWide) {
    *reinterpret_cast<Pack<T, kNormPack<T>>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int j = 0; j < kNormPack<T>; ++j)
    if (j < left) to[j] = pack.at[j];
}

// Sum over the block: within each warp, then over the warps' sums in the first one; the order is that of the block's
// size. Every thread gets the sum.
__device__ __forceinline__ float row_sum(float x, float* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  float total = lane < static_cast<int>(blockDim.x >> 5) ? scratch[lane] : 0.0f;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) total += __shfl_xor_sync(0xffffffffu, total, offset);
  return total;
}

// The weights of a thread's first pack, fetched before anything else.
template <typename T> __device__ __forceinline__ void fetch_weights(const float* weight, int width, float* ahead) {
#pragma unroll
  for (int j = 0; j < kNormPack<T>; ++j) {
    const int column = threadIdx.x * kNormPack<T> + j;
    ahead[j] = column < width ? weight[column] : 0.0f;
  }
}

// One row by a whole block: fetch(column) gives the pack of x that starts there. The sum with `residual`, if there is
// one, takes its place.
template <typename T, int kPacks, bool kWide, typename Fetch>
__device__ __forceinline__ void norm_row(Fetch fetch, T* residual, const float* weight, const float* ahead, T* out,
                                         int width, float eps, float* scratch) {
  constexpr int kPack = kNormPack<T>;
  Pack<T, kPack> held[kPacks];
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (threadIdx.x + i * blockDim.x) * kPack;
    if (column >= width) break;
    Pack<T, kPack> before;
    if (residual != nullptr) before = load_pack<T, kWide>(residual + column, width - column);
    Pack<T, kPack> pack = fetch(column);
    if (residual != nullptr) {
      // Rounded to T before it is normed: the next layer adds to exactly this.
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack.at[j] = from_float<T>(to_float(pack.at[j]) + to_float(before.at[j]));
      store_pack<T, kWide>(residual + column, pack, width - column);
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) square += to_float(pack.at[j]) * to_float(pack.at[j]);
    held[i] = pack;
  }
  const float factor = 1.0f / sqrtf(row_sum(square, scratch) / width + eps);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (threadIdx.x + i * blockDim.x) * kPack;
    if (column >= width) break;
    Pack<T, kPack> pack;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const float scale = i == 0 ? ahead[j] : column + j < width ? weight[column + j] : 0.0f;
      pack.at[j] = from_float<T>(to_float(held[i].at[j]) * factor * scale);
    }
    store_pack<T, kWide>(out + column, pack, width - column);
  }
}

template <typename T, int kPacks, bool kWide>
__global__ void __launch_bounds__(kNormThreadsMost)
    rms_norm_kernel(const T* x, int64_t x_stride, T* residual, const float* __restrict__ weight, T* out, int width,
                    float eps) {
  __shared__ float scratch[kNormThreadsMost / 32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
  float ahead[kNormPack<T>];
  let_kernel_behind_start();
  fetch_weights<T>(weight, width, ahead);
  wait_for_kernel_before();
  x += blockIdx.x * x_stride;
  const auto fetch = [&](int column) { return load_pack<T, kWide>(x + column, width - column); };
  norm_row<T, kPacks, kWide>(fetch, residual == nullptr ? nullptr : residual + row, weight, ahead, out + row, width, eps,
                             scratch);
}

}  // namespace kdtp
