// Copies that run on their own and the barriers in shared memory that count them (mbarrier): sm_90 and after it.
#pragma once
#include <stdint.h>

#include "mma.cuh"

namespace kdtp {

using Barrier = uint64_t;

// A phase ends after `arrivals` arrivals and once all bytes that are expected have come.
__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Behind the last barrier_init, in the thread that did it, before the block's __syncthreads().
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// What this thread did before is seen by those who see the phase end.
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Who arrives for a warp whose lanes are all done: one of them, behind __syncwarp(). racecheck follows the order of a
// barrier's own arrivals only and takes what the other lanes did for races: for it alone all of them arrive.
#ifdef KDTP_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

__device__ __forceinline__ void warp_arrive(Barrier* barrier) {
  __syncwarp();
  if (kWarpArrivals == 32 || threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The same, with so many bytes still to come.
__device__ __forceinline__ void warp_arrive_expect(Barrier* barrier, int bytes) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive_expect(barrier, bytes);
  else if (kWarpArrivals == 32) barrier_arrive(barrier);
}

// Until the phase of this parity has ended; phases are 0, 1, 0, .. and one before the first counts as ended.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// `bytes` from global to shared memory, counted by the barrier; addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// 16 bytes by one thread, past the L1; of the group that the thread commits next.
__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// The same of memory that will not be read again soon; it brings the rest of its 256 bytes into the L2.
__device__ __forceinline__ void stream_copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of this thread's groups but the last kLeft have come.
template <int kLeft> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before copies that start after it.
__device__ __forceinline__ void fence_before_copy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of `threads` threads of the block, whole warps; `id` 1..15, 0 is that of __syncthreads().
__device__ __forceinline__ void group_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One place after the other of a ring of barriers, and the parity of the phase it is in; one register.
template <int kPlaces> class Ring {
 public:
  __device__ int at() const { return turn_ < kPlaces ? turn_ : turn_ - kPlaces; }
  __device__ unsigned parity() const { return turn_ < kPlaces ? 0u : 1u; }
  __device__ void next() { turn_ = turn_ + 1 == 2 * kPlaces ? 0 : turn_ + 1; }

 private:
  int turn_ = 0;
};

}  // namespace kdtp
