#include "../kernels/act.cuh"

namespace {

constexpr int kWidthMost = 1 << 20;

template <typename T, int kWide> void launch(const KdtpSiluMulArgs* a) {
  const int block = kdtp::kActThreads * kWide;
  const dim3 grid(a->rows, (a->width + block - 1) / block);
  kdtp::silu_mul_kernel<T, kWide><<<grid, kdtp::kActThreads, 0, kdtp::stream_of(a->stream)>>>(
      static_cast<const T*>(a->x), static_cast<T*>(a->out), a->width);
}

}  // namespace

extern "C" int kdtp_silu_mul(const KdtpSiluMulArgs* a) {
  KDTP_WANT(a->rows >= 0 && a->rows <= INT32_MAX, "silu_mul: rows %lld: must be 0..%d", (long long)a->rows, INT32_MAX);
  KDTP_WANT(a->width >= 1 && a->width <= kWidthMost, "silu_mul: width %lld: must be 1..%d", (long long)a->width,
            kWidthMost);
  KDTP_DISPATCH("silu_mul", a->dtype, {
    if (a->rows == 0) return 0;
    if (kdtp::in_sixteens(a->width * sizeof(T), a->x, a->out)) launch<T, 16 / sizeof(T)>(a);
    else launch<T, 1>(a);
  })
  return kdtp::launched();
}
