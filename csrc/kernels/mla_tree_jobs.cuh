// MLA tree attention: what the tensor-core kernel has to do, as jobs, and the warps that find them and fetch keys.
//
// 8 heads of a row make a group: the 8 columns of one product. Splits that lie wholly in what several rows of a
// sequence see, with every key stored at its position, are shared: one job does them for a tile of groups. The rest of
// a row's keys, its open part, is its own and makes a job of its own.
#pragma once
#include <limits.h>

#include "../common/async.cuh"
#include "mla_tree.cuh"

namespace kdtp::mla {

constexpr int kBlock = 32;  // keys of one softmax update; part of the arithmetic
constexpr int kGroupsMost = 4;
constexpr int kColumnsMost = 8 * kGroupsMost;
constexpr int kJobs = 2;      // a job is found while the one before it is done
constexpr int kScorers = 4;   // warps: scores, a quarter of the inner dimension each
constexpr int kWeighers = 8;  // warps: softmax and weighted sums, an eighth of the columns and of the latent each
constexpr int kFetchers = 2;  // warps: copies of keys, half a block's each
constexpr int kFetched = kBlock / kFetchers;  // keys, a lane each
constexpr int kThreads = 32 * (kScorers + kWeighers + kFetchers);

template <int kLora_, int kRope_> struct Shape {
  static constexpr int kLora = kLora_;
  static constexpr int kWidth = kLora_ + kRope_;
  static constexpr int kStride = kWidth + 8;  // an odd number of 16-byte pieces: ldmatrix without bank conflicts
  static constexpr int kSteps = kWidth / 16;
  static constexpr int kStepsPerWarp = (kSteps + kScorers - 1) / kScorers;
  static constexpr int kTiles = kLora / 16;
  static constexpr int kTilesPerWarp = (kTiles + kWeighers - 1) / kWeighers;
  static_assert(kLora % 16 == 0 && kWidth % 16 == 0, "whole tiles");
};

struct Problem {
  Batch batch;
  States states;
  const __nv_bfloat16* q;
  const __nv_bfloat16* kv;
  float scale;     // times log2(e)
  int octets;      // groups of 8 heads in a row, the last maybe not full
  int open_items;  // work items for what is not shared; behind them those for tiles
};

// The splits from position `begin` on up to `end`, for up to kGroupsMost groups.
struct Job {
  int begin;
  int end;
  int slot;                  // of the first split's state; the others follow, unless they are folded
  int folded;                // all states are folded into that slot
  int groups;                // 0: there are no more jobs
  int places[kColumnsMost];  // row * heads + head of each column, -1 for a column that is none
};

constexpr int kPartStride = kBlock + 4;  // floats; a warp's stores of one fragment go to 32 banks
constexpr int kProbStride = kBlock + 8;  // bfloat16; eight rows of ldmatrix lie in different banks

template <class S, int kStages> struct Shared {
  Barrier full[kStages], empty[kStages];  // of keys
  Barrier parts_full, parts_empty;
  Barrier job_full[kJobs], job_empty[kJobs];
  Job jobs[kJobs];
  alignas(16) __nv_bfloat16 keys[kStages][kBlock * S::kStride];
  alignas(16) float parts[kScorers][kColumnsMost * kPartStride];  // of the scores, by column and key
  alignas(16) __nv_bfloat16 probs[2][kColumnsMost * kProbStride];
  alignas(16) float scales[2][kColumnsMost];  // what each column's O is multiplied with before the block is added
  alignas(16) Fold folds[kColumnsMost];
};

// Where a consumer is: it sees every block of keys once.
template <int kStages> struct Cursor {
  Ring<kStages> keys;
  unsigned block = 0;

  __device__ void next() {
    keys.next();
    ++block;
  }
};

__device__ __forceinline__ int64_t state_of(const Problem& p, int slot, int place) {
  return static_cast<int64_t>(slot) * p.batch.rows * p.batch.heads + place;
}

__host__ __device__ __forceinline__ int even_tiles(int groups) { return (groups + kGroupsMost - 1) / kGroupsMost; }

// First group of the tile that begins with sequence `seq`; -1 if that is an aligned group, or there is none.
__device__ __forceinline__ int odd_base(const Problem& p, int seq) {
  const int row = p.batch.first_row[seq];
  const bool own = row >= 0 && row < p.batch.rows && row * p.octets % kGroupsMost != 0;
  return own && p.batch.row_seq[row] == seq ? row * p.octets : -1;
}

// Groups of one sequence: bit i of `members` for group base + i.
struct Tile {
  int base;
  unsigned members;
  int until;  // shared splits that all of them have
};

// A tile is an aligned run of kGroupsMost groups, cut where a sequence begins; from `base` on, its members are those
// whose rows have more than `split` shared splits. All lanes of the warp work on it.
__device__ __forceinline__ Tile shared_tile(const Problem& p, int base, int split) {
  const int group = base + threadIdx.x % 32;
  const int end = min((base / kGroupsMost + 1) * kGroupsMost, p.batch.rows * p.octets);
  const int seq = p.batch.row_seq[base / p.octets];
  const bool same = group < end && seq >= 0 && p.batch.row_seq[group / p.octets] == seq;
  const int shared = same ? row_of(p.batch, group / p.octets).shared : 0;
  const int until = __reduce_min_sync(0xffffffffu, shared > split ? shared : INT_MAX);
  return {base, __ballot_sync(0xffffffffu, shared > split), until};
}

// The warps that find jobs and fetch keys, ahead of the others by as many blocks as there are stages. All of them go
// through all jobs; the first posts these, and each copies its own keys: the copies of a warp's lanes start one after
// the other, some 50 cycles each, too slow for a single warp to keep up with the products.
template <class S, int kStages> class Fetcher {
 public:
  __device__ Fetcher(const Problem& problem, Shared<S, kStages>& shared)
      : problem_(problem),
        shared_(shared),
        lane_(threadIdx.x % 32),
        first_((threadIdx.x / 32 - kScorers - kWeighers) * kFetched) {}

  // Items: the open ones, then those of tiles that begin on an aligned group, then those of tiles that begin with a
  // sequence; a tile has one for each split that any row may share, or one for all of them if they are folded. They go
  // around the thread blocks and back, so that who has the longest of one round has the shortest of the next; if a
  // second round has items for some blocks only, those that had the open ones get them, which are short.
  __device__ void run() {
    const Batch& batch = problem_.batch;
    turns_ = batch.folded ? 1 : batch.splits.of(longest() + batch.rows);
    const int even_items = even_tiles(batch.rows * problem_.octets) * turns_, odd_items = batch.seqs * turns_;
    const int items = problem_.open_items + even_items + odd_items;
    const int blocks = gridDim.x, block = blockIdx.x;
    for (int first = 0, round = 0; first < items; first += blocks, ++round) {
      const bool back = round % 2 == 1 && items >= 2 * blocks;
      int item = first + (back ? blocks - 1 - block : block);
      if (item >= items) continue;
      if (item < problem_.open_items) open(item);
      else if ((item -= problem_.open_items) < even_items) even(item);
      else odd(item - even_items);
    }
    post({0, 0, 0}, 0, 0, 0, false);
  }

 private:
  // The largest of all starts: what the call says of them may be far above.
  __device__ int longest() const {
    int start = 0;
    for (int i = lane_; i < problem_.batch.seqs; i += 32) start = max(start, problem_.batch.starts[i]);
    return __reduce_max_sync(0xffffffffu, start);
  }

  // A row's keys behind its shared splits.
  __device__ void open(int item) {
    const int per_row = (problem_.octets + kGroupsMost - 1) / kGroupsMost;
    const int row = item / per_row, octet = item % per_row * kGroupsMost;
    const int count = min(kGroupsMost, problem_.octets - octet);
    const Row keys = row_of(problem_.batch, row);
    if (keys.padding) return;
    const Tile tile = {row * problem_.octets + octet, (1u << count) - 1, 0};
    const int begin = problem_.batch.splits.begin(keys.shared);
    work(tile, keys, begin, keys.position + 1, problem_.batch.folded ? 1 : keys.shared, false);
  }

  // Items of the highest splits, which are the longest, come first.
  __device__ void even(int item) {
    const int tiles = even_tiles(problem_.batch.rows * problem_.octets);
    shared(item % tiles * kGroupsMost, item / tiles);
  }

  __device__ void odd(int item) {
    const int base = odd_base(problem_, item % problem_.batch.seqs);
    if (base >= 0) shared(base, item / problem_.batch.seqs);
  }

  // The shared splits of a tile: one, or all of them one after the other, as long as any of its rows has more.
  __device__ void shared(int base, int turn) {
    const Splits& splits = problem_.batch.splits;
    const bool folded = problem_.batch.folded;
    int split = folded ? 0 : turns_ - 1 - turn;
    do {
      const Tile tile = shared_tile(problem_, base, split);
      if (tile.members == 0) return;
      const int until = folded ? tile.until : split + 1;
      const Row keys = row_of(problem_.batch, (base + __ffs(tile.members) - 1) / problem_.octets);
      work(tile, keys, splits.begin(split), splits.begin(until), folded ? 0 : split, folded);
      split = until;
    } while (folded);
  }

  __device__ void work(const Tile& tile, const Row& row, int begin, int end, int slot, bool folded) {
    if (begin >= end) return;
    post(tile, begin, end, slot, folded);
    int from = look_up(row, begin, end);
    for (int at = begin; at < end; at += kBlock) {
      // Committed rows are older than this step: they come while the kernel before still runs.
      if (!waited_ && min(at + kBlock, end) > row.start) {
        wait_for_kernel_before();
        waited_ = true;
      }
      fetch(from, max(0, min(kFetched, end - at - first_)));
      from = look_up(row, at + kBlock, end);
    }
  }

  __device__ void post(const Tile& tile, int begin, int end, int slot, bool folded) {
    if (first_ > 0) return;
    barrier_wait(&shared_.job_empty[jobs_.at()], jobs_.parity() ^ 1);
    Job& job = shared_.jobs[jobs_.at()];
    job.places[lane_] = place_of(tile, lane_);
    if (lane_ == 0) {
      job.begin = begin;
      job.end = end;
      job.slot = slot;
      job.folded = folded;
      job.groups = __popc(tile.members);
    }
    warp_arrive(&shared_.job_full[jobs_.at()]);
    jobs_.next();
  }

  __device__ int place_of(const Tile& tile, int column) const {
    unsigned rest = tile.members;
    for (int i = 0; i < column / 8; ++i) rest &= rest - 1;
    const int group = tile.base + __ffs(rest) - 1;
    const int head = group % problem_.octets * 8 + column % 8;
    const bool none = rest == 0 || head >= problem_.batch.heads;
    return none ? -1 : group / problem_.octets * problem_.batch.heads + head;
  }

  // Cache row of this lane's key; -1 behind the last visible one.
  __device__ int look_up(const Row& row, int at, int end) const {
    const int key = at + first_ + lane_;
    return lane_ < kFetched && key < end ? row.cache_row(key) : -1;
  }

  // This warp's part of a block, a key a lane, of which `count` are there; zeros for the others, which no one may read.
  __device__ void fetch(int from, int count) {
    constexpr int kBytes = S::kWidth * sizeof(__nv_bfloat16);
    static_assert(kBytes % 16 == 0 && S::kStride * 2 % 16 == 0, "copy_bulk");
    barrier_wait(&shared_.empty[stages_.at()], stages_.parity() ^ 1);
    __nv_bfloat16* to = shared_.keys[stages_.at()] + (first_ + lane_) * S::kStride;
    if (from < 0 && lane_ < kFetched) {
      for (int i = 0; i < S::kWidth; i += 8) *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
      fence_before_copy();  // a later copy comes to the same place
    }
    Barrier* full = &shared_.full[stages_.at()];
    warp_arrive_expect(full, count * kBytes);
    __syncwarp();
    if (from >= 0) copy_bulk(to, problem_.kv + static_cast<int64_t>(from) * S::kWidth, kBytes, full);
    stages_.next();
  }

  const Problem& problem_;
  Shared<S, kStages>& shared_;
  const int lane_, first_;  // first_: key of a block that this warp copies
  int turns_;               // items of a tile
  bool waited_ = false;
  Ring<kStages> stages_;
  Ring<kJobs> jobs_;
};

}  // namespace kdtp::mla
