// MLA tree attention: the work items of the tensor-core kernels, and which rows and heads share one.
//
// 8 heads of a row make a group: the 8 columns of one product. Splits that lie wholly in what several rows of a sequence
// see, with every key stored at its position, are shared: one thread block does them for a tile of groups. The rest of a
// row's keys, its open part, is its own and has a thread block to itself.
#pragma once
#include <limits.h>

#include "mla_tree.cuh"

namespace kdtp::mla {

struct Problem {
  Batch batch;
  States states;
  const __nv_bfloat16* q;
  const __nv_bfloat16* kv;
  float scale;        // times log2(e)
  int octets;         // groups of 8 heads in a row, the last maybe not full
  int open_items;     // thread blocks for what is not shared; the others follow
  int tiles;          // of groups, over all sequences
  int shared_splits;  // of the longest row, at most
};

// The groups that a thread block works on: all of one sequence, and with the same keys in its splits.
template <int kGroups> struct Tile {
  int groups[kGroups];  // row * octets + octet
  int count;
  int until;  // shared splits that all of them have
  Row row;    // of the first group
};

// Up to kGroups groups from `base` on, of one sequence, whose rows all have more than `split` shared splits.
// A tile is an aligned run of kGroups groups, cut where a sequence begins.
template <int kGroups>
__device__ __forceinline__ Tile<kGroups> shared_tile(const Problem& p, int base, int split) {
  Tile<kGroups> tile;
  const int lane = threadIdx.x & 31;
  const int end = min((base / kGroups + 1) * kGroups, p.batch.rows * p.octets);
  const int group = base + lane;
  const int seq = p.batch.row_seq[base / p.octets];
  const bool same = group < end && seq >= 0 && p.batch.row_seq[group / p.octets] == seq;
  const int shared = same ? row_of(p.batch, group / p.octets).shared : 0;
  unsigned members = __ballot_sync(0xffffffffu, shared > split);
  tile.until = __reduce_min_sync(0xffffffffu, shared > split ? shared : INT_MAX);
  tile.count = __popc(members);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    tile.groups[g] = members ? base + __ffs(members) - 1 : -1;
    members &= members - 1;
  }
  if (tile.count > 0) tile.row = row_of(p.batch, tile.groups[0] / p.octets);
  return tile;
}

// First group of tile `t`, or -1: tiles that begin on an aligned group, then those that begin with a sequence.
template <int kGroups> __device__ __forceinline__ int tile_base(const Problem& p, int t) {
  const int groups = p.batch.rows * p.octets;
  const int aligned = (groups + kGroups - 1) / kGroups;
  if (t < aligned) return t * kGroups;
  const int row = p.batch.first_row[t - aligned];
  const bool own = row >= 0 && row < p.batch.rows && row * p.octets % kGroups != 0;
  return own && p.batch.row_seq[row] == t - aligned ? row * p.octets : -1;
}

template <int kGroups> __device__ __forceinline__ Tile<kGroups> open_tile(const Problem& p, int item) {
  Tile<kGroups> tile;
  const int per_row = (p.octets + kGroups - 1) / kGroups;
  const int row = item / per_row, octet = item % per_row * kGroups;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) tile.groups[g] = octet + g < p.octets ? row * p.octets + octet + g : -1;
  tile.count = min(kGroups, p.octets - octet);
  tile.until = 0;
  tile.row = row_of(p.batch, row);
  return tile;
}

}  // namespace kdtp::mla
