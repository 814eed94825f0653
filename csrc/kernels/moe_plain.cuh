// Routed experts on the plain cores: dense weights of any size, float32 or bfloat16.
#pragma once
#include "dot.cuh"
#include "moe.cuh"

namespace kdtp {

// The item of this block, or null behind the last one.
__device__ __forceinline__ const int* plain_item(const Moe& p, int index) {
  return index < *p.count ? p.items + static_cast<int64_t>(index) * (kItemHead + kDotRows) : nullptr;
}

// inner = silu(gate) * up for two columns of an item. Grid: pairs of columns, items.
template <typename T> __global__ void __launch_bounds__(kDotThreadsMost, 2) moe_gate_up_plain_kernel(const Moe p) {
  wait_for_kernel_before();
  const int* item = plain_item(p, blockIdx.y);
  if (item == nullptr) return;
  const int column = blockIdx.x * 2, count = item[1];
  const T* matrix = static_cast<const T*>(p.w_gate_up) + static_cast<int64_t>(item[0]) * 2 * p.inter * p.hidden;
  const T *w[kDotOuts], *x[kDotRows];
  // Gate, gate, up, up: so a gate's lane is 16 below its up's. Beyond an edge the last one is taken again.
#pragma unroll
  for (int o = 0; o < kDotOuts; ++o)
    w[o] = matrix + (static_cast<int64_t>(o / 2) * p.inter + min(column + o % 2, p.inter - 1)) * p.hidden;
#pragma unroll
  for (int r = 0; r < kDotRows; ++r)
    x[r] = static_cast<const T*>(p.x) + static_cast<int64_t>(item[kItemHead + min(r, count - 1)] / p.topk) * p.hidden;
  const float gate = block_dots(w, x, p.hidden);
  const float up = __shfl_down_sync(0xffffffffu, gate, 16);
  const int o = threadIdx.x / kDotRows, r = threadIdx.x % kDotRows;
  if (o < 2 && r < count && column + o < p.inter)
    static_cast<T*>(p.inner)[static_cast<int64_t>(item[kItemHead + r]) * p.inter + column + o] =
        from_float<T>(silu(gate) * up);
}

// parts = inner * w_down for four columns of an item. Grid: fours of columns, items.
template <typename T> __global__ void __launch_bounds__(kDotThreadsMost, 2) moe_down_plain_kernel(const Moe p) {
  wait_for_kernel_before();
  const int* item = plain_item(p, blockIdx.y);
  if (item == nullptr) return;
  const int column = blockIdx.x * kDotOuts, count = item[1];
  const T* matrix = static_cast<const T*>(p.w_down) + static_cast<int64_t>(item[0]) * p.hidden * p.inter;
  const T *w[kDotOuts], *x[kDotRows];
#pragma unroll
  for (int o = 0; o < kDotOuts; ++o) w[o] = matrix + static_cast<int64_t>(min(column + o, p.hidden - 1)) * p.inter;
#pragma unroll
  for (int r = 0; r < kDotRows; ++r)
    x[r] = static_cast<const T*>(p.inner) + static_cast<int64_t>(item[kItemHead + min(r, count - 1)]) * p.inter;
  const float part = block_dots(w, x, p.inter);
  const int o = threadIdx.x / kDotRows, r = threadIdx.x % kDotRows;
  if (o < kDotOuts && r < count && column + o < p.hidden)
    p.parts[static_cast<int64_t>(item[kItemHead + r]) * p.hidden + column + o] = part;
}

}  // namespace kdtp
