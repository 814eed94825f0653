#include "../kernels/mla_prep.cuh"

namespace {

constexpr int kWidthMost = 1 << 14;

template <typename T> int run(const KdtpMlaPrepArgs* a) {
  const kdtp::PrepShape shape = {(int)a->heads, (int)a->nope,  (int)a->rope, (int)a->lora,
                                 a->q_stride,   a->kv_stride, (float)a->eps};
  kdtp::Launch how;
  how.grid = dim3(a->rows, 2);
  how.block = dim3(kdtp::kPrepThreads);
  return kdtp::launch(kdtp::mla_prep_kernel<T>, how, a->stream, static_cast<const T*>(a->q),
                      static_cast<const T*>(a->kv_new), static_cast<const float*>(a->weight),
                      static_cast<const float*>(a->cos), static_cast<const float*>(a->sin),
                      static_cast<const int64_t*>(a->kv_rows), static_cast<T*>(a->absorbed), static_cast<T*>(a->kv),
                      shape);
}

}  // namespace

extern "C" int kdtp_mla_prep(const KdtpMlaPrepArgs* a) {
  KDTP_WANT(a->rows >= 0 && a->rows <= INT32_MAX, "mla_prep: rows %lld: must be 0..%d", (long long)a->rows, INT32_MAX);
  KDTP_WANT(a->heads >= 1 && a->heads <= 1024, "mla_prep: heads %lld: must be 1..1024", (long long)a->heads);
  KDTP_WANT(a->nope >= 0 && a->nope <= kWidthMost, "mla_prep: nope %lld: must be 0..%d", (long long)a->nope, kWidthMost);
  KDTP_WANT(a->rope >= 2 && a->rope % 2 == 0 && a->rope <= kWidthMost, "mla_prep: rope %lld: must be even, 2..%d",
            (long long)a->rope, kWidthMost);
  KDTP_WANT(a->lora >= 1 && a->lora <= kWidthMost, "mla_prep: lora %lld: must be 1..%d", (long long)a->lora, kWidthMost);
  KDTP_WANT(a->q_stride >= a->heads * (a->nope + a->rope), "mla_prep: q_stride %lld: must be at least %lld",
            (long long)a->q_stride, (long long)(a->heads * (a->nope + a->rope)));
  KDTP_WANT(a->kv_stride >= a->lora + a->rope, "mla_prep: kv_stride %lld: must be at least %lld",
            (long long)a->kv_stride, (long long)(a->lora + a->rope));
  KDTP_DISPATCH("mla_prep", a->dtype, {
    return a->rows == 0 ? 0 : run<T>(a);
  })
}
