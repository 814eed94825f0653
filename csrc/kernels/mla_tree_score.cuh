// MLA tree attention: the warps that make scores and their softmax.
#pragma once
#include "mla_tree_jobs.cuh"

namespace kdtp::mla {

template <typename T, int kCount> struct alignas(sizeof(T) * kCount) Vector {
  T x[kCount];
};

// Four warps: each a quarter of the scores' inner dimension, then a quarter of the columns' softmax.
template <class S, int kGroups, int kStages> class Scorer {
 public:
  static constexpr int kFirstWarp = 0;

  __device__ Scorer(const Problem& problem, Shared<S, kStages>& shared)
      : problem_(problem), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  __device__ void run(const Job& job, Cursor<kStages>& cursor) {
    const int begin = job.begin, end = job.end;
    load_queries(job);
    m_ = -INFINITY;
    l_ = 0.0f;
    bool folded = job.folded && begin > 0;  // the first split has nothing to be folded into
    int slot = job.slot, border = split_end(problem_, begin);
    for (int at = begin; at < end; at += kBlock, cursor.next()) {
      barrier_wait(&shared_.full[cursor.keys.at()], cursor.keys.parity());
      scores(shared_.keys[cursor.keys.at()]);
      warp_arrive(&shared_.empty[cursor.keys.at()]);
      group_barrier(1, 32 * kScorers);  // all parts are there
      softmax(end - at, cursor.probs);
      if (at + kBlock == border || at + kBlock >= end) {
        finish(job, slot, folded, cursor.probs.at());
        folded = job.folded;
        slot += job.folded ? 0 : 1;
        border = split_end(problem_, at + kBlock);
      }
      warp_arrive(&shared_.probs_full[cursor.probs.at()]);
    }
  }

 private:
  static constexpr int kPerLane = 2 * kGroups;                    // neighbouring keys of one column
  static constexpr int kLanesPerColumn = kBlock / kPerLane;
  static constexpr int kVector = kPerLane < 4 ? kPerLane : 4;

  __device__ int column() const { return warp_ * kPerLane + lane_ / kLanesPerColumn; }

  // Fragments of Q^T for this warp's part of the inner dimension; zeros for columns that are none.
  __device__ void load_queries(const Job& job) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int place = job.places[g * 8 + lane_ / 4];
      const __nv_bfloat16* q = problem_.q + static_cast<int64_t>(place) * S::kWidth + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < S::kStepsPerWarp; ++i) {
        const int step = warp_ * S::kStepsPerWarp + i;
        const bool there = place >= 0 && (S::kSteps % kScorers == 0 || step < S::kSteps);
        q_[i][g][0] = there ? *reinterpret_cast<const uint32_t*>(q + step * 16) : 0u;
        q_[i][g][1] = there ? *reinterpret_cast<const uint32_t*>(q + step * 16 + 8) : 0u;
      }
    }
  }

  // This warp's part of S^T.
  __device__ void scores(const __nv_bfloat16* keys) {
    float s[2][kGroups][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __nv_bfloat16* k = keys + (half * 16 + lane_ % 16) * S::kStride + lane_ / 16 * 8;
#pragma unroll
      for (int i = 0; i < S::kStepsPerWarp; ++i) {
        const int step = warp_ * S::kStepsPerWarp + i;
        if (S::kSteps % kScorers != 0 && step >= S::kSteps) break;
        uint32_t a[4];
        ldmatrix_x4(a, k + step * 16);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) mma_m16n8k16(s[half][g], a, q_[i][g][0], q_[i][g][1]);
      }
      if (half == 0) group_barrier(2, 32 * kScorers);  // the parts of the block before are read
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float* part = &shared_.parts[warp_][(g * 8 + lane_ % 4 * 2) * kPartStride + half * 16 + lane_ / 4];
        part[0] = s[half][g][0];
        part[kPartStride] = s[half][g][1];
        part[8] = s[half][g][2];
        part[kPartStride + 8] = s[half][g][3];
      }
    }
  }

  // Scores of this lane's keys; -inf for those that are not visible.
  __device__ void sum_parts(float (&s)[kPerLane], int visible) const {
    using Part = Vector<float, kVector>;
    const int key = lane_ % kLanesPerColumn * kPerLane;
#pragma unroll
    for (int i = 0; i < kPerLane; i += kVector) {
      const int at = column() * kPartStride + key + i;
      Part part[kScorers];
#pragma unroll
      for (int w = 0; w < kScorers; ++w) part[w] = *reinterpret_cast<const Part*>(&shared_.parts[w][at]);
#pragma unroll
      for (int x = 0; x < kVector; ++x) {
        const float sum = __fadd_rn(__fadd_rn(part[0].x[x], part[1].x[x]), __fadd_rn(part[2].x[x], part[3].x[x]));
        s[i + x] = key + i + x < visible ? __fmul_rn(sum, problem_.scale) : -INFINITY;
      }
    }
  }

  // The block's sum of weights goes over neighbouring keys first, then over lanes: one tree, whatever kGroups is. It
  // takes the weights rounded, as O does.
  __device__ void softmax(int visible, const Ring<2>& probs) {
    float s[kPerLane], top = -INFINITY;
    sum_parts(s, visible);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) top = fmaxf(top, s[i]);
#pragma unroll
    for (int offset = 1; offset < kLanesPerColumn; offset <<= 1)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    const float m = fmaxf(m_, top), scale = fast_exp2(m_ - m);
    Vector<__nv_bfloat16, kPerLane> rounded;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      rounded.x[i] = __float2bfloat16_rn(fast_exp2(s[i] - m));
      s[i] = __bfloat162float(rounded.x[i]);
    }
#pragma unroll
    for (int width = 1; width < kPerLane; width <<= 1)
#pragma unroll
      for (int i = 0; i < kPerLane; i += 2 * width) s[i] = __fadd_rn(s[i], s[i + width]);
#pragma unroll
    for (int offset = 1; offset < kLanesPerColumn; offset <<= 1)
      s[0] = __fadd_rn(s[0], __shfl_xor_sync(0xffffffffu, s[0], offset));
    m_ = m;
    l_ = __fmaf_rn(l_, scale, s[0]);
    barrier_wait(&shared_.probs_empty[probs.at()], probs.parity() ^ 1);
    const int key = lane_ % kLanesPerColumn * kPerLane;
    auto* to = &shared_.probs[probs.at()][column() * kProbStride + key];
    *reinterpret_cast<Vector<__nv_bfloat16, kPerLane>*>(to) = rounded;
    if (key == 0) shared_.scales[probs.at()][column()] = scale;
  }

  // The split's m and l, or their fold into those that are there, for which the weighers get the weights.
  __device__ void finish(const Job& job, int slot, bool folded, int at) {
    const int place = job.places[column()];
    if (lane_ % kLanesPerColumn == 0 && place >= 0) {
      float2& to = problem_.states.sums[state_of(problem_, slot, place)];
      const float2 before = folded ? to : make_float2(-INFINITY, 0.0f);
      const Fold weights = fold_weights(before.x, m_);
      shared_.folds[at][column()] = weights;
      to = folded ? make_float2(fmaxf(before.x, m_), fold(weights, before.y, l_)) : make_float2(m_, l_);
    }
    m_ = -INFINITY;
    l_ = 0.0f;
  }

  const Problem& problem_;
  Shared<S, kStages>& shared_;
  const int warp_, lane_;
  float m_, l_;  // of this lane's column
  uint32_t q_[S::kStepsPerWarp][kGroups][2];
};

}  // namespace kdtp::mla
