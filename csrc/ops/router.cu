#include "../kernels/router.cuh"

namespace {

constexpr int kExpertsMost = 1024;

template <int kEach> int run(const KdtpRouterArgs* a) {
  const kdtp::Routing routing = {(int)a->experts,    (int)a->topk, (int)a->groups,
                                 (int)a->topk_group, a->scoring == KDTP_SIGMOID, a->norm == 1, (float)a->scale};
  kdtp::Launch how;
  how.grid = dim3(a->rows);
  how.block = dim3(32);
  how.shared = ((a->groups > 1 ? a->experts + a->groups : 0) + a->experts) * sizeof(uint32_t);
  return kdtp::launch(kdtp::router_kernel<kEach>, how, a->stream, static_cast<const float*>(a->logits),
                      static_cast<const float*>(a->bias), static_cast<const int64_t*>(a->kv_rows),
                      static_cast<int*>(a->ids), static_cast<float*>(a->weights), routing);
}

int check(const KdtpRouterArgs* a) {
  KDTP_WANT(a->rows >= 0 && a->rows <= INT32_MAX, "router: rows %lld: must be 0..%d", (long long)a->rows, INT32_MAX);
  KDTP_WANT(a->experts >= 1 && a->experts <= kExpertsMost, "router: experts %lld: must be 1..%d", (long long)a->experts,
            kExpertsMost);
  KDTP_WANT(a->topk >= 1 && a->topk <= kdtp::kRouterMost, "router: topk %lld: must be 1..%d", (long long)a->topk,
            kdtp::kRouterMost);
  KDTP_WANT(a->groups >= 1 && a->experts % a->groups == 0, "router: groups %lld: must divide %lld experts",
            (long long)a->groups, (long long)a->experts);
  const int64_t size = a->experts / a->groups;
  KDTP_WANT(a->bias == nullptr || a->groups == 1 || size >= 2, "router: groups %lld: must have at least 2 experts each",
            (long long)a->groups);
  KDTP_WANT(a->topk_group >= 1 && a->topk_group <= a->groups, "router: topk_group %lld: must be 1..%lld",
            (long long)a->topk_group, (long long)a->groups);
  KDTP_WANT(a->topk <= a->topk_group * size, "router: topk %lld: must be at most the %lld experts of topk_group groups",
            (long long)a->topk, (long long)(a->topk_group * size));
  KDTP_WANT(a->scoring == KDTP_SOFTMAX || a->scoring == KDTP_SIGMOID,
            "router: scoring %lld: must be 0 (softmax) or 1 (sigmoid)", (long long)a->scoring);
  KDTP_WANT(a->bias == nullptr || a->scoring == KDTP_SIGMOID, "router: bias: must be null with softmax scoring");
  KDTP_WANT(a->norm == 0 || a->norm == 1, "router: norm %lld: must be 0 or 1", (long long)a->norm);
  return 0;
}

}  // namespace

extern "C" int kdtp_router(const KdtpRouterArgs* a) {
  if (const int code = check(a)) return code;
  if (a->rows == 0) return 0;
  if (a->experts <= 64) return run<2>(a);
  if (a->experts <= 256) return run<8>(a);
  if (a->experts <= 384) return run<12>(a);
  static_assert(kExpertsMost <= 32 * 32, "");
  return run<32>(a);
}
