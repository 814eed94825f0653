#include "../kernels/embedding.cuh"

namespace {

constexpr int kWidthMost = 1 << 20;

template <typename Word> void launch(const KdtpEmbeddingArgs* a, int64_t row_bytes) {
  const int words = row_bytes / sizeof(Word);
  const dim3 grid(a->rows, (words + kdtp::kEmbeddingThreads - 1) / kdtp::kEmbeddingThreads);
  kdtp::embedding_kernel<Word><<<grid, kdtp::kEmbeddingThreads, 0, kdtp::stream_of(a->stream)>>>(
      static_cast<const int64_t*>(a->ids), static_cast<const Word*>(a->weight), static_cast<Word*>(a->out), a->vocab,
      words, a->first);
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
    if (kdtp::in_sixteens(row_bytes, a->weight, a->out)) launch<uint4>(a, row_bytes);
    else launch<T>(a, row_bytes);
  })
  return kdtp::launched();
}
