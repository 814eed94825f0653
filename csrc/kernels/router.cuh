// Choice of experts: one warp per row. Lane i owns entries i, i + 32, ... of every list, so that taking the best out of
// one needs no synchronisation.
#pragma once
#include "../common/kdtp.cuh"
#include "../common/order.cuh"

namespace kdtp {

constexpr int kRouterMost = 32;  // experts of a row: one per lane

struct Routing {
  int experts, topk, groups, topk_group;
  bool sigmoid, norm;
  float scale;
};

// The best of the keys, the lowest index among equals, becomes 0: it is taken. Some key must not be 0.
__device__ __forceinline__ void take_best(uint32_t* keys, int count) {
  const int lane = threadIdx.x;
  uint32_t best = 0;
  unsigned at = 0;
  for (int i = lane; i < count; i += 32) {
    if (keys[i] > best) best = keys[i], at = i;
  }
  const uint32_t most = __reduce_max_sync(kWholeWarp, best);
  const unsigned lowest = __reduce_min_sync(kWholeWarp, best == most ? at : UINT32_MAX);
  if (lowest % 32 == lane) keys[lowest] = 0;
}

// What weighs: the softmax, or the sigmoids, of the row's logits.
__device__ __forceinline__ void score(const float* __restrict__ logits, float* scores, const Routing& r) {
  float most = -INFINITY, total = 0.0f;
  for (int i = threadIdx.x; i < r.experts; i += 32) {
    scores[i] = r.sigmoid ? 1.0f / (1.0f + expf(-logits[i])) : logits[i];
    most = fmaxf(most, scores[i]);
  }
  if (r.sigmoid) return;
  most = warp_max(most);
  for (int i = threadIdx.x; i < r.experts; i += 32) {
    scores[i] = expf(scores[i] - most);
    total += scores[i];
  }
  total = warp_sum(total);
  for (int i = threadIdx.x; i < r.experts; i += 32) scores[i] /= total;
}

// Experts outside the best groups fall to -inf. A group counts by its best expert, with a bias by its two best.
__device__ __forceinline__ void mask_groups(uint32_t* keys, uint32_t* group_keys, bool two, const Routing& r) {
  const uint32_t lowest = float_key(-INFINITY);
  const int size = r.experts / r.groups;
  for (int group = threadIdx.x; group < r.groups; group += 32) {
    uint32_t first = lowest, second = lowest;
    for (int i = group * size; i < (group + 1) * size; ++i) {
      second = max(second, min(first, keys[i]));
      first = max(first, keys[i]);
    }
    group_keys[group] = two ? float_key(key_float(first) + key_float(second)) : first;
  }
  for (int i = 0; i < r.topk_group; ++i) take_best(group_keys, r.groups);
  __syncwarp();
  for (int i = threadIdx.x; i < r.experts; i += 32) {
    if (group_keys[i / size] != 0) keys[i] = lowest;
  }
}

// The taken ids, ascending, into `ids`.
__device__ __forceinline__ void list_taken(const uint32_t* keys, int count, int* ids) {
  const unsigned lower_lanes = (1u << threadIdx.x) - 1;
  for (int start = 0, before = 0; start < count; start += 32) {
    const int i = start + threadIdx.x;
    const bool taken = i < count && keys[i] == 0;
    const unsigned all = __ballot_sync(kWholeWarp, taken);
    if (taken) ids[before + __popc(all & lower_lanes)] = i;
    before += __popc(all);
  }
  __syncwarp();
}

// Grid: rows. Dynamic shared memory: scores and keys of the experts, keys of the groups.
__global__ void __launch_bounds__(32)
    router_kernel(const float* __restrict__ logits, const float* __restrict__ bias, int* __restrict__ ids,
                  float* __restrict__ weights, const Routing r) {
  extern __shared__ uint32_t shared[];
  __shared__ int taken[kRouterMost];
  float* const scores = reinterpret_cast<float*>(shared);
  uint32_t *const keys = shared + r.experts, *const group_keys = keys + r.experts;
  const int lane = threadIdx.x;
  score(logits + static_cast<int64_t>(blockIdx.x) * r.experts, scores, r);
  for (int i = lane; i < r.experts; i += 32) {
    const float choice = bias != nullptr ? scores[i] + bias[i] : scores[i];
    keys[i] = float_key(isnan(choice) ? -INFINITY : choice);  // NaN must not stand above real scores
  }
  __syncwarp();
  if (r.groups > 1) mask_groups(keys, group_keys, bias != nullptr, r);
  for (int i = 0; i < r.topk; ++i) take_best(keys, r.experts);
  list_taken(keys, r.experts, taken);
  const bool norm = r.norm && (bias != nullptr || r.topk > 1);
  float weight = lane < r.topk ? scores[taken[lane]] : 0.0f;
  if (norm) {
    float total = 0.0f;
    for (int i = 0; i < r.topk; ++i) total += __shfl_sync(kWholeWarp, weight, i);
    weight /= total + 1e-20f;
  }
  if (!norm || bias != nullptr) weight *= r.scale;  // V2, which has no bias, either norms or scales
  if (lane >= r.topk) return;
  ids[static_cast<int64_t>(blockIdx.x) * r.topk + lane] = taken[lane];
  weights[static_cast<int64_t>(blockIdx.x) * r.topk + lane] = weight;
}

}  // namespace kdtp
