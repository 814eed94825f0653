// MLA tree attention: the warps that make scores.
#pragma once
#include "mla_tree_jobs.cuh"

namespace kdtp::mla {

template <class S, int kGroups, int kStages> class Scorer {
 public:
  __device__ Scorer(const Problem& problem, Shared<S, kStages>& shared)
      : problem_(problem), shared_(shared), lane_(threadIdx.x % 32), first_(threadIdx.x / 32 * S::kStepsPerWarp) {}

  __device__ void run(const Job& job, Cursor<kStages>& cursor) {
    load_queries(job);
    for (int at = job.begin; at < job.end; at += kBlock, cursor.next()) {
      barrier_wait(&shared_.full[cursor.keys.at()], cursor.keys.parity());
      const __nv_bfloat16* keys = shared_.keys[cursor.keys.at()];
      if constexpr (kTogether == 2) {
        scores<2>(keys, 0, cursor);
      } else {
        scores<1>(keys, 0, cursor);
        scores<1>(keys, 1, cursor);
      }
      warp_arrive(&shared_.empty[cursor.keys.at()]);
      warp_arrive(&shared_.parts_full);
    }
  }

 private:
  static constexpr int kTogether = kGroups < kGroupsMost ? 2 : 1;  // halves of a block: as registers allow
  static constexpr bool kEven = S::kSteps % kScorers == 0;

  // Fragments of Q^T for this warp's part of the inner dimension; zeros for columns that are none.
  __device__ void load_queries(const Job& job) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int place = job.places[g * 8 + lane_ / 4];
      const __nv_bfloat16* q = problem_.q + static_cast<int64_t>(place) * S::kWidth + first_ * 16 + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < S::kStepsPerWarp; ++i) {
        const bool there = place >= 0 && (kEven || first_ + i < S::kSteps);
        q_[i][g][0] = there ? *reinterpret_cast<const uint32_t*>(q + i * 16) : 0u;
        q_[i][g][1] = there ? *reinterpret_cast<const uint32_t*>(q + i * 16 + 8) : 0u;
      }
    }
  }

  // This warp's part of S^T for 16 or 32 keys. Each step's keys are loaded before the products of the step before it.
  template <int kHalves> __device__ void scores(const __nv_bfloat16* keys, int half, const Cursor<kStages>& cursor) {
    const __nv_bfloat16* k = keys + (half * 16 + lane_ % 16) * S::kStride + first_ * 16 + lane_ / 16 * 8;
    float s[kHalves][kGroups][4] = {};
    uint32_t a[2][kHalves][4];
#pragma unroll
    for (int i = -1; i < S::kStepsPerWarp; ++i) {
      if (i + 1 < S::kStepsPerWarp && (kEven || first_ + i + 1 < S::kSteps))
#pragma unroll
        for (int h = 0; h < kHalves; ++h) ldmatrix_x4(a[(i + 1) % 2][h], k + h * 16 * S::kStride + (i + 1) * 16);
      if (i < 0 || (!kEven && first_ + i >= S::kSteps)) continue;
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) mma_m16n8k16(s[h][g], a[i % 2][h], q_[i][g][0], q_[i][g][1]);
    }
    // The parts of the block before must have been read.
    if (half == 0) barrier_wait(&shared_.parts_empty, cursor.block % 2 ^ 1);
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) write_part(s[h][g], g, half + h);
  }

  __device__ void write_part(const float (&s)[4], int g, int half) {
    const int column = g * 8 + lane_ % 4 * 2, key = half * 16 + lane_ / 4;
    float* part = &shared_.parts[threadIdx.x / 32][column * kPartStride + key];
    part[0] = s[0];
    part[kPartStride] = s[1];
    part[8] = s[2];
    part[kPartStride + 8] = s[3];
  }

  const Problem& problem_;
  Shared<S, kStages>& shared_;
  const int lane_, first_;  // first_: step of the inner dimension
  uint32_t q_[S::kStepsPerWarp][kGroups][2];
};

}  // namespace kdtp::mla
