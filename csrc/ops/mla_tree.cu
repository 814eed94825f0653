#include <algorithm>
#include <cmath>

#include "../kernels/mla_tree_mma.cuh"
#include "../kernels/mla_tree_simt.cuh"

namespace {

using namespace kdtp::mla;

constexpr int kFoldedFrom = 256;  // groups that fill the device without a thread block for each split
constexpr int kSlotsMost = 3072;  // weights of a merge in 48 KB of shared memory

#define KDTP_RANGE(field, low, high)                                                                  \
  KDTP_WANT(a->field >= low && a->field <= high, "mla_tree: " #field " %lld: must be %lld..%lld",     \
            (long long)a->field, (long long)(low), (long long)(high))

int refuse_illegal(const KdtpMlaTreeArgs* a) {
  KDTP_RANGE(rows, 0, 1 << 20);
  KDTP_RANGE(seqs, 0, 1 << 20);
  KDTP_RANGE(heads, 1, 1024);
  KDTP_RANGE(lora, 1, kSimtWidthMost);
  KDTP_RANGE(rope, 0, kSimtWidthMost - a->lora);
  KDTP_RANGE(max_depth, 0, 1 << 20);
  KDTP_RANGE(max_pages, 0, 1 << 24);
  KDTP_RANGE(max_start, 0, 1 << 24);
  KDTP_RANGE(split, kPage, 65536);
  KDTP_WANT((a->split & (a->split - 1)) == 0, "mla_tree: split %lld: must be a power of two", (long long)a->split);
  KDTP_RANGE(portable, 0, 1);
  KDTP_RANGE(dtype, KDTP_F32, KDTP_BF16);
  return 0;
}

// Shapes that the tensor-core kernel is compiled for: DeepSeek-V3's and Kimi K2's, and the golden models'. The others
// take the plain kernel, in bfloat16 too.
bool has_tensor_cores(const KdtpMlaTreeArgs* a) {
  const bool shape = (a->lora == 512 && a->rope == 64) || (a->lora == 64 && a->rope == 16);
  return a->dtype == KDTP_BF16 && shape;
}

Batch batch_of(const KdtpMlaTreeArgs* a) {
  Batch b{};
  b.row_seq = static_cast<const int*>(a->row_seq);
  b.row_depth = static_cast<const int*>(a->row_depth);
  b.path = static_cast<const int*>(a->path);
  b.starts = static_cast<const int*>(a->starts);
  b.first_row = static_cast<const int*>(a->first_row);
  b.pages = static_cast<const int*>(a->pages);
  b.rows = a->rows;
  b.seqs = a->seqs;
  b.heads = a->heads;
  b.max_depth = a->max_depth;
  b.max_pages = a->max_pages;
  b.splits = {static_cast<int>(std::log2(a->split))};
  b.folded = a->rows * ((a->heads + 7) / 8) >= kFoldedFrom;
  return b;
}

// States per row and head. Folded: that of all shared splits, then those of the splits that a path of max_depth rows
// can touch. Else one for each split up to the highest position there can be.
int64_t slots_of(const Batch& b, const KdtpMlaTreeArgs* a) {
  if (b.folded) return 1 + 2 + (a->max_depth >> b.splits.size(0));
  return b.splits.of(a->max_start + a->rows) + 1;
}

int64_t workspace_of(const Batch& b, const KdtpMlaTreeArgs* a) {
  const States none(nullptr, slots_of(b, a), a->rows, a->heads);
  return reinterpret_cast<int64_t>(none.outs) + slots_of(b, a) * a->rows * a->heads * a->lora * 4;
}

Problem problem_of(const KdtpMlaTreeArgs* a) {
  const Batch b = batch_of(a);
  Problem p{b, States(a->workspace, slots_of(b, a), a->rows, a->heads)};
  p.q = static_cast<const __nv_bfloat16*>(a->q);
  p.kv = static_cast<const __nv_bfloat16*>(a->kv);
  p.scale = static_cast<float>(a->scale * 1.4426950408889634);
  p.octets = (b.heads + 7) / 8;
  p.open_items = b.rows * ((p.octets + kGroupsMost - 1) / kGroupsMost);
  return p;
}

// Work items at most; the device counts them itself, by the starts that it finds.
int items_of(const Problem& p, const KdtpMlaTreeArgs* a) {
  const int tiles = even_tiles(p.batch.rows * p.octets) + p.batch.seqs;
  return p.open_items + tiles * (p.batch.folded ? 1 : p.batch.splits.of(a->max_start + a->rows));
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

template <class S, int kStages> int attend(const KdtpMlaTreeArgs* a) {
  const Problem p = problem_of(a);
  kdtp::Launch how;
  how.grid = dim3(std::min(items_of(p, a), attribute(cudaDevAttrMultiProcessorCount)));
  how.block = dim3(kThreads);
  how.shared = sizeof(Shared<S, kStages>);
  return kdtp::launch(attend_kernel<S, kStages>, how, a->stream, p);
}

int merge(const KdtpMlaTreeArgs* a) {
  const Batch b = batch_of(a);
  const int64_t slots = slots_of(b, a);
  kdtp::Launch how;
  how.grid = dim3(a->rows * a->heads, (a->lora + kMergeThreads - 1) / kMergeThreads);
  how.block = dim3(kMergeThreads);
  how.shared = slots * sizeof(float4);
  return kdtp::launch(merge_kernel<__nv_bfloat16>, how, a->stream, b, States(a->workspace, slots, a->rows, a->heads),
                      static_cast<__nv_bfloat16*>(a->out), static_cast<int>(a->lora));
}

// More stages than two only hide more latency: what is computed is the same.
template <class S> int tensor_cores(const KdtpMlaTreeArgs* a) {
  constexpr int kPortable = 2, kMany = 5;
  static_assert(sizeof(Shared<S, kPortable>) <= kdtp::kSharedMost, "sm_120");
  const int64_t need = workspace_of(batch_of(a), a), slots = slots_of(batch_of(a), a);
  const uintptr_t pointers = reinterpret_cast<uintptr_t>(a->workspace) | reinterpret_cast<uintptr_t>(a->q) |
                             reinterpret_cast<uintptr_t>(a->kv);
  KDTP_WANT(a->workspace_bytes >= need, "mla_tree: workspace_bytes %lld: must be at least %lld",
            (long long)a->workspace_bytes, (long long)need);
  KDTP_WANT(slots <= kSlotsMost, "mla_tree: split %lld: must be larger for max_start %lld", (long long)a->split,
            (long long)a->max_start);
  KDTP_WANT(pointers % 16 == 0, "mla_tree: workspace %p, q %p, kv %p: must be aligned to 16 bytes", a->workspace, a->q,
            a->kv);
  const bool many = !a->portable && attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= sizeof(Shared<S, kMany>);
  const int code = many ? attend<S, kMany>(a) : attend<S, kPortable>(a);
  return code ? code : merge(a);
}

template <typename T> int simt(const KdtpMlaTreeArgs* a) {
  SimtProblem<T> p{batch_of(a), static_cast<const T*>(a->q), static_cast<const T*>(a->kv), static_cast<T*>(a->out)};
  p.lora = a->lora;
  p.width = a->lora + a->rope;
  p.scale = static_cast<float>(a->scale * 1.4426950408889634);
  kdtp::Launch how;
  how.grid = dim3(a->rows, (a->heads + kSimtHeads - 1) / kSimtHeads);
  how.block = dim3(kSimtThreads);
  if (a->lora <= kSimtThreads) return kdtp::launch(simt_kernel<T, 1>, how, a->stream, p);
  if (a->lora <= 4 * kSimtThreads) return kdtp::launch(simt_kernel<T, 4>, how, a->stream, p);
  return kdtp::launch(simt_kernel<T, 8>, how, a->stream, p);
}

}  // namespace

// Bytes of workspace, or KDTP_ILLEGAL.
extern "C" int64_t kdtp_mla_tree_workspace(const KdtpMlaTreeArgs* a) {
  if (const int code = refuse_illegal(a)) return code;
  return has_tensor_cores(a) && a->rows > 0 ? workspace_of(batch_of(a), a) : 0;
}

extern "C" int kdtp_mla_tree(const KdtpMlaTreeArgs* a) {
  if (const int code = refuse_illegal(a)) return code;
  if (a->rows == 0) return 0;
  if (!has_tensor_cores(a)) {
    KDTP_DISPATCH("mla_tree", a->dtype, return simt<T>(a));
  }
  return a->lora == 512 ? tensor_cores<Shape<512, 64>>(a) : tensor_cores<Shape<64, 16>>(a);
}
