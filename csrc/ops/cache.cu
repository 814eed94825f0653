#include "../kernels/cache.cuh"

namespace {

constexpr int kLayersMost = 65535;  // of a grid's second dimension
constexpr int kWidthMost = 1 << 20;

template <typename Word> void launch(const KdtpKvMoveArgs* a, int64_t row_bytes) {
  const int words = row_bytes / sizeof(Word);
  kdtp::kv_move_kernel<Word><<<dim3(a->groups, a->layers), kdtp::kMoveThreads, 0, kdtp::stream_of(a->stream)>>>(
      static_cast<Word*>(a->kv), static_cast<const int64_t*>(a->source), static_cast<const int64_t*>(a->target),
      static_cast<const int*>(a->offsets), a->layer_rows * words, words);
}

}  // namespace

extern "C" int kdtp_kv_move(const KdtpKvMoveArgs* a) {
  KDTP_WANT(a->layers >= 0 && a->layers <= kLayersMost, "kv_move: layers %lld: must be 0..%d", (long long)a->layers,
            kLayersMost);
  KDTP_WANT(a->layer_rows >= 0, "kv_move: layer_rows %lld: must be at least 0", (long long)a->layer_rows);
  KDTP_WANT(a->width >= 1 && a->width <= kWidthMost, "kv_move: width %lld: must be 1..%d", (long long)a->width,
            kWidthMost);
  KDTP_WANT(a->groups >= 0 && a->groups <= INT32_MAX, "kv_move: groups %lld: must be 0..%d", (long long)a->groups,
            INT32_MAX);
  KDTP_DISPATCH("kv_move", a->dtype, {
    const int64_t row_bytes = a->width * sizeof(T);
    KDTP_WANT(row_bytes % 4 == 0, "kv_move: width %lld: a row must be a multiple of 4 bytes", (long long)a->width);
    if (a->layers == 0 || a->groups == 0) return 0;
    if (kdtp::in_sixteens(row_bytes, a->kv)) launch<uint4>(a, row_bytes);
    else launch<uint32_t>(a, row_bytes);
  })
  return kdtp::launched();
}
