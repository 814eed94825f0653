#include <algorithm>

#include "../kernels/moe.cuh"
#include "../kernels/moe_mma.cuh"
#include "../kernels/moe_plain.cuh"
#include "../kernels/moe_repack.cuh"

namespace {

using kdtp::Launch;
using kdtp::Moe;

constexpr int64_t kPairsMost = 1 << 18, kRowsMost = 65535;

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Whether the tensor cores take it; a matter of the matrices, not of the call.
bool on_tensor_cores(const KdtpMoeArgs* a) {
  return a->dtype == KDTP_BF16 && a->hidden % kdtp::kBlock == 0 && a->inter % kdtp::kBlock == 0;
}

// Pairs of an item: one tile of 8 rows while experts have few, two such when they have many.
int tile_of(const KdtpMoeArgs* a) { return on_tensor_cores(a) && a->rows * a->topk > 4 * a->experts ? 16 : 8; }

// A single row's pairs: a list of items would cost more time than two pairs of the same expert.
bool each_pair_alone(const KdtpMoeArgs* a) { return on_tensor_cores(a) && a->rows == 1; }

// The kernels' view of a call; `end` is set to the bytes of workspace that it takes.
Moe view(const KdtpMoeArgs* a, int64_t* end) {
  Moe p = {};
  p.x = a->x, p.ids = static_cast<const int*>(a->ids), p.weights = static_cast<const float*>(a->weights);
  p.w_gate_up = a->w_gate_up, p.w_down = a->w_down, p.s_gate_up = a->s_gate_up, p.s_down = a->s_down;
  p.add = a->add, p.out = a->out;
  p.rows = a->rows, p.hidden = a->hidden, p.inter = a->inter, p.experts = a->experts, p.topk = a->topk;
  p.tile = tile_of(a);
  const int64_t pairs = a->rows * a->topk;
  // An expert's last item may be short: no more than one such for each expert that is hit.
  p.items_most = each_pair_alone(a) ? pairs : std::min(pairs, a->experts + pairs / p.tile);
  const int64_t size = a->dtype == KDTP_F32 ? 4 : 2;
  char* base = static_cast<char*>(a->workspace);
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    char* here = base + at;
    at += aligned(bytes);
    return here;
  };
  int* const count = reinterpret_cast<int*>(take(sizeof(int)));
  p.count = each_pair_alone(a) ? nullptr : count;
  p.items = reinterpret_cast<int*>(take(static_cast<int64_t>(p.items_most) * (kdtp::kItemHead + p.tile) * sizeof(int)));
  p.inner = take(pairs * a->inter * size);
  p.parts = reinterpret_cast<float*>(take(pairs * a->hidden * sizeof(float)));
  *end = at;
  return p;
}

int check(const KdtpMoeArgs* a) {
  KDTP_WANT(a->topk >= 1 && a->topk <= kdtp::kMoeTopkMost, "moe: topk %lld: must be 1..%d", (long long)a->topk,
            kdtp::kMoeTopkMost);
  const int64_t most = std::min(kRowsMost, kPairsMost / a->topk);
  KDTP_WANT(a->rows >= 0 && a->rows <= most, "moe: rows %lld: must be 0..%lld with topk %lld", (long long)a->rows,
            (long long)most, (long long)a->topk);
  KDTP_WANT(a->hidden >= 1 && a->hidden <= 1 << 16, "moe: hidden %lld: must be 1..%d", (long long)a->hidden, 1 << 16);
  KDTP_WANT(a->inter >= 1 && a->inter <= 1 << 16, "moe: inter %lld: must be 1..%d", (long long)a->inter, 1 << 16);
  KDTP_WANT(a->experts >= 1 && a->experts <= kdtp::kMoeExpertsMost, "moe: experts %lld: must be 1..%d",
            (long long)a->experts, kdtp::kMoeExpertsMost);
  KDTP_WANT(a->dtype == KDTP_F32 || a->dtype == KDTP_BF16, "moe: dtype %lld: must be 0 (f32) or 1 (bf16)",
            (long long)a->dtype);
  KDTP_WANT(a->format == KDTP_DENSE || a->format == KDTP_INT4, "moe: format %lld: must be 0 (dense) or 1 (INT4)",
            (long long)a->format);
  if (a->format == KDTP_DENSE) return 0;
  KDTP_WANT(a->dtype == KDTP_BF16, "moe: dtype %lld: must be 1 (bf16) for INT4 experts", (long long)a->dtype);
  KDTP_WANT(a->hidden % kdtp::kInt4Ins == 0, "moe: hidden %lld: must be a multiple of %d for INT4 experts",
            (long long)a->hidden, kdtp::kInt4Ins);
  KDTP_WANT(a->inter % kdtp::kInt4Ins == 0, "moe: inter %lld: must be a multiple of %d for INT4 experts",
            (long long)a->inter, kdtp::kInt4Ins);
  return 0;
}

int check_memory(const KdtpMoeArgs* a, int64_t bytes) {
  KDTP_WANT(a->workspace_bytes >= bytes, "moe: workspace_bytes %lld: must be at least %lld",
            (long long)a->workspace_bytes, (long long)bytes);
  const auto of = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  KDTP_WANT(of(a->workspace) % 16 == 0, "moe: workspace %p: must be aligned to 16 bytes", a->workspace);
  if (!on_tensor_cores(a)) return 0;
  KDTP_WANT((of(a->x) | of(a->w_gate_up) | of(a->w_down)) % 16 == 0,
            "moe: x %p, w_gate_up %p, w_down %p: must be aligned to 16 bytes", a->x, a->w_gate_up, a->w_down);
  const bool scales = a->s_gate_up && a->s_down && (of(a->s_gate_up) | of(a->s_down)) % 8 == 0;
  KDTP_WANT(a->format == KDTP_DENSE || scales,
            "moe: s_gate_up %p, s_down %p: must be given for INT4 experts, aligned to 8 bytes", a->s_gate_up, a->s_down);
  return 0;
}

template <typename T> int run_plain(const Moe& p, void* stream) {
  const unsigned items = p.items_most;
  Launch gate_up, down;
  gate_up.grid = dim3((p.inter + 1) / 2, items);
  gate_up.block = dim3(kdtp::dot_threads(p.hidden));
  down.grid = dim3((p.hidden + kdtp::kDotOuts - 1) / kdtp::kDotOuts, items);
  down.block = dim3(kdtp::dot_threads(p.inter));
  if (const int code = kdtp::launch(kdtp::moe_gate_up_plain_kernel<T>, gate_up, stream, p)) return code;
  return kdtp::launch(kdtp::moe_down_plain_kernel<T>, down, stream, p);
}

int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// The blocks that the device holds at once, two on each multiprocessor, or fewer if there is less to do.
unsigned blocks_for(int64_t jobs) { return static_cast<unsigned>(std::min<int64_t>(jobs, 2 * multiprocessors())); }

template <class Weights, int kTiles, int kSets> int run_tiles(const Moe& p, void* stream) {
  const int64_t items = p.items_most;
  Launch gate_up, down;
  gate_up.grid = dim3(blocks_for(items * (p.inter / 16)));
  down.grid = dim3(blocks_for((items * (p.hidden / 32) + kdtp::kMoeWarps - 1) / kdtp::kMoeWarps));
  gate_up.block = dim3(kdtp::kMoeThreads * 2 / kSets);
  down.block = dim3(kdtp::kMoeThreads);
  gate_up.shared = kdtp::gate_up_shared<kTiles>();
  if (const int code = kdtp::launch(kdtp::moe_gate_up_kernel<Weights, kTiles, kSets>, gate_up, stream, p)) return code;
  return kdtp::launch(kdtp::moe_down_kernel<Weights, kTiles>, down, stream, p);
}

template <class Weights> int run_tensor_cores(const Moe& p, void* stream) {
  const int64_t jobs = static_cast<int64_t>(p.items_most) * (p.inter / 16);  // of gate and up
  if (p.tile == 16) return run_tiles<Weights, 2, 2>(p, stream);
  return jobs <= multiprocessors() ? run_tiles<Weights, 1, 1>(p, stream) : run_tiles<Weights, 1, 2>(p, stream);
}

template <typename T> int run_sum(const Moe& p, void* stream) {
  Launch how;
  how.grid = dim3((p.hidden + kdtp::kSumThreads - 1) / kdtp::kSumThreads, p.rows);
  how.block = dim3(kdtp::kSumThreads);
  return kdtp::launch(kdtp::moe_sum_kernel<T>, how, stream, p);
}

int run_experts(const KdtpMoeArgs* a, const Moe& p) {
  if (a->format == KDTP_INT4) return run_tensor_cores<kdtp::Int4Weights>(p, a->stream);
  if (on_tensor_cores(a)) return run_tensor_cores<kdtp::DenseWeights>(p, a->stream);
  return a->dtype == KDTP_F32 ? run_plain<float>(p, a->stream) : run_plain<__nv_bfloat16>(p, a->stream);
}

int wait_for_add(const KdtpMoeArgs* a) {
  if (a->add_ready == nullptr) return 0;
  const auto ready = static_cast<cudaEvent_t>(const_cast<void*>(a->add_ready));
  return static_cast<int>(cudaStreamWaitEvent(static_cast<cudaStream_t>(a->stream), ready));
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
  if (const int code = check_memory(a, bytes)) return code;
  if (a->rows == 0) return 0;
  if (p.count != nullptr) {
    Launch assign;
    assign.grid = dim3(1);
    assign.block = dim3(1024);
    if (const int code = kdtp::launch(kdtp::moe_assign_kernel, assign, a->stream, p)) return code;
  }
  // What makes `add` would take the experts' places on the device, and some of their blocks would start late.
  if (const int code = wait_for_add(a)) return code;
  if (const int code = run_experts(a, p)) return code;
  return a->dtype == KDTP_F32 ? run_sum<float>(p, a->stream) : run_sum<__nv_bfloat16>(p, a->stream);
}

extern "C" int kdtp_moe_repack(const KdtpMoeRepackArgs* a) {
  KDTP_WANT(a->experts >= 0 && a->experts <= kdtp::kMoeExpertsMost, "moe_repack: experts %lld: must be 0..%d",
            (long long)a->experts, kdtp::kMoeExpertsMost);
  KDTP_WANT(a->out >= kdtp::kInt4Outs && a->out <= 1 << 17 && a->out % kdtp::kInt4Outs == 0,
            "moe_repack: out %lld: must be a multiple of %d, at most %d", (long long)a->out, kdtp::kInt4Outs, 1 << 17);
  KDTP_WANT(a->in >= kdtp::kInt4Ins && a->in <= 1 << 16 && a->in % kdtp::kInt4Ins == 0,
            "moe_repack: in %lld: must be a multiple of %d, at most %d", (long long)a->in, kdtp::kInt4Ins, 1 << 16);
  const int64_t tiles = a->experts * (a->out / kdtp::kInt4Outs) * (a->in / kdtp::kInt4Ins);
  KDTP_WANT(tiles <= 1ll << 33, "moe_repack: %lld weights: must be at most %lld", (long long)(tiles * 1024), 1ll << 43);
  if (tiles == 0) return 0;
  Launch how;
  how.grid = dim3((tiles * 32 + 255) / 256);
  how.block = dim3(256);
  return kdtp::launch(kdtp::moe_repack_kernel, how, a->stream, static_cast<const uint32_t*>(a->packed),
                      static_cast<const uint16_t*>(a->scales), static_cast<uint4*>(a->packed_out),
                      static_cast<ushort4*>(a->scales_out), tiles, (int)a->out, (int)a->in);
}
