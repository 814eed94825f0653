#include "../kernels/convolve.cuh"

namespace {

constexpr int kWidthMost = 1 << 20, kTapsMost = 1024;

template <typename T, int kWide> int run(const KdtpConvolveArgs* a) {
  const kdtp::ConvolveShape shape = {(int)a->width, (int)a->taps, (int)a->groups, (int)a->side, (int)a->n};
  const int block = kdtp::kConvolveThreads * kWide;
  kdtp::Launch how;
  how.grid = dim3(a->rows, (a->width + block - 1) / block);
  how.block = dim3(kdtp::kConvolveThreads);
  return kdtp::launch(kdtp::convolve_kernel<T, kWide>, how, a->stream, static_cast<const T*>(a->x),
                      static_cast<const T*>(a->dynamic), static_cast<const T*>(a->base), static_cast<T*>(a->out), shape);
}

}  // namespace

extern "C" int kdtp_convolve(const KdtpConvolveArgs* a) {
  KDTP_WANT(a->n >= 1 && a->n <= INT32_MAX, "convolve: n %lld: must be 1..%d", (long long)a->n, INT32_MAX);
  KDTP_WANT(a->rows >= 0 && a->rows <= INT32_MAX && a->rows % a->n == 0,
            "convolve: rows %lld: must be 0..%d, a multiple of n, %lld", (long long)a->rows, INT32_MAX, (long long)a->n);
  KDTP_WANT(a->width >= 1 && a->width <= kWidthMost, "convolve: width %lld: must be 1..%d", (long long)a->width,
            kWidthMost);
  KDTP_WANT(a->taps >= 1 && a->taps <= kTapsMost, "convolve: taps %lld: must be 1..%d", (long long)a->taps, kTapsMost);
  KDTP_WANT(a->groups >= 1 && a->width % a->groups == 0, "convolve: groups %lld: must be a divisor of width, %lld",
            (long long)a->groups, (long long)a->width);
  KDTP_WANT(a->side == 0 || a->side == 1, "convolve: side %lld: must be 0 or 1", (long long)a->side);
  KDTP_DISPATCH("convolve", a->dtype, {
    if (a->rows == 0) return 0;
    const bool wide = kdtp::in_sixteens(a->width * sizeof(T), a->x, a->base, a->out);
    return wide ? run<T, 16 / sizeof(T)>(a) : run<T, 1>(a);
  })
}
