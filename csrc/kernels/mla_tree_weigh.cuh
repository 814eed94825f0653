// MLA tree attention: the warps that turn scores into weights, and sum latents by them.
#pragma once
#include "mla_tree_jobs.cuh"

namespace kdtp::mla {

template <typename T, int kCount> struct alignas(sizeof(T) * kCount) Vector {
  T x[kCount];
};

template <class S, int kGroups, int kStages> class Weigher {
 public:
  __device__ Weigher(const Problem& problem, Shared<S, kStages>& shared)
      : problem_(problem), shared_(shared), warp_(threadIdx.x / 32 - kScorers), lane_(threadIdx.x % 32) {}

  __device__ void run(const Job& job, Cursor<kStages>& cursor) {
    const Splits& splits = problem_.batch.splits;
    bool folded = job.folded && job.begin > 0;  // the first split has nothing to be folded into
    int slot = job.slot, split = splits.of(job.begin), border = splits.begin(split + 1);
    reset();
    for (int at = job.begin; at < job.end; at += kBlock, cursor.next()) {
      const int buffer = cursor.block % 2;
      barrier_wait(&shared_.parts_full, cursor.block % 2);
      softmax(job.end - at, buffer);
      barrier_wait(&shared_.full[cursor.keys.at()], cursor.keys.parity());
      group_barrier(1, 32 * kWeighers);  // all weights are there, and all have used those of the block before
      weigh(shared_.keys[cursor.keys.at()], buffer);
      warp_arrive(&shared_.empty[cursor.keys.at()]);
      if (at + kBlock == border || at + kBlock >= job.end) {
        finish(job, slot, folded);
        reset();
        folded = job.folded;
        slot += job.folded ? 0 : 1;
        border = splits.begin(++split + 1);
      }
    }
  }

 private:
  static constexpr int kLanesPerColumn = 32 / kGroups;  // in the softmax, where a warp has kGroups columns
  static constexpr bool kEven = S::kTiles % kWeighers == 0;

  __device__ void reset() {
    m_ = -INFINITY;
    l_ = 0.0f;
#pragma unroll
    for (int t = 0; t < S::kTilesPerWarp; ++t)
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[t][g][i] = 0.0f;
  }

  __device__ int column() const { return warp_ * kGroups + lane_ / kLanesPerColumn; }

  // Scores of this lane's keys, kGroups neighbours; -inf for those that are not visible.
  __device__ void sum_parts(float (&s)[kGroups], int key, int visible) const {
    using Part = Vector<float, kGroups>;
    Part part[kScorers];
#pragma unroll
    for (int w = 0; w < kScorers; ++w)
      part[w] = *reinterpret_cast<const Part*>(&shared_.parts[w][column() * kPartStride + key]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float sum = __fadd_rn(__fadd_rn(part[0].x[i], part[1].x[i]), __fadd_rn(part[2].x[i], part[3].x[i]));
      s[i] = key + i < visible ? __fmul_rn(sum, problem_.scale) : -INFINITY;
    }
  }

  // The block's sum of weights goes over neighbouring keys first, then over lanes: one tree, whatever kGroups is. It
  // takes the weights rounded, as O does.
  __device__ void softmax(int visible, int buffer) {
    const int key = lane_ % kLanesPerColumn * kGroups;
    float s[kGroups], top = -INFINITY;
    sum_parts(s, key, visible);
    warp_arrive(&shared_.parts_empty);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) top = fmaxf(top, s[i]);
#pragma unroll
    for (int offset = 1; offset < kLanesPerColumn; offset <<= 1)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    const float m = fmaxf(m_, top), scale = fast_exp2(m_ - m);
    Vector<__nv_bfloat16, kGroups> rounded;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      rounded.x[i] = __float2bfloat16_rn(fast_exp2(s[i] - m));
      s[i] = __bfloat162float(rounded.x[i]);
    }
    *reinterpret_cast<Vector<__nv_bfloat16, kGroups>*>(&shared_.probs[buffer][column() * kProbStride + key]) = rounded;
    if (key == 0) shared_.scales[buffer][column()] = scale;
#pragma unroll
    for (int width = 1; width < kGroups; width <<= 1)
#pragma unroll
      for (int i = 0; i < kGroups; i += 2 * width) s[i] = __fadd_rn(s[i], s[i + width]);
#pragma unroll
    for (int offset = 1; offset < kLanesPerColumn; offset <<= 1)
      s[0] = __fadd_rn(s[0], __shfl_xor_sync(0xffffffffu, s[0], offset));
    m_ = m;
    l_ = __fmaf_rn(l_, scale, s[0]);
  }

  // O^T = O^T * scale + V^T P^T for this warp's rows of O^T, all columns.
  __device__ void weigh(const __nv_bfloat16* keys, int buffer) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      rescale(g, *reinterpret_cast<const float2*>(&shared_.scales[buffer][g * 8 + lane_ % 4 * 2]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t p[kGroups][2];
      load_probs(p, shared_.probs[buffer] + half * 16);
      const __nv_bfloat16* v = keys + (half * 16 + lane_ % 8 + lane_ / 16 * 8) * S::kStride + lane_ / 8 % 2 * 8;
#pragma unroll
      for (int t = 0; t < S::kTilesPerWarp; ++t) {
        const int tile = warp_ * S::kTilesPerWarp + t;
        if (!kEven && tile >= S::kTiles) break;
        uint32_t a[4];
        ldmatrix_x4_trans(a, v + tile * 16);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) mma_m16n8k16(o_[t][g], a, p[g][0], p[g][1]);
      }
    }
  }

  // Fragments of P^T for 16 keys: two groups by one instruction, the second of which may not be there.
  __device__ void load_probs(uint32_t (&p)[kGroups][2], const __nv_bfloat16* probs) const {
#pragma unroll
    for (int g = 0; g < kGroups; g += 2) {
      uint32_t both[4];
      const int group = min(g + lane_ / 16, kGroups - 1);
      ldmatrix_x4(both, probs + (group * 8 + lane_ % 8) * kProbStride + lane_ / 8 % 2 * 8);
      p[g][0] = both[0];
      p[g][1] = both[1];
      if (g + 1 < kGroups) {
        p[g + 1][0] = both[2];
        p[g + 1][1] = both[3];
      }
    }
  }

  __device__ void rescale(int g, float2 scale) {
#pragma unroll
    for (int t = 0; t < S::kTilesPerWarp; ++t) {
      o_[t][g][0] = __fmul_rn(o_[t][g][0], scale.x);
      o_[t][g][1] = __fmul_rn(o_[t][g][1], scale.y);
      o_[t][g][2] = __fmul_rn(o_[t][g][2], scale.x);
      o_[t][g][3] = __fmul_rn(o_[t][g][3], scale.y);
    }
  }

  // Write the state of a finished split, or fold it into the one that is there.
  __device__ void finish(const Job& job, int slot, bool folded) {
    const int place = job.places[column()];
    if (lane_ % kLanesPerColumn == 0 && place >= 0) {
      float2& to = problem_.states.sums[state_of(problem_, slot, place)];
      const float2 before = folded ? to : make_float2(-INFINITY, 0.0f);
      const Fold weights = fold_weights(before.x, m_);
      shared_.folds[column()] = weights;
      to = folded ? make_float2(fmaxf(before.x, m_), fold(weights, before.y, l_)) : make_float2(m_, l_);
    }
    group_barrier(1, 32 * kWeighers);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      write_column(job, g, 0, slot, folded);
      write_column(job, g, 1, slot, folded);
    }
  }

  __device__ void write_column(const Job& job, int g, int odd, int slot, bool folded) {
    const int column = g * 8 + lane_ % 4 * 2 + odd, place = job.places[column];
    if (place < 0) return;
    float* out = problem_.states.outs + state_of(problem_, slot, place) * S::kLora + lane_ / 4;
    const Fold weights = shared_.folds[column];
#pragma unroll
    for (int t = 0; t < S::kTilesPerWarp; ++t) {
      const int tile = warp_ * S::kTilesPerWarp + t;
      if (!kEven && tile >= S::kTiles) break;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        float& to = out[tile * 16 + below * 8];
        const float o = o_[t][g][2 * below + odd];
        to = folded ? fold(weights, to, o) : o;
      }
    }
  }

  const Problem& problem_;
  Shared<S, kStages>& shared_;
  const int warp_, lane_;
  float m_, l_;  // of this lane's column in the softmax
  float o_[S::kTilesPerWarp][kGroups][4];
};

}  // namespace kdtp::mla
