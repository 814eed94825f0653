#include "../kernels/act.cuh"

namespace {

constexpr int kWidthMost = 1 << 20;

template <typename T, int kWide> int run(const KdtpSiluMulArgs* a) {
  const int block = kdtp::kActThreads * kWide;
  kdtp::Launch how;
  how.grid = dim3(a->rows, (a->width + block - 1) / block);
  how.block = dim3(kdtp::kActThreads);
  return kdtp::launch(kdtp::silu_mul_kernel<T, kWide>, how, a->stream, static_cast<const T*>(a->x),
                      static_cast<T*>(a->out), (int)a->width);
}

}  // namespace

extern "C" int kdtp_silu_mul(const KdtpSiluMulArgs* a) {
  KDTP_WANT(a->rows >= 0 && a->rows <= INT32_MAX, "silu_mul: rows %lld: must be 0..%d", (long long)a->rows, INT32_MAX);
  KDTP_WANT(a->width >= 1 && a->width <= kWidthMost, "silu_mul: width %lld: must be 1..%d", (long long)a->width,
            kWidthMost);
  KDTP_DISPATCH("silu_mul", a->dtype, {
    if (a->rows == 0) return 0;
    const bool wide = kdtp::in_sixteens(a->width * sizeof(T), a->x, a->out);
    return wide ? run<T, 16 / sizeof(T)>(a) : run<T, 1>(a);
  })
}
