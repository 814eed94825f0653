#include "../kernels/norm.cuh"

namespace {

template <typename T, int kPacks, bool kWide> void launch(const KdtpRmsNormArgs* a, int threads) {
  kdtp::rms_norm_kernel<T, kPacks, kWide><<<a->rows, threads, 0, kdtp::stream_of(a->stream)>>>(
      static_cast<const T*>(a->x), static_cast<T*>(a->residual), static_cast<const float*>(a->weight),
      static_cast<T*>(a->out), a->width, a->eps);
}

// As many threads as there are packs of 16 bytes, in whole warps; more packs a thread only above the largest block.
template <typename T, bool kWide> void run(const KdtpRmsNormArgs* a) {
  const int packs = (a->width + kdtp::kNormPack<T> - 1) / kdtp::kNormPack<T>;
  if (packs <= kdtp::kNormThreadsMost) launch<T, 1, kWide>(a, (packs + 31) / 32 * 32);
  else if (packs <= 2 * kdtp::kNormThreadsMost) launch<T, 2, kWide>(a, kdtp::kNormThreadsMost);
  else launch<T, 4, kWide>(a, kdtp::kNormThreadsMost);
}

}  // namespace

extern "C" int kdtp_rms_norm(const KdtpRmsNormArgs* a) {
  KDTP_WANT(a->rows >= 0, "rms_norm: rows %lld: must be at least 0", (long long)a->rows);
  KDTP_WANT(a->width >= 1 && a->width <= kdtp::kNormWidthMost, "rms_norm: width %lld: must be 1..%d",
            (long long)a->width, kdtp::kNormWidthMost);
  KDTP_DISPATCH("rms_norm", a->dtype, {
    if (a->rows == 0) return 0;
    const bool wide = kdtp::in_sixteens(a->width * sizeof(T), a->x, a->residual, a->out);
    if (wide) run<T, true>(a);
    else run<T, false>(a);
  })
  return kdtp::launched();
}
