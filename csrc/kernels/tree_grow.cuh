// Trees node by node, one warp per sequence: those that tree_build.cuh cannot merge, of candidates that are scored after
// one another, and those that begin with the most likely path.
//
// Below every node its best child that is not in the tree yet is pending. The best of all pending ones becomes the next
// node; its next sibling and its own best child are pending then. These are the entries of the heap of
// kdtp.spec.tree.
#pragma once
#include "tree_build.cuh"

namespace kdtp {

constexpr int kGrowNodesMost = kTreeBudgetMost + 1;
constexpr Key kNothing = ~0ull;

// Candidates 2 l and 2 l + 1 of lane l, as keys that ascend in their order: cost << 32 | tie.
struct Pair {
  Key first, second;
};

__device__ __forceinline__ Key warp_min(Key x) {
  const unsigned high = __reduce_min_sync(0xffffffffu, static_cast<unsigned>(x >> 32));
  const unsigned low = static_cast<unsigned>(x >> 32) == high ? static_cast<unsigned>(x) : 0xffffffffu;
  return static_cast<Key>(high) << 32 | __reduce_min_sync(0xffffffffu, low);
}

// One sequence's candidates. Where they are scored after one another (`before` = k), a depth has a row for each of the
// depth above, and equal costs come by id; else one row, in order.
struct Candidates {
  const float* lp;
  const long long* ids;
  int before, k, levels;

  // What may follow the candidate `above` of the level above; nothing, if the row cannot be used.
  __device__ __forceinline__ Pair load(int level, int above, int lane) const {
    if (level >= levels) return {kNothing, kNothing};
    float2 row = load_ranks(lp + (level * before + (level > 0 && before > 1 ? above : 0)) * k, k, lane);
    unsigned ties[2] = {2u * lane, 2u * lane + 1};
    if (before > 1) {
      const long long* names = ids + level * k;
      if (2 * lane < k) ties[0] = static_cast<unsigned>(names[2 * lane]);
      if (2 * lane + 1 < k) ties[1] = static_cast<unsigned>(names[2 * lane + 1]);
    }
    const bool good = clean(row, lane, before == 1);
    return {good ? key_of(row.x, ties[0]) : kNothing, good ? key_of(row.y, ties[1]) : kNothing};
  }
};

// The best child from `least` on, of a parent with this score, as the key of a pending node: low bits as in
// tree_merge.cuh, with the candidate in the place of the rank.
__device__ __forceinline__ Key best_child(const Pair& pair, Key least, float score, int level, int parent, int lane) {
  const Key first = pair.first >= least ? pair.first : kNothing, second = pair.second >= least ? pair.second : kNothing;
  const Key mine = min(first, second), best = warp_min(mine);
  const int owner = __ffs(__ballot_sync(0xffffffffu, mine == best)) - 1;
  const int candidate = __shfl_sync(0xffffffffu, 2 * lane + (first != best), owner);
  if (best >= kNoFiniteCost) return kNothing;
  const Key child = key_of(score + score_of(best), low_bits(level, parent, candidate));
  return child < kNoFiniteCost ? child : kNothing;
}

__global__ void __launch_bounds__(32) tree_grow_kernel(KdtpTreeBuildArgs a) {
  __shared__ Key pending[kGrowNodesMost];  // the best child of each node that is not in the tree
  __shared__ float scores[kGrowNodesMost];
  __shared__ short parents[kTreeBudgetMost];  // parents[i]: of node i + 1
  __shared__ unsigned char taken[kGrowNodesMost], depths[kGrowNodesMost];  // taken: the candidate that a node is
  const int64_t seq = blockIdx.x;
  const int lane = threadIdx.x, k = a.k;
  const int budget = max(0, min(static_cast<const int*>(a.budgets)[seq], static_cast<int>(a.max_nodes) - 1));
  const int levels = min(static_cast<const int*>(a.depths)[seq], static_cast<int>(a.depth));
  const Candidates from = {static_cast<const float*>(a.lp) + seq * a.depth * a.before * k,
                           static_cast<const long long*>(a.ids) + seq * a.depth * k, static_cast<int>(a.before), k, levels};

  bool path = a.shape != KDTP_TREE;  // the most likely path has not ended
  int count = 1;
  const Key first = best_child(from.load(0, 0, lane), 0, 0.0f, 0, 0, lane);
  if (lane == 0) {
    pending[0] = first;
    scores[0] = 0.0f;
    taken[0] = depths[0] = 0;
  }
  __syncwarp();
  for (; count <= budget; ++count) {
    Key best = path ? pending[count - 1] : kNothing;
    path = path && best != kNothing;
    if (!path && a.shape != KDTP_CHAIN) {
      for (int i = lane; i < count; i += 32) best = min(best, pending[i]);
      best = warp_min(best);
    }
    if (best == kNothing) break;
    const int level = level_of(best), parent = parent_of(best), candidate = rank_of(best);
    const float score = score_of(best);
    const Pair beside = from.load(level, taken[parent], lane), below = from.load(level + 1, candidate, lane);
    const Key itself = __shfl_sync(0xffffffffu, candidate & 1 ? beside.second : beside.first, candidate >> 1);
    const Key sibling = best_child(beside, itself + 1, scores[parent], level, parent, lane);
    const Key child = best_child(below, 0, score, level + 1, count, lane);
    __syncwarp();  // all lanes have read what changes now
    if (lane == 0) {
      pending[parent] = sibling;
      pending[count] = child;
      scores[count] = score;
      parents[count - 1] = static_cast<short>(parent);
      taken[count] = static_cast<unsigned char>(candidate);
      depths[count] = static_cast<unsigned char>(level + 1);
    }
    __syncwarp();
  }

  const TreeOut out = tree_out(a, seq);
  const int start = a.starts == nullptr ? 0 : static_cast<const int*>(a.starts)[seq];
  if (lane == 0) static_cast<int*>(a.counts)[seq] = count;
  for (int i = lane; i < count; i += 32) {
    out.tokens[i] = i == 0 ? static_cast<const long long*>(a.roots)[seq] : from.ids[(depths[i] - 1) * k + taken[i]];
    out.parents[i] = i == 0 ? -1 : parents[i - 1];
    out.scores[i] = 0.0f + scores[i];  // no -0
    if (out.positions != nullptr) out.positions[i] = start + depths[i];
  }
  if (out.ancestors == nullptr) return;
  for (int j = lane; j < count * out.words; j += 32) out.ancestors[j] = ancestor_word(parents, j / out.words, j % out.words);
}

}  // namespace kdtp
