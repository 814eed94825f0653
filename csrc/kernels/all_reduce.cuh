// One-shot all-reduce over memory that the GPUs map of each other.
//
// A room has two halves, which calls use in turn, and in each half a part for every rank. A word that has not come is
// all ones (of bfloat16 and float32, a NaN that no arithmetic gives): so each word is its own flag, there is one
// crossing and no fence, and 16-byte accesses may be torn between words. Whoever has read a word makes it all ones
// again. That is in time: to write into a half again, two calls later, a rank has finished the call between, for which
// it had words that every other one wrote after its kernel that emptied this half had ended. Calls are counted on the
// device, by every block, so a replayed graph goes on where the last call was.
//
// In front of a part lie the stamps of its writer's blocks: which call they belong to.
#pragma once
#include "norm.cuh"

namespace kdtp {

constexpr int kReduceRanksMost = 8;
constexpr int kReduceBlocksMost = 256;           // so many stamps of 16 bytes in front of a part
constexpr int kReduceTurns = 256;                // looks between two at the clock
constexpr int kReduceThreadsMost = 512;
constexpr int kReduceLate = 1, kReduceUnlike = 2;  // how a call has failed
constexpr uint32_t kAbsent = 0xFFFFFFFFu;
constexpr uint32_t kNanWord = 0x7FFF7FFFu;       // what goes over for data that looks absent; two bfloat16 or a float32

struct Exchange {
  uint4* rooms[kReduceRanksMost];
  int64_t part;  // of a part, packs of 16 bytes
  int rank, size;
  int* state;
  volatile int* failure;
  int64_t timeout;
  uint4 stamp;   // call, rows, width, form
};

__device__ __forceinline__ uint4 load_pack_there(const uint4* from) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_pack_there(uint4* to, const uint4& x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ bool has_come(const uint4& x) {
  return x.x != kAbsent && x.y != kAbsent && x.z != kAbsent && x.w != kAbsent;
}

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The first failure is the one that is told; later calls find `state` marked and do not wait.
__device__ __forceinline__ void fail(const Exchange& e, int how, int rank, const uint4& theirs) {
  if (atomicCAS(e.state + kReduceBlocksMost, 0, how) != 0) return;
  e.failure[1] = rank;
  e.failure[2] = e.stamp.x;
  e.failure[3] = theirs.x;
  e.failure[4] = theirs.y;
  e.failure[5] = theirs.z;
  __threadfence_system();
  e.failure[0] = how;
}

// One call of one block; `half`: where its half of every room begins, in parts.
struct Turn {
  const Exchange& e;
  int half;

  __device__ uint4* part(int room, int from) const { return e.rooms[room] + (half + from) * e.part; }

  // To all others, from the next one on, so that not all write to the same one at once.
  __device__ void push(int64_t at, uint4 x) const {
    if (x.x == kAbsent) x.x = kNanWord;
    if (x.y == kAbsent) x.y = kNanWord;
    if (x.z == kAbsent) x.z = kNanWord;
    if (x.w == kAbsent) x.w = kNanWord;
#pragma unroll 1
    for (int i = 1; i < e.size; ++i) {
      const int to = e.rank + i < e.size ? e.rank + i : e.rank + i - e.size;
      store_pack_there(part(to, e.rank) + kReduceBlocksMost + at, x);
    }
  }

  // Every thread of the block.
  __device__ void stamp() const {
    const int to = threadIdx.x;
    if (to < e.size && to != e.rank) store_pack_there(part(to, e.rank) + blockIdx.x, e.stamp);
  }

  // After the last push: the count for this block, and for those that this call does not have.
  __device__ void count(int calls) const {
    __syncthreads();  // all have read theirs
    for (int i = blockIdx.x + threadIdx.x * gridDim.x; i < kReduceBlocksMost; i += blockDim.x * gridDim.x)
      e.state[i] = calls + 1;
  }

  // The packs at place `at` of kGroup ranks from `first` on, as far as there are others.
  template <int kGroup> __device__ void receive(int first, int64_t at, uint4 (&parts)[kGroup]) const {
    uint4* const mine = part(e.rank, first) + kReduceBlocksMost + at;
    unsigned others = 0, missing;
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (first + i < e.size && first + i != e.rank) others |= 1u << i;
    missing = others;
    int64_t began = 0;
#pragma unroll 1
    for (int turn = 1; missing != 0; ++turn) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        if (missing >> i & 1) parts[i] = load_pack_there(mine + i * e.part);
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        if ((missing >> i & 1) && has_come(parts[i])) missing &= ~(1u << i);
      if (missing != 0 && turn % kReduceTurns == 0 && give_up(missing << first, began)) break;
    }
    const uint4 absent = {kAbsent, kAbsent, kAbsent, kAbsent};
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (others >> i & 1) store_pack_there(mine + i * e.part, absent);
  }

  // Whether a wait is over before its words have come. Who waits for words of another call sees it by the stamp.
  __device__ bool give_up(unsigned missing, int64_t& began) const {
    if (*static_cast<volatile int*>(e.state + kReduceBlocksMost) != 0) return true;
    const int64_t now = nanoseconds();
    if (began == 0) began = now;
    const int from = __ffs(missing) - 1;
    if (compare(from, load_pack_there(part(e.rank, from) + blockIdx.x))) return true;
    if (now - began < e.timeout) return false;
    fail(e, kReduceLate, from, uint4{0, 0, 0, 0});
    return true;
  }

  // Whether rank `from` has stamped its part for another call; that is a failure.
  __device__ bool compare(int from, const uint4& theirs) const {
    if (!has_come(theirs)) return false;
    const uint4& own = e.stamp;
    if (theirs.x == own.x && theirs.y == own.y && theirs.z == own.z && theirs.w == own.w) return false;
    fail(e, kReduceUnlike, from, theirs);
    return true;
  }

  // Last, beside the block's results on their way: every other rank's stamp, which came with its words.
  __device__ void check_stamps() const {
    const int from = threadIdx.x;
    if (from >= e.size || from == e.rank) return;
    uint4* const place = part(e.rank, from) + blockIdx.x;
    uint4 theirs = load_pack_there(place);
    int64_t began = 0;
#pragma unroll 1
    for (int turn = 1; !has_come(theirs); ++turn) {
      if (turn % kReduceTurns == 0 && give_up(1u << from, began)) return;
      theirs = load_pack_there(place);
    }
    compare(from, theirs);
    store_pack_there(place, uint4{kAbsent, kAbsent, kAbsent, kAbsent});
  }

  // The sum over the ranks of the pack at `at`, of which this rank's part is `own`: first to last, in float32. It is read
  // last, from the nearest cache: registers are short while the others' words come.
  template <typename T, int kGroup>
  __device__ Pack<T, kNormPack<T>> sum(int64_t at, const Pack<T, kNormPack<T>>* own) const {
    constexpr int kPack = kNormPack<T>;
    float total[kPack];
#pragma unroll 1
    for (int first = 0; first < e.size; first += kGroup) {
      uint4 parts[kGroup] = {};
      receive<kGroup>(first, at, parts);
      const Pack<T, kPack> mine = *own;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (first + i >= e.size) break;
        Pack<T, kPack> part;
        memcpy(&part, &parts[i], sizeof part);
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          const float x = to_float(first + i == e.rank ? mine.at[j] : part.at[j]);
          total[j] = first + i == 0 ? x : total[j] + x;
        }
      }
    }
    Pack<T, kPack> out;
#pragma unroll
    for (int j = 0; j < kPack; ++j) out.at[j] = from_float<T>(total[j]);
    return out;
  }
};

template <typename T> __device__ __forceinline__ uint4 words_of(const Pack<T, kNormPack<T>>& pack) {
  uint4 words;
  memcpy(&words, &pack, sizeof words);
  return words;
}

// Any shape: packs, which the grid takes in turn. What a thread takes first it reads before it knows where to push it.
template <typename T, int kGroup>
__global__ void __launch_bounds__(kReduceThreadsMost, 1)
    all_reduce_kernel(const __grid_constant__ Exchange e, const T* x, T* out, int64_t packs) {
  using P = Pack<T, kNormPack<T>>;
  const P* const in = reinterpret_cast<const P*>(x);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  follow_kernel_before();
  P own = first < packs ? in[first] : P{};
  const int calls = e.state[blockIdx.x];
  const Turn turn{e, (calls & 1) * e.size};
#pragma unroll 1
  for (int64_t i = first; i < packs; i += stride) {
    if (i != first) own = in[i];
    turn.push(i, words_of<T>(own));
  }
  turn.stamp();
  turn.count(calls);
#pragma unroll 1
  for (int64_t i = first; i < packs; i += stride) reinterpret_cast<P*>(out)[i] = turn.sum<T, kGroup>(i, in + i);
  turn.check_stamps();
}

// With residual and norm: a row per block, and rows in turn.
template <typename T, int kPacks, int kGroup, int kThreads>
__global__ void __launch_bounds__(kThreads)
    all_reduce_norm_kernel(const __grid_constant__ Exchange e, const T* x, T* residual, const float* __restrict__ weight,
                           T* out, int rows, int width, float eps) {
  constexpr int kPack = kNormPack<T>;
  using P = Pack<T, kPack>;
  __shared__ float scratch[kNormThreadsMost / 32];
  float ahead[kPack];
  let_kernel_behind_start();
  fetch_weights<T>(weight, width, ahead);
  wait_for_kernel_before();
  const P* const in = reinterpret_cast<const P*>(x);
  const int packs = width / kPack;
  P own = threadIdx.x < packs ? in[static_cast<int64_t>(blockIdx.x) * packs + threadIdx.x] : P{};
  const int calls = e.state[blockIdx.x];
  const Turn turn{e, (calls & 1) * e.size};
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t at = static_cast<int64_t>(row) * packs;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = threadIdx.x + i * blockDim.x;
      if (pack >= packs) break;
      if (row != blockIdx.x || i > 0) own = in[at + pack];
      turn.push(at + pack, words_of<T>(own));
    }
  }
  turn.stamp();
  turn.count(calls);
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t start = static_cast<int64_t>(row) * width;
    const auto fetch = [&](int column) {
      const int64_t at = (start + column) / kPack;
      return turn.template sum<T, kGroup>(at, in + at);
    };
    norm_row<T, kPacks, true>(fetch, residual + start, weight, ahead, out + start, width, eps, scratch);
    __syncthreads();  // scratch is used again
  }
  turn.check_stamps();
}

}  // namespace kdtp
