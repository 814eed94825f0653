// Nodes as keys, and merges of ascending lists of them: what tree_build.cuh is made of.
//
// A key's place in a merge is its place in its own list plus the number of lower keys in each of the others. No key
// waits for another, and keys are unique, so a merge is the same for any number of threads.
#pragma once
#include "../common/kdtp.cuh"

namespace kdtp {

constexpr int kTreeDepthMost = 64;
constexpr int kTreeRanksMost = 64;
constexpr int kTreeBudgetMost = 1024;

// cost << 32 | level << 26 | parent << 16 | rank << 10 | place. The cost is the bits of -score, which ascend as it does;
// level is depth - 1; parent and place are places within a level, the node's own being known in `best` only.
using Key = unsigned long long;
constexpr Key kNoFiniteCost = 0x7f800000ull << 32;  // above every key of a node that may be taken

__device__ __forceinline__ unsigned low_bits(int level, int parent, int rank) {
  return static_cast<unsigned>(level) << 26 | static_cast<unsigned>(parent) << 16 | static_cast<unsigned>(rank) << 10;
}
__device__ __forceinline__ Key key_of(float score, unsigned low) {
  return static_cast<Key>(__float_as_uint(score) & 0x7fffffffu) << 32 | low;
}
__device__ __forceinline__ float score_of(Key key) { return -__uint_as_float(static_cast<unsigned>(key >> 32)); }
__device__ __forceinline__ int level_of(Key key) { return static_cast<int>(key >> 26) & 63; }
__device__ __forceinline__ int parent_of(Key key) { return static_cast<int>(key >> 16) & 1023; }
__device__ __forceinline__ int rank_of(Key key) { return static_cast<int>(key >> 10) & 63; }
__device__ __forceinline__ int place_of(Key key) { return static_cast<int>(key) & 1023; }

// What a level's merges go by, in shared memory.
struct Level {
  int first[kTreeRanksMost + 1];  // the children of rank r are numbered from first[r] to first[r + 1] - 1
  int count[kTreeDepthMost];      // nodes of each level of the finished tree
  float lp[kTreeRanksMost];
  int ranks;                      // the ranks that have children: these are the first ones
  int frontier;                   // nodes of the level above, then of this one
};

// The children of the frontier at one rank.
struct Children {
  const float* scores;
  float lp;
  unsigned low;
  __device__ __forceinline__ Key operator[](int f) const {
    return key_of(scores[f] + lp, low | static_cast<unsigned>(f) << 16);
  }
};

// Have all of x before any is used. The compiler would move each load to its use, and wait for one after the other.
template <int kCount> __device__ __forceinline__ void await_all(Key (&x)[kCount]) {
  static_assert(kCount >= 2 && kCount <= 4, "as many as are asked for");
#ifdef __CUDA_ARCH__
  if constexpr (kCount == 2) asm volatile("" : "+l"(x[0]), "+l"(x[1]));
  if constexpr (kCount == 3) asm volatile("" : "+l"(x[0]), "+l"(x[1]), "+l"(x[2]));
  if constexpr (kCount == 4) asm volatile("" : "+l"(x[0]), "+l"(x[1]), "+l"(x[2]), "+l"(x[3]));
#endif
}

// How many keys of each list are below x. The lists are searched side by side: their loads overlap as long as none of
// them is behind a branch, so an entry is read even where it cannot count, and of an empty list the one behind it.
template <int kLists, typename List>
__device__ __forceinline__ void count_below(const List (&lists)[kLists], const int (&sizes)[kLists], Key x,
                                            int (&below)[kLists]) {
  int longest = 0;
#pragma unroll
  for (int q = 0; q < kLists; ++q) {
    below[q] = 0;
    longest = max(longest, sizes[q]);
  }
  for (int step = longest > 0 ? 1 << (31 - __clz(longest)) : 0; step > 0; step >>= 1) {
    Key probe[kLists];
#pragma unroll
    for (int q = 0; q < kLists; ++q) probe[q] = lists[q][max(min(below[q] + step, sizes[q]) - 1, 0)];
    await_all(probe);
#pragma unroll
    for (int q = 0; q < kLists; ++q) below[q] += (probe[q] < x) & (below[q] + step <= sizes[q]) ? step : 0;
  }
}

// The list that holds child number i, of `lists` (a power of two) lists of `stride` ranks each.
__device__ __forceinline__ int list_of(const Level& level, int lists, int stride, int i) {
  int found = 0;
  for (int step = lists >> 1; step > 0; step >>= 1) {
    if (level.first[(found + step) * stride] <= i) found += step;
  }
  return found;
}

// Nothing behind a level's best `keep` can be in the tree, so merges leave it out.
__device__ __forceinline__ int list_size(const Level& level, int list, int stride, int keep) {
  return min(keep, level.first[(list + 1) * stride] - level.first[list * stride]);
}

// Merge four lists each of the `lists` lists of `stride` ranks; list_at(list) gives the list. A result is stored in
// `out` at the number of its first rank's first child.
template <typename ListAt>
__device__ __forceinline__ void merge_fours(const Level& level, int lists, int stride, int keep, ListAt list_at,
                                            Key* out) {
  const int total = level.first[kTreeRanksMost];
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    const int list = list_of(level, lists, stride, i), at = i - level.first[list * stride];
    if (at >= keep) continue;  // nothing was stored there
    const Key key = list_at(list)[at];
    decltype(list_at(0)) others[3];
    int sizes[3], below[3];
#pragma unroll
    for (int q = 0; q < 3; ++q) {
      const int other = (list & ~3) | ((list + 1 + q) & 3);
      others[q] = list_at(other);
      sizes[q] = list_size(level, other, stride, keep);
    }
    count_below(others, sizes, key, below);
    const int place = at + below[0] + below[1] + below[2];
    if (place < keep) out[level.first[(list & ~3) * stride] + place] = key;
  }
}

// Last merge: the up to four lists of `stride` ranks in `in`, and the `held` keys of `best`; the first `budget` of all
// are the next best. Those of this level are the next frontier: a prefix of the level, so its places have no gaps.
__device__ __forceinline__ void merge_best(Level& level, const Key* in, int stride, const Key* best, int held, Key* next,
                                           float* scores, int budget, int keep) {
  const int total = level.first[kTreeRanksMost];
  int kept = 0;
  for (int i = threadIdx.x; i < total + held; i += blockDim.x) {
    const bool fresh = i < total;
    const int list = fresh ? list_of(level, 4, stride, i) : 3;
    const int at = fresh ? i - level.first[list * stride] : i - total;
    if (fresh && at >= keep) continue;
    const Key key = fresh ? in[i] : best[at];
    const Key* others[4];
    int sizes[4], below[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int other = (list + 1 + q) & 3;  // the fourth is `list` itself
      const bool own = fresh && q == 3;
      others[q] = own ? best : in + level.first[other * stride];
      sizes[q] = own ? held : list_size(level, other, stride, keep);
    }
    count_below(others, sizes, key, below);
    const int among = at + below[0] + below[1] + below[2];  // for a fresh key its place in the level
    const int place = among + below[3];
    if (place >= budget) continue;
    next[place] = fresh ? key | among : key;
    if (fresh) scores[among] = score_of(key);
    kept += fresh;
  }
  kept = __reduce_add_sync(0xffffffffu, kept);
  if ((threadIdx.x & 31) == 0 && kept > 0) atomicAdd(&level.frontier, kept);
}

}  // namespace kdtp
