#include "../kernels/embedding.cuh"

namespace {

constexpr int kWidthMost = 1 << 20;

template <typename Word> int run(const KdtpEmbeddingArgs* a, int64_t row_bytes) {
  const int words = row_bytes / sizeof(Word);
  kdtp::Launch how;
  how.grid = dim3(a->rows, (words + kdtp::kEmbeddingThreads - 1) / kdtp::kEmbeddingThreads);
  how.block = dim3(kdtp::kEmbeddingThreads);
  return kdtp::launch(kdtp::embedding_kernel<Word>, how, a->stream, static_cast<const int64_t*>(a->ids),
                      static_cast<const Word*>(a->weight), static_cast<Word*>(a->out), a->vocab, words, a->first);
}

}  // namespace

extern "C" int kdtp_embedding(const KdtpEmbeddingArgs* a) {
  KDTP_WANT(a->rows >= 0 && a->rows <= INT32_MAX, "embedding: rows %lld: must be 0..%d", (long long)a->rows, INT32_MAX);
  KDTP_WANT(a->vocab >= 0 && a->vocab <= INT32_MAX, "embedding: vocab %lld: must be 0..%d", (long long)a->vocab,
            INT32_MAX);
  KDTP_WANT(a->width >= 1 && a->width <= kWidthMost, "embedding: width %lld: must be 1..%d", (long long)a->width,
            kWidthMost);
  KDTP_DISPATCH("embedding", a->dtype, {
    if (a->rows == 0) return 0;
    const int64_t row_bytes = a->width * sizeof(T);
    return kdtp::in_sixteens(row_bytes, a->weight, a->out) ? run<uint4>(a, row_bytes) : run<T>(a, row_bytes);
  })
}
