// The walk of each tree, one block per sequence: every edge is looked at once and side by side, then the few that the
// target's choices follow are walked one after the other.
#pragma once
#include "../common/kdtp.cuh"

namespace kdtp {

constexpr int kAcceptNodesMost = 1025;

// Whether `parents` are of a tree: node 0 is the root, every other parent precedes its child. So the walk must end.
__device__ __forceinline__ bool well_formed(int node, int parent) {
  return node == 0 ? parent == -1 : parent >= 0 && parent < node;
}

__global__ void __launch_bounds__(1024) tree_accept_kernel(KdtpTreeAcceptArgs a) {
  __shared__ long long tokens[kAcceptNodesMost], chosen[kAcceptNodesMost];
  __shared__ int parents[kAcceptNodesMost];
  __shared__ int child[kAcceptNodesMost];  // the node that follows if this one is accepted; `count` for none
  const int64_t seq = blockIdx.x, row = seq * a.max_nodes;
  const int count = static_cast<const int*>(a.counts)[seq];

  bool good = count >= 1 && count <= a.max_nodes;
  for (int i = threadIdx.x; good && i < count; i += blockDim.x) {
    tokens[i] = static_cast<const long long*>(a.tokens)[row + i];
    chosen[i] = static_cast<const long long*>(a.chosen)[row + i];
    parents[i] = static_cast<const int*>(a.parents)[row + i];
    child[i] = count;
    good = well_formed(i, parents[i]);
  }
  if (__syncthreads_or(!good)) {
    if (threadIdx.x == 0) {
      static_cast<int*>(a.lengths)[seq] = 0;
      static_cast<long long*>(a.bonus)[seq] = -1;
    }
    return;
  }
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    // Siblings have distinct tokens; if they had not, the first would be taken, whichever thread is faster.
    if (i > 0 && tokens[i] == chosen[parents[i]]) atomicMin(&child[parents[i]], i);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int* path = static_cast<int*>(a.path) + row;
    int length = 0, last = 0;
    for (int node = 0; node < count; node = child[node]) path[length++] = last = node;
    static_cast<int*>(a.lengths)[seq] = length;
    static_cast<long long*>(a.bonus)[seq] = chosen[last];
  }
}

}  // namespace kdtp
