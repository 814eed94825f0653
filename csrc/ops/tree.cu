#include "../kernels/tree_accept.cuh"
#include "../kernels/tree_build.cuh"
#include "../kernels/tree_grow.cuh"

namespace {

constexpr int kNodesMost = kdtp::kTreeBudgetMost + 1;
static_assert(kdtp::kAcceptNodesMost == kNodesMost, "trees that are built can be walked");
constexpr int kSharedMost = kdtp::tree_shared_bytes(kdtp::kTreeBudgetMost, kdtp::kTreeRanksMost);
static_assert(kSharedMost + sizeof(kdtp::Level) <= 101376, "the largest tree fits sm_120");

// About one thread per key of a level's last merge; more would only wait.
int build_threads(int64_t budget) { return budget <= 32 ? 128 : budget <= 128 ? 256 : budget <= 512 ? 512 : 1024; }

}  // namespace

extern "C" int kdtp_tree_build(const KdtpTreeBuildArgs* a) {
  KDTP_WANT(a->seqs >= 0, "tree_build: seqs %lld: must be at least 0", (long long)a->seqs);
  KDTP_WANT(a->depth >= 0 && a->depth <= kdtp::kTreeDepthMost, "tree_build: depth %lld: must be 0..%d",
            (long long)a->depth, kdtp::kTreeDepthMost);
  KDTP_WANT(a->k >= 1 && a->k <= kdtp::kTreeRanksMost, "tree_build: k %lld: must be 1..%d", (long long)a->k,
            kdtp::kTreeRanksMost);
  KDTP_WANT(a->max_nodes >= 1 && a->max_nodes <= kNodesMost, "tree_build: max_nodes %lld: must be 1..%d",
            (long long)a->max_nodes, kNodesMost);
  KDTP_WANT(a->before == 1 || a->before == a->k, "tree_build: before %lld: must be 1, or k, %lld", (long long)a->before,
            (long long)a->k);
  KDTP_WANT(a->shape >= KDTP_TREE && a->shape <= KDTP_SEEDED,
            "tree_build: shape %lld: must be 0 (tree), 1 (chain) or 2 (seeded)", (long long)a->shape);
  KDTP_WANT(a->starts != nullptr || a->positions == nullptr, "tree_build: positions without starts");
  if (a->seqs == 0) return 0;
  if (a->shape != KDTP_TREE || a->before > 1) {
    kdtp::tree_grow_kernel<<<a->seqs, 32, 0, kdtp::stream_of(a->stream)>>>(*a);
    return kdtp::launched();
  }
  const int budget = a->max_nodes - 1, k = a->k;
  const cudaError_t code =
      cudaFuncSetAttribute(kdtp::tree_build_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMost);
  if (code != cudaSuccess) return code;
  kdtp::tree_build_kernel<<<a->seqs, build_threads(budget), kdtp::tree_shared_bytes(budget, k), kdtp::stream_of(a->stream)>>>(
      *a, kdtp::tree_candidates(budget, k));
  return kdtp::launched();
}

extern "C" int kdtp_tree_accept(const KdtpTreeAcceptArgs* a) {
  KDTP_WANT(a->seqs >= 0, "tree_accept: seqs %lld: must be at least 0", (long long)a->seqs);
  KDTP_WANT(a->max_nodes >= 1 && a->max_nodes <= kNodesMost, "tree_accept: max_nodes %lld: must be 1..%d",
            (long long)a->max_nodes, kNodesMost);
  if (a->seqs == 0) return 0;
  const int threads = a->max_nodes <= 32 ? 32 : a->max_nodes <= 64 ? 64 : a->max_nodes <= 256 ? 256 : 1024;
  kdtp::tree_accept_kernel<<<a->seqs, threads, 0, kdtp::stream_of(a->stream)>>>(*a);
  return kdtp::launched();
}
