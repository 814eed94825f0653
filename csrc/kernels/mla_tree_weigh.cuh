// MLA tree attention: the warps that sum latents by their weights.
#pragma once
#include "mla_tree_jobs.cuh"

namespace kdtp::mla {

// Eight warps: each an eighth of the rows of O^T, all columns.
template <class S, int kGroups, int kStages> class Weigher {
 public:
  static constexpr int kFirstWarp = kScorers;

  __device__ Weigher(const Problem& problem, Shared<S, kStages>& shared)
      : problem_(problem), shared_(shared), warp_(threadIdx.x / 32 - kFirstWarp), lane_(threadIdx.x % 32) {}

  __device__ void run(const Job& job, Cursor<kStages>& cursor) {
    bool folded = job.folded && job.begin > 0;
    int slot = job.slot, border = split_end(problem_, job.begin);
    reset();
    for (int at = job.begin; at < job.end; at += kBlock, cursor.next()) {
      barrier_wait(&shared_.full[cursor.keys.at()], cursor.keys.parity());
      barrier_wait(&shared_.probs_full[cursor.probs.at()], cursor.probs.parity());
      weigh(shared_.keys[cursor.keys.at()], cursor.probs.at());
      warp_arrive(&shared_.empty[cursor.keys.at()]);
      if (at + kBlock == border || at + kBlock >= job.end) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          finish(job, g, 0, slot, folded, cursor.probs.at());
          finish(job, g, 1, slot, folded, cursor.probs.at());
        }
        reset();
        folded = job.folded;
        slot += job.folded ? 0 : 1;
        border = split_end(problem_, at + kBlock);
      }
      warp_arrive(&shared_.probs_empty[cursor.probs.at()]);
    }
  }

 private:
  __device__ void reset() {
#pragma unroll
    for (int t = 0; t < S::kTilesPerWarp; ++t)
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[t][g][i] = 0.0f;
  }

  // O^T = O^T * scale + V^T P^T.
  __device__ void weigh(const __nv_bfloat16* keys, int at) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      rescale(g, *reinterpret_cast<const float2*>(&shared_.scales[at][g * 8 + lane_ % 4 * 2]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t p[kGroups][2];
      load_probs(p, shared_.probs[at] + half * 16);
      const __nv_bfloat16* v = keys + (half * 16 + lane_ % 8 + lane_ / 16 * 8) * S::kStride + lane_ / 8 % 2 * 8;
#pragma unroll
      for (int t = 0; t < S::kTilesPerWarp; ++t) {
        const int tile = warp_ * S::kTilesPerWarp + t;
        if (S::kTiles % kWeighers != 0 && tile >= S::kTiles) break;
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

  // Write a column of O, or fold it into the one that is there.
  __device__ void finish(const Job& job, int g, int odd, int slot, bool folded, int at) {
    const int column = g * 8 + lane_ % 4 * 2 + odd, place = job.places[column];
    if (place < 0) return;
    float* out = problem_.states.outs + state_of(problem_, slot, place) * S::kLora + lane_ / 4;
    const Fold weights = shared_.folds[at][column];
#pragma unroll
    for (int t = 0; t < S::kTilesPerWarp; ++t) {
      const int tile = warp_ * S::kTilesPerWarp + t;
      if (S::kTiles % kWeighers != 0 && tile >= S::kTiles) break;
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
  float o_[S::kTilesPerWarp][kGroups][4];
};

}  // namespace kdtp::mla
