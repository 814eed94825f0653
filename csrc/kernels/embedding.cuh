// Rows of a vocabulary shard.
#pragma once
#include "../common/launch.cuh"
#include "../common/kdtp.cuh"
#include "../common/pack.cuh"

namespace kdtp {

constexpr int kEmbeddingThreads = 128;

// Grid: rows, words of a row. A row is copied in words of any type, whatever its elements are.
template <typename Word>
__global__ void __launch_bounds__(kEmbeddingThreads)
    embedding_kernel(const int64_t* ids, const Word* __restrict__ weight, Word* out, int64_t vocab, int words,
                     int64_t first) {
  follow_kernel_before();
  const int word = blockIdx.y * kEmbeddingThreads + threadIdx.x;
  if (word >= words) return;
  // Ids below the first wrap around, to far above any vocabulary.
  const uint64_t local = static_cast<uint64_t>(ids[blockIdx.x]) - static_cast<uint64_t>(first);
  Word value{};
  if (local < static_cast<uint64_t>(vocab)) value = weight[local * words + word];
  out[static_cast<int64_t>(blockIdx.x) * words + word] = value;
}

}  // namespace kdtp
