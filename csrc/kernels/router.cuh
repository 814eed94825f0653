// Choice of experts: one warp per row, which holds the row in registers: lane i has experts i, i + 32, ...
#pragma once
#include "../common/kdtp.cuh"
#include "../common/launch.cuh"
#include "../common/order.cuh"

namespace kdtp {

constexpr int kRouterMost = 32;  // experts of a row: one per lane

struct Routing {
  int experts, topk, groups, topk_group;
  bool sigmoid, norm;
  float scale;
};

// What weighs: the softmax, or the sigmoids, of the row's logits.
template <int kEach> __device__ __forceinline__ void score(const float* logits, float (&scores)[kEach], const Routing& r) {
  float most = -INFINITY, total = 0.0f;
#pragma unroll
  for (int j = 0; j < kEach; ++j) scores[j] = threadIdx.x + 32 * j < r.experts ? logits[threadIdx.x + 32 * j] : -INFINITY;
  if (r.sigmoid) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) scores[j] = 1.0f / (1.0f + expf(-scores[j]));
    return;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) most = fmaxf(most, scores[j]);
  most = warp_max(most);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    scores[j] = expf(scores[j] - most);
    total += threadIdx.x + 32 * j < r.experts ? scores[j] : 0.0f;
  }
  total = warp_sum(total);
#pragma unroll
  for (int j = 0; j < kEach; ++j) scores[j] /= total;
}

// The best of the warp's keys, the lowest index among equals, becomes 0: it is taken. Some key must not be 0. Each lane's best is known from before: only who gives its best away looks again.
template <int kEach> struct Best {
  uint32_t key;
  int at;  // index of the lane's own

  __device__ void look(const uint32_t (&keys)[kEach]) {
    key = 0, at = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (keys[j] > key) key = keys[j], at = j;
  }

  // Returns the index, to all lanes.
  __device__ int take(uint32_t (&keys)[kEach]) {
    const uint32_t most = __reduce_max_sync(kWholeWarp, key);
    const unsigned index = at * 32 + threadIdx.x;
    const unsigned lowest = __reduce_min_sync(kWholeWarp, key == most ? index : UINT32_MAX);
    if (lowest == index) {
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (j == at) keys[j] = 0;
      look(keys);
    }
    return lowest;
  }
};

// Experts outside the best groups fall to -inf. A group counts by its best expert, with a bias by its two best.
template <int kEach>
__device__ __forceinline__ void mask_groups(uint32_t (&keys)[kEach], uint32_t* shared, bool two, const Routing& r) {
  const uint32_t lowest = float_key(-INFINITY);
  const int size = r.experts / r.groups;
  uint32_t* const group_keys = shared + r.experts;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (threadIdx.x + 32 * j < r.experts) shared[threadIdx.x + 32 * j] = keys[j];
  __syncwarp();
  uint32_t of_groups[kEach];
#pragma unroll 1
  for (int j = 0; j < kEach; ++j) {
    const int group = threadIdx.x + 32 * j;
    uint32_t first = lowest, second = lowest;
    for (int i = group * size; i < (group + 1) * size && group < r.groups; ++i) {
      second = max(second, min(first, shared[i]));
      first = max(first, shared[i]);
    }
    const uint32_t key = two ? float_key(key_float(first) + key_float(second)) : first;
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (k == j) of_groups[k] = group < r.groups ? key : 0;
  }
  Best<kEach> best;
  best.look(of_groups);
  for (int i = 0; i < r.topk_group; ++i) best.take(of_groups);
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (threadIdx.x + 32 * j < r.groups) group_keys[threadIdx.x + 32 * j] = of_groups[j];
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = threadIdx.x + 32 * j;
    if (i < r.experts && group_keys[i / size] != 0) keys[j] = lowest;
  }
}

// Grid: rows. Dynamic shared memory: keys of the experts and of the groups, if there is more than one group; scores.
template <int kEach>
__global__ void __launch_bounds__(32)
    router_kernel(const float* logits, const float* __restrict__ bias, const int64_t* kv_rows, int* ids, float* weights,
                  const Routing r) {
  extern __shared__ uint32_t shared[];
  __shared__ int taken[kRouterMost];
  float* const weighs = reinterpret_cast<float*>(shared + (r.groups > 1 ? r.experts + r.groups : 0));
  const int lane = threadIdx.x;
  const int64_t row = blockIdx.x;
  float biases[kEach], scores[kEach];
  let_kernel_behind_start();
#pragma unroll
  for (int j = 0; j < kEach; ++j) biases[j] = bias != nullptr && lane + 32 * j < r.experts ? bias[lane + 32 * j] : 0.0f;
  wait_for_kernel_before();
  score<kEach>(logits + row * r.experts, scores, r);
  uint32_t keys[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const float choice = bias != nullptr ? scores[j] + biases[j] : scores[j];
    if (lane + 32 * j < r.experts) weighs[lane + 32 * j] = scores[j];
    // NaN must not stand above real scores; 0 stands below them all: no expert, or taken.
    keys[j] = lane + 32 * j < r.experts ? float_key(isnan(choice) ? -INFINITY : choice) : 0;
  }
  if (r.groups > 1) mask_groups<kEach>(keys, shared, bias != nullptr, r);
  Best<kEach> best;
  best.look(keys);
  int mine = 0;  // lane i: the i-th best
  for (int i = 0; i < r.topk; ++i) {
    const int index = best.take(keys);
    if (i == lane) mine = index;
  }
  int place = 0;
  for (int i = 0; i < r.topk; ++i) place += __shfl_sync(kWholeWarp, mine, i) < mine;
  if (lane < r.topk) taken[place] = mine;
  __syncwarp();
  const bool norm = r.norm && (bias != nullptr || r.topk > 1);
  float weight = lane < r.topk ? weighs[taken[lane]] : 0.0f;
  if (norm) {
    float total = 0.0f;
    for (int i = 0; i < r.topk; ++i) total += __shfl_sync(kWholeWarp, weight, i);
    weight /= total + 1e-20f;
  }
  if (!norm || bias != nullptr) weight *= r.scale;  // V2, which has no bias, either norms or scales
  if (lane >= r.topk) return;
  const bool padding = kv_rows != nullptr && kv_rows[row] < 0;
  ids[row * r.topk + lane] = padding ? -1 : taken[lane];
  weights[row * r.topk + lane] = weight;
}

}  // namespace kdtp
