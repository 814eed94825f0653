// Best-first trees: the `budget` best prefixes of each sequence under kdtp's total order, one block per sequence.
//
// A node is one 64-bit key, and keys ascend in the total order, so all that is ever chosen is the front of a merge of
// ascending lists. `best` holds the best nodes of the levels so far. The children of a level's nodes (the frontier, in
// order) at one rank are such a list by themselves, since rounding is monotone; a level merges them four at a time,
// and the last four with `best`.
//
// Source: the level-synchronous form of DDTree (arXiv 2604.12989), with kdtp's tie rule.
#pragma once
#include "tree_merge.cuh"

namespace kdtp {

// Children that can be among the best `budget` of their level, as child (f, r) comes after (f + 1)(r + 1) - 1 others;
// and one more, for the entry behind the last, which searches may read.
constexpr int tree_candidates(int budget, int k) {
  int sum = 1;
  for (int rank = 0; rank < k; ++rank) sum += budget / (rank + 1);
  return sum;
}

// Up to 16 ranks need one merge before the one with `best`, so one buffer; more ranks need two.
constexpr int tree_shared_bytes(int budget, int k) {
  const int keys = 2 * budget + (k > 16 ? 2 : 1) * tree_candidates(budget, k);
  return keys * sizeof(Key) + budget * sizeof(float);
}

// Whole warps work on a row of lp: lane l has ranks 2l and 2l + 1, and -inf behind the row.
__device__ __forceinline__ float2 load_ranks(const float* row, int k, int lane) {
  return make_float2(2 * lane < k ? row[2 * lane] : -INFINITY, 2 * lane + 1 < k ? row[2 * lane + 1] : -INFINITY);
}

// Whether a row can be used: a NaN or +inf spoils it, and so does a wrong order where there is to be one: the merges rely
// on it. Clamps at 0, which fast exp and log may exceed by an ulp.
__device__ __forceinline__ bool clean(float2& lp, int lane, bool ordered = true) {
  const bool finite = lp.x < INFINITY && lp.y < INFINITY;
  lp = make_float2(lp.x < 0.0f ? lp.x : 0.0f, lp.y < 0.0f ? lp.y : 0.0f);
  const float after = __shfl_down_sync(0xffffffffu, lp.x, 1);
  const bool in_order = lp.y <= lp.x && (lane == 31 || after <= lp.y);
  return __all_sync(0xffffffffu, finite && (in_order || !ordered));
}

// How many of the warp's two votes a lane are for.
__device__ __forceinline__ int votes(bool x, bool y) {
  return __popc(__ballot_sync(0xffffffffu, x)) + __popc(__ballot_sync(0xffffffffu, y));
}

// first[i] = the sum of the counts before i; by one warp, whose lane l has counts 2l and 2l + 1.
__device__ __forceinline__ void number(Level& level, int count_x, int count_y, int lane) {
  int sum = count_x + count_y;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int before = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += before;
  }
  if (lane == 0) level.first[0] = 0;
  level.first[2 * lane + 1] = sum - count_y;
  level.first[2 * lane + 2] = sum;
}

// The first level, a single list, by every warp: all know how many nodes there are, and one writes them down.
__device__ __forceinline__ int take_first(Level& level, float2 lp, int budget, Key* best, float* scores, int lane) {
  const bool good = clean(lp, lane);
  const bool x = good && lp.x > -INFINITY && 2 * lane < budget, y = good && lp.y > -INFINITY && 2 * lane + 1 < budget;
  const int count = votes(x, y);
  if (threadIdx.x >= 32) return count;
  if (x) best[2 * lane] = key_of(scores[2 * lane] = lp.x, low_bits(0, 0, 2 * lane) | 2 * lane);
  if (y) best[2 * lane + 1] = key_of(scores[2 * lane + 1] = lp.y, low_bits(0, 0, 2 * lane + 1) | (2 * lane + 1));
  if (lane == 0) level.frontier = count;
  __syncwarp();  // the same warp plans the next level
  return count;
}

// Plan a level, by one warp: the children of the frontier that are below `bound` and may be among the best `keep`.
__device__ __forceinline__ void plan(Level& level, const float* scores, float2 lp, int depth, Key bound, int keep,
                                     int lane) {
  const int frontier = clean(lp, lane) ? level.frontier : 0;
  // Without the rank's bits: a bound is of another level, or above all costs, so they decide nothing.
  const unsigned low = low_bits(depth, 0, 0);
  const Children lists[2] = {{scores, lp.x, low}, {scores, lp.y, low}};
  const int sizes[2] = {min(frontier, keep / (2 * lane + 1)), min(frontier, keep / (2 * lane + 2))};
  int count[2];
  count_below(lists, sizes, bound, count);
  number(level, count[0], count[1], lane);
  level.lp[2 * lane] = lp.x;
  level.lp[2 * lane + 1] = lp.y;
  const int ranks = votes(count[0] > 0, count[1] > 0);
  __syncwarp();  // all lanes have read the frontier
  if (lane == 0) {
    level.ranks = ranks;
    level.frontier = 0;
  }
}

// Where one sequence's tree goes; positions and ancestors may be null.
struct TreeOut {
  long long* tokens;
  int* parents;
  float* scores;
  int* positions;
  Key* ancestors;
  int words;
};

__device__ __forceinline__ TreeOut tree_out(const KdtpTreeBuildArgs& a, int64_t seq) {
  const int64_t row = seq * a.max_nodes, words = (a.max_nodes + 63) / 64;
  return {static_cast<long long*>(a.tokens) + row,
          static_cast<int*>(a.parents) + row,
          static_cast<float*>(a.scores) + row,
          a.positions == nullptr ? nullptr : static_cast<int*>(a.positions) + row,
          a.ancestors == nullptr ? nullptr : static_cast<Key*>(a.ancestors) + row * words,
          static_cast<int>(words)};
}

// Ancestor bits 64 * word .. of a node; parents[i] is of node i + 1.
template <typename Index> __device__ __forceinline__ Key ancestor_word(const Index* parents, int node, int word) {
  Key bits = word == 0;  // all see the root
  for (int at = node; at > 0 && at >= 64 * word; at = parents[at - 1]) {
    if (at < 64 * (word + 1)) bits |= 1ull << (at & 63);
  }
  return bits;
}

// Write the tree: thread i has node i + 1. A key names its parent by level and place, which `index` (shared, for
// `count` entries) maps to nodes; the parent of node i + 1 is left in parents[i] (likewise).
__device__ __forceinline__ void write_nodes(Level& level, const Key* best, int count, const long long* ids, int k,
                                            int start, int* index, int* parents, const TreeOut& out) {
  const int i = threadIdx.x;
  if (i < kTreeDepthMost) level.count[i] = 0;
  __syncthreads();
  const bool node = i < count;
  const Key key = node ? best[i] : 0;
  const int depth = level_of(key);
  const long long token = node ? ids[depth * k + rank_of(key)] : 0;  // asked for early, needed last
  if (node) atomicAdd(&level.count[depth], 1);
  __syncthreads();
  if (i < 32) number(level, level.count[2 * i], level.count[2 * i + 1], i);
  __syncthreads();
  if (node) index[level.first[depth] + place_of(key)] = i + 1;
  __syncthreads();
  if (node) {
    const int parent = depth == 0 ? 0 : index[level.first[depth - 1] + parent_of(key)];
    parents[i] = parent;
    out.parents[i + 1] = parent;
    out.scores[i + 1] = 0.0f + score_of(key);  // no -0
    if (out.positions != nullptr) out.positions[i + 1] = start + depth + 1;
  }
  if (out.ancestors != nullptr) {
    __syncthreads();
    // A thread gathers one word's bits, so that the stores are dense.
    for (int j = i; j < (count + 1) * out.words; j += blockDim.x) {
      out.ancestors[j] = ancestor_word(parents, j / out.words, j % out.words);
    }
  }
  if (node) out.tokens[i + 1] = token;
}

// A block has at least 64 threads and max_nodes - 1. Its shared memory: best, next [max_nodes - 1], merged
// [candidates] and for more than 16 ranks once more, scores [max_nodes - 1].
__global__ void __launch_bounds__(1024) tree_build_kernel(KdtpTreeBuildArgs a, int candidates) {
  extern __shared__ Key tree_memory[];
  __shared__ Level level;
  const int64_t seq = blockIdx.x;
  const int most = a.max_nodes - 1, k = a.k, lane = threadIdx.x & 31;
  Key *best = tree_memory, *next = best + most, *merged = next + most;
  Key* merged_again = merged + (k > 16 ? candidates : 0);
  float* scores = reinterpret_cast<float*>(merged_again + candidates);

  const float* lp = static_cast<const float*>(a.lp) + seq * a.depth * k;
  const int budget = max(0, min(static_cast<const int*>(a.budgets)[seq], most));
  const int levels = min(min(static_cast<const int*>(a.depths)[seq], static_cast<int>(a.depth)), budget);
  const bool planner = threadIdx.x < 32;
  float2 ahead = planner && a.depth > 1 ? load_ranks(lp + k, k, lane) : make_float2(0.0f, 0.0f);
  int held = levels > 0 ? take_first(level, load_ranks(lp, k, lane), budget, best, scores, lane) : 0;
  for (int depth = 1; depth < levels; ++depth) {
    const int keep = budget - depth;  // a node has `depth` ancestors below the root, which come before it
    if (planner) {
      const float2 row = ahead;
      if (depth + 1 < levels) ahead = load_ranks(lp + (depth + 1) * k, k, lane);
      plan(level, scores, row, depth, held == budget ? best[budget - 1] : kNoFiniteCost, keep, lane);
    }
    __syncthreads();
    const int total = level.first[kTreeRanksMost], ranks = level.ranks;
    if (total == 0) break;
    const int lists = ranks > 1 ? 2 << (31 - __clz(ranks - 1)) : 1;  // the power of two that is at least `ranks`
    const auto children = [&](int rank) { return Children{scores, level.lp[rank], low_bits(depth, 0, rank)}; };
    merge_fours(level, lists, 1, keep, children, merged);
    __syncthreads();
    if (ranks > 16) {
      const auto merged_four = [&](int list) { return static_cast<const Key*>(merged + level.first[4 * list]); };
      merge_fours(level, lists / 4, 4, keep, merged_four, merged_again);
      __syncthreads();
    }
    merge_best(level, ranks > 16 ? merged_again : merged, ranks > 16 ? 16 : 4, best, held, next, scores, budget, keep);
    __syncthreads();
    held = min(budget, held + total);
    Key* const newest = next;
    next = best;
    best = newest;
  }

  const TreeOut out = tree_out(a, seq);
  const int start = a.starts == nullptr ? 0 : static_cast<const int*>(a.starts)[seq];
  if (threadIdx.x == 0) {
    out.tokens[0] = static_cast<const long long*>(a.roots)[seq];
    out.parents[0] = -1;
    out.scores[0] = 0.0f;
    if (out.positions != nullptr) out.positions[0] = start;
    static_cast<int*>(a.counts)[seq] = held + 1;
  }
  write_nodes(level, best, held, static_cast<const long long*>(a.ids) + seq * a.depth * k, k, start,
              reinterpret_cast<int*>(scores), reinterpret_cast<int*>(next), out);
}

}  // namespace kdtp
