#include "../kernels/moe.cuh"

#include "../kernels/moe_plain.cuh"
#include "../kernels/moe_repack.cuh"

namespace {

using kdtp::Launch;
using kdtp::Moe;

constexpr int64_t kPairsMost = 1 << 18;

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// The kernels' view of a call; `end` is set to the bytes of workspace that it takes.
Moe view(const KdtpMoeArgs* a, int64_t* end) {
  Moe p = {};
  p.x = a->x, p.ids = static_cast<const int*>(a->ids), p.weights = static_cast<const float*>(a->weights);
  p.w_gate_up = a->w_gate_up, p.w_down = a->w_down, p.s_gate_up = a->s_gate_up, p.s_down = a->s_down, p.out = a->out;
  p.rows = a->rows, p.hidden = a->hidden, p.inter = a->inter, p.experts = a->experts, p.topk = a->topk;
  p.tile = kdtp::kDotRows;
  const int64_t pairs = a->rows * a->topk, size = a->dtype == KDTP_F32 ? 4 : 2;
  char* base = static_cast<char*>(a->workspace);
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    char* here = base + at;
    at += aligned(bytes);
    return here;
  };
  p.count = reinterpret_cast<int*>(take(sizeof(int)));
  p.items = reinterpret_cast<int*>(take(static_cast<int64_t>(items_most(p)) * (kdtp::kItemHead + p.tile) * sizeof(int)));
  p.inner = take(pairs * a->inter * size);
  p.parts = reinterpret_cast<float*>(take(pairs * a->hidden * sizeof(float)));
  *end = at;
  return p;
}

int check(const KdtpMoeArgs* a) {
  KDTP_WANT(a->topk >= 1 && a->topk <= 1024, "moe: topk %lld: must be 1..1024", (long long)a->topk);
  KDTP_WANT(a->rows >= 0 && a->rows <= kPairsMost / a->topk, "moe: rows %lld: must be 0..%lld with topk %lld",
            (long long)a->rows, (long long)(kPairsMost / a->topk), (long long)a->topk);
  KDTP_WANT(a->hidden >= 1 && a->hidden <= 1 << 16, "moe: hidden %lld: must be 1..%d", (long long)a->hidden, 1 << 16);
  KDTP_WANT(a->inter >= 1 && a->inter <= 1 << 16, "moe: inter %lld: must be 1..%d", (long long)a->inter, 1 << 16);
  KDTP_WANT(a->experts >= 1 && a->experts <= kdtp::kMoeExpertsMost, "moe: experts %lld: must be 1..%d",
            (long long)a->experts, kdtp::kMoeExpertsMost);
  KDTP_WANT(a->dtype == KDTP_F32 || a->dtype == KDTP_BF16, "moe: dtype %lld: must be 0 (f32) or 1 (bf16)",
            (long long)a->dtype);
  KDTP_WANT(a->format == KDTP_DENSE, "moe: format %lld: must be 0 (dense)", (long long)a->format);
  return 0;
}

template <typename T> int run_plain(const Moe& p, void* stream) {
  const unsigned items = items_most(p);
  Launch gate_up, down;
  gate_up.grid = dim3((p.inter + 1) / 2, items);
  gate_up.block = dim3(kdtp::dot_threads(p.hidden));
  down.grid = dim3((p.hidden + kdtp::kDotOuts - 1) / kdtp::kDotOuts, items);
  down.block = dim3(kdtp::dot_threads(p.inter));
  if (const int code = kdtp::launch(kdtp::moe_gate_up_plain_kernel<T>, gate_up, stream, p)) return code;
  return kdtp::launch(kdtp::moe_down_plain_kernel<T>, down, stream, p);
}

template <typename T> int run_sum(const Moe& p, void* stream) {
  Launch how;
  const int width = kdtp::kSumThreads * kdtp::kSumColumns;
  how.grid = dim3((p.hidden + width - 1) / width, p.rows);
  how.block = dim3(kdtp::kSumThreads);
  how.overlap = true;
  return kdtp::launch(kdtp::moe_sum_kernel<T>, how, stream, p);
}

template <typename T> int run(const Moe& p, void* stream) {
  Launch assign;
  assign.grid = dim3(1);
  assign.block = dim3(1024);
  if (const int code = kdtp::launch(kdtp::moe_assign_kernel, assign, stream, p)) return code;
  if (const int code = run_plain<T>(p, stream)) return code;
  return run_sum<T>(p, stream);
}

}  // namespace

extern "C" int64_t kdtp_moe_workspace(const KdtpMoeArgs* a) {
  if (const int code = check(a)) return code;
  int64_t bytes;
  view(a, &bytes);
  return bytes;
}

extern "C" int kdtp_moe(const KdtpMoeArgs* a) {
  if (const int code = check(a)) return code;
  int64_t bytes;
  const Moe p = view(a, &bytes);
  KDTP_WANT(a->workspace_bytes >= bytes, "moe: workspace_bytes %lld: must be at least %lld",
            (long long)a->workspace_bytes, (long long)bytes);
  KDTP_WANT(reinterpret_cast<uintptr_t>(a->workspace) % 16 == 0, "moe: workspace %p: must be aligned to 16 bytes",
            a->workspace);
  if (a->rows == 0) return 0;
  return a->dtype == KDTP_F32 ? run<float>(p, a->stream) : run<__nv_bfloat16>(p, a->stream);
}

extern "C" int kdtp_moe_repack(const KdtpMoeRepackArgs* a) {
  KDTP_WANT(a->experts >= 0 && a->experts <= kdtp::kMoeExpertsMost, "moe_repack: experts %lld: must be 0..%d",
            (long long)a->experts, kdtp::kMoeExpertsMost);
  KDTP_WANT(a->out >= kdtp::kInt4Outs && a->out <= 1 << 17 && a->out % kdtp::kInt4Outs == 0,
            "moe_repack: out %lld: must be a multiple of %d, at most %d", (long long)a->out, kdtp::kInt4Outs, 1 << 17);
  KDTP_WANT(a->in >= kdtp::kInt4Ins && a->in <= 1 << 16 && a->in % kdtp::kInt4Ins == 0,
            "moe_repack: in %lld: must be a multiple of %d, at most %d", (long long)a->in, kdtp::kInt4Ins, 1 << 16);
  const int64_t tiles = a->experts * (a->out / kdtp::kInt4Outs) * (a->in / kdtp::kInt4Ins);
  KDTP_WANT(tiles <= 1ll << 32, "moe_repack: %lld weights: must be at most %lld", (long long)(tiles * 1024), 1ll << 42);
  if (tiles == 0) return 0;
  kdtp::moe_repack_kernel<<<(tiles * 32 + 255) / 256, 256, 0, kdtp::stream_of(a->stream)>>>(
      static_cast<const uint32_t*>(a->packed), static_cast<const uint16_t*>(a->scales),
      static_cast<uint4*>(a->packed_out), static_cast<ushort4*>(a->scales_out), tiles, a->out, a->in);
  return kdtp::launched();
}
