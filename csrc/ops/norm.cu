#include "../kernels/norm.cuh"

namespace {

template <typename T, int kPacks, bool kWide> int run_packs(const KdtpRmsNormArgs* a, int threads) {
  kdtp::Launch how;
  how.grid = dim3(a->rows);
  how.block = dim3(threads);
  return kdtp::launch(kdtp::rms_norm_kernel<T, kPacks, kWide>, how, a->stream, static_cast<const T*>(a->x), a->x_stride,
                      static_cast<T*>(a->residual), static_cast<const float*>(a->weight), static_cast<T*>(a->out),
                      (int)a->width, (float)a->eps);
}

// As many threads as there are packs of 16 bytes, in whole warps; more packs a thread only above the largest block.
template <typename T, bool kWide> int run(const KdtpRmsNormArgs* a) {
  const int packs = (a->width + kdtp::kNormPack<T> - 1) / kdtp::kNormPack<T>;
  if (packs <= kdtp::kNormThreadsMost) return run_packs<T, 1, kWide>(a, (packs + 31) / 32 * 32);
  if (packs <= 2 * kdtp::kNormThreadsMost) return run_packs<T, 2, kWide>(a, kdtp::kNormThreadsMost);
  return run_packs<T, 4, kWide>(a, kdtp::kNormThreadsMost);
}

}  // namespace

extern "C" int kdtp_rms_norm(const KdtpRmsNormArgs* a) {
  KDTP_WANT(a->rows >= 0, "rms_norm: rows %lld: must be at least 0", (long long)a->rows);
  KDTP_WANT(a->width >= 1 && a->width <= kdtp::kNormWidthMost, "rms_norm: width %lld: must be 1..%d",
            (long long)a->width, kdtp::kNormWidthMost);
  KDTP_WANT(a->x_stride >= a->width, "rms_norm: x_stride %lld: must be at least width, %lld", (long long)a->x_stride,
            (long long)a->width);
  KDTP_DISPATCH("rms_norm", a->dtype, {
    if (a->rows == 0) return 0;
    const bool wide = kdtp::in_sixteens((a->width | a->x_stride) * sizeof(T), a->x, a->residual, a->out);
    return wide ? run<T, true>(a) : run<T, false>(a);
  })
}
