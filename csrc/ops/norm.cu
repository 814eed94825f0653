#include "../kernels/norm.cuh"

namespace {

template <typename T, int kShare> void launch(const KdtpRmsNormArgs* a) {
  kdtp::rms_norm_kernel<T, kShare><<<a->rows, kdtp::kNormThreads, 0, kdtp::stream_of(a->stream)>>>(
      static_cast<const T*>(a->x), static_cast<T*>(a->residual), static_cast<const float*>(a->weight),
      static_cast<T*>(a->out), a->width, a->eps);
}

}  // namespace

extern "C" int kdtp_rms_norm(const KdtpRmsNormArgs* a) {
  KDTP_WANT(a->rows >= 0, "rms_norm: rows %lld: must be at least 0", (long long)a->rows);
  KDTP_WANT(a->width >= 1 && a->width <= kdtp::kNormWidthMost, "rms_norm: width %lld: must be 1..%d",
            (long long)a->width, kdtp::kNormWidthMost);
  const int share = (a->width + kdtp::kNormThreads - 1) / kdtp::kNormThreads;
  KDTP_DISPATCH("rms_norm", a->dtype, {
    if (a->rows == 0) return 0;
    if (share <= 2) launch<T, 2>(a);
    else if (share <= 8) launch<T, 8>(a);
    else if (share <= 28) launch<T, 28>(a);
    else launch<T, 64>(a);
  })
  return kdtp::launched();
}
