#include "../kernels/gqa_prep.cuh"

namespace {

constexpr int kHeadsMost = 1024;

template <typename T> int run(const KdtpGqaPrepArgs* a) {
  const kdtp::GqaShape shape = {(int)a->heads, (int)a->kv_heads, (int)a->width, (float)a->eps};
  kdtp::Launch how;
  how.grid = dim3(a->rows, (a->heads + 2 * a->kv_heads + kdtp::kGqaWarps - 1) / kdtp::kGqaWarps);
  how.block = dim3(32 * kdtp::kGqaWarps);
  return kdtp::launch(kdtp::gqa_prep_kernel<T>, how, a->stream, static_cast<const T*>(a->q),
                      static_cast<const T*>(a->kv), static_cast<const float*>(a->q_weight),
                      static_cast<const float*>(a->k_weight), static_cast<const float*>(a->cos),
                      static_cast<const float*>(a->sin), static_cast<T*>(a->q_out), static_cast<T*>(a->kv_out), shape);
}

}  // namespace

extern "C" int kdtp_gqa_prep(const KdtpGqaPrepArgs* a) {
  KDTP_WANT(a->rows >= 0 && a->rows <= INT32_MAX, "gqa_prep: rows %lld: must be 0..%d", (long long)a->rows, INT32_MAX);
  KDTP_WANT(a->heads >= 0 && a->heads <= kHeadsMost, "gqa_prep: heads %lld: must be 0..%d", (long long)a->heads,
            kHeadsMost);
  KDTP_WANT(a->kv_heads >= 1 && a->kv_heads <= kHeadsMost, "gqa_prep: kv_heads %lld: must be 1..%d",
            (long long)a->kv_heads, kHeadsMost);
  KDTP_WANT(a->width >= 2 && a->width % 2 == 0 && a->width <= kdtp::kGqaWidthMost,
            "gqa_prep: width %lld: must be even, 2..%d", (long long)a->width, kdtp::kGqaWidthMost);
  KDTP_DISPATCH("gqa_prep", a->dtype, {
    return a->rows == 0 ? 0 : run<T>(a);
  })
}
