// MLA tree attention in bfloat16 on tensor cores by mma.sync: sm_90 and after it, within sm_120's shared memory.
//
// Keys are on the 16-side of the product and query columns on the 8-side: S^T = K Q^T, O^T = V^T P^T. A column is one
// head of one row; a row's 8 heads fill the 8-side, so that a single row wastes nothing, and no column's arithmetic
// depends on what other columns are there, or whether there are any. Other warps make the scores of a block while the
// one before it is weighed, and others fetch keys ahead of them all: they wait for each other's data only.
#pragma once
#include "mla_tree_score.cuh"
#include "mla_tree_weigh.cuh"

namespace kdtp::mla {

// Jobs until there are no more. Fewer groups than the most have code of their own, which computes the same.
template <template <class, int, int> class Role, class S, int kStages>
__device__ __forceinline__ void consume(const Problem& problem, Shared<S, kStages>& shared) {
  Cursor<kStages> cursor;
  for (Ring<kJobs> jobs;; jobs.next()) {
    barrier_wait(&shared.job_full[jobs.at()], jobs.parity());
    const Job& job = shared.jobs[jobs.at()];
    if (job.groups == 0) return;
    if (job.groups == 1) Role<S, 1, kStages>(problem, shared).run(job, cursor);
    else if (job.groups == 2) Role<S, 2, kStages>(problem, shared).run(job, cursor);
    else Role<S, kGroupsMost, kStages>(problem, shared).run(job, cursor);
    warp_arrive(&shared.job_empty[jobs.at()]);
  }
}

template <class S, int kStages> __device__ __forceinline__ void init_barriers(Shared<S, kStages>& shared) {
  for (int i = 0; i < kStages; ++i) {
    barrier_init(&shared.full[i], kFetchers * kWarpArrivals);
    barrier_init(&shared.empty[i], (kScorers + kWeighers) * kWarpArrivals);
  }
  barrier_init(&shared.parts_full, kScorers * kWarpArrivals);
  barrier_init(&shared.parts_empty, kWeighers * kWarpArrivals);
  for (int i = 0; i < kJobs; ++i) {
    barrier_init(&shared.job_full[i], kWarpArrivals);
    barrier_init(&shared.job_empty[i], (kScorers + kWeighers) * kWarpArrivals);
  }
  barrier_init_done();
}

extern __shared__ __align__(128) unsigned char mla_shared[];

// As many thread blocks as the device can hold take the items among them.
template <class S, int kStages>
__global__ void __launch_bounds__(kThreads, 1) attend_kernel(const __grid_constant__ Problem problem) {
  Shared<S, kStages>& shared = *reinterpret_cast<Shared<S, kStages>*>(mla_shared);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  let_kernel_behind_start();
  const int warp = threadIdx.x / 32;
  if (warp >= kScorers + kWeighers) return Fetcher<S, kStages>(problem, shared).run();  // which waits later
  wait_for_kernel_before();
  if (warp < kScorers) consume<Scorer, S, kStages>(problem, shared);
  else consume<Weigher, S, kStages>(problem, shared);
}

}  // namespace kdtp::mla
