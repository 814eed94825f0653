#include "../common/pack.cuh"
#include "../kernels/topk.cuh"

namespace {

constexpr int kRowsMost = INT32_MAX / kdtp::kRowBlocks;
constexpr int kArgmaxVocabMost = 1 << 30;
constexpr int kTopkVocabMost = 1 << 18;

// What both entries refuse alike.
int check(const char* op, int64_t rows, int64_t vocab, int64_t stride, int vocab_most) {
  KDTP_WANT(rows >= 0 && rows <= kRowsMost, "%s: rows %lld: must be 0..%d", op, (long long)rows, kRowsMost);
  KDTP_WANT(vocab >= 1 && vocab <= vocab_most, "%s: vocab %lld: must be 1..%d", op, (long long)vocab, vocab_most);
  KDTP_WANT(stride >= vocab, "%s: stride %lld: must be at least vocab, %lld", op, (long long)stride, (long long)vocab);
  return 0;
}

kdtp::Rows rows_of(const void* logits, int64_t vocab, int64_t stride) {
  return {static_cast<const float*>(logits), stride, (int)vocab, kdtp::in_sixteens(stride * sizeof(float), logits)};
}

kdtp::Launch clusters(int64_t rows, int threads, size_t shared) {
  kdtp::Launch how;
  how.grid = dim3(rows * kdtp::kRowBlocks);
  how.block = dim3(threads);
  how.shared = shared;
  how.cluster = kdtp::kRowBlocks;
  return how;
}

template <int kQuads> int run_topk(const KdtpTopkArgs* a) {
  const size_t candidates = a->k * 2 * kQuads * 4 * sizeof(uint64_t);
  static_assert(kdtp::kTopkMost * 2 * kQuads * 4 * sizeof(uint64_t) + sizeof(kdtp::TopkShared) <= kdtp::kSharedMost, "");
  return kdtp::launch(kdtp::topk_kernel<kQuads>, clusters(a->rows, kdtp::kTopkThreads, candidates), a->stream,
                      rows_of(a->logits, a->vocab, a->stride), (int)a->k, static_cast<float*>(a->lp),
                      static_cast<int64_t*>(a->ids));
}

}  // namespace

extern "C" int kdtp_argmax(const KdtpArgmaxArgs* a) {
  if (const int code = check("argmax", a->rows, a->vocab, a->stride, kArgmaxVocabMost)) return code;
  if (a->rows == 0) return 0;
  return kdtp::launch(kdtp::argmax_kernel, clusters(a->rows, kdtp::kArgmaxThreads, 0), a->stream,
                      rows_of(a->logits, a->vocab, a->stride), a->vocab_start, static_cast<float*>(a->values),
                      static_cast<int64_t*>(a->ids));
}

extern "C" int kdtp_topk(const KdtpTopkArgs* a) {
  if (const int code = check("topk", a->rows, a->vocab, a->stride, kTopkVocabMost)) return code;
  KDTP_WANT(a->k >= 1 && a->k <= kdtp::kTopkMost && a->k <= a->vocab, "topk: k %lld: must be 1..%lld", (long long)a->k,
            (long long)(a->vocab < kdtp::kTopkMost ? a->vocab : kdtp::kTopkMost));
  if (a->rows == 0) return 0;
  constexpr int64_t kQuad = 4 * kdtp::kTopkThreads * kdtp::kRowBlocks;  // logits of a row, if each thread has one quad
  if (a->vocab <= 2 * kQuad) return run_topk<2>(a);
  if (a->vocab <= 10 * kQuad) return run_topk<10>(a);
  static_assert(kTopkVocabMost <= 16 * kQuad, "");
  return run_topk<16>(a);
}
