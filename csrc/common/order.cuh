// Floats as unsigned keys of the same order, and what a warp makes of them.
#pragma once
#include <stdint.h>

namespace kdtp {

constexpr unsigned kWholeWarp = 0xffffffffu;

// Keys rise with their floats; -0 has the key of 0, and NaN the highest, as torch's max has it. No key is 0.
__device__ __forceinline__ uint32_t float_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  if (isnan(x)) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float key_float(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Keys of (value, id) that rise with the value and, among equal values, fall with the id: no two are equal.
__device__ __forceinline__ uint64_t ranked_key(float value, int id) {
  return static_cast<uint64_t>(float_key(value)) << 32 | ~static_cast<uint32_t>(id);
}

__device__ __forceinline__ float ranked_value(uint64_t key) { return key_float(static_cast<uint32_t>(key >> 32)); }

__device__ __forceinline__ int ranked_id(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

// The largest of a warp's keys, for every lane.
__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
  const uint32_t high = __reduce_max_sync(kWholeWarp, static_cast<uint32_t>(key >> 32));
  const uint32_t low = key >> 32 == high ? static_cast<uint32_t>(key) : 0;
  return static_cast<uint64_t>(high) << 32 | __reduce_max_sync(kWholeWarp, low);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, offset));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(kWholeWarp, x, offset);
  return x;
}

}  // namespace kdtp
