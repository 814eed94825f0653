// Products with weights that are streamed from memory to registers once, without a stop in shared memory.
//
// The weights are the A side of mma.m16n8k16 (16 outputs), activations the B side (8 rows), for any number of rows: what
// a row gives cannot depend on its neighbours. A lane has outputs g = lane / 4 and g + 8, and row g; t = lane % 4. The
// order of inputs within a block of 32 is free as long as both sides agree: lane t takes inputs 8 t .. 8 t + 7, 16 bytes
// in a row on either side, as its share of two steps of 16 inputs.
#pragma once
#include <cuda_bf16.h>

#include "../common/mma.cuh"

namespace kdtp {

constexpr int kBlock = 32;  // inputs

// 16 bytes that will not be read again soon: they bypass the L1, and bring the rest of their 256 bytes into the L2.
// Zeros if not `present`; `from` is then not read.
__device__ __forceinline__ uint4 stream_16(const void* from, bool present) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from), "r"(static_cast<int>(present)));
  return v;
}

// 8 bytes alike.
__device__ __forceinline__ uint2 stream_8(const void* from, bool present) {
  uint2 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];\n}"
      : "=r"(v.x), "=r"(v.y)
      : "l"(from), "r"(static_cast<int>(present)));
  return v;
}

// sum += w x over a block of 32 inputs: `low` and `high` of outputs g and g + 8, x of row g, from input 8 t each.
__device__ __forceinline__ void mma_block(float (&sum)[4], const uint4& low, const uint4& high, const uint4& x) {
  const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
  mma_m16n8k16(sum, first, x.x, x.y);
  mma_m16n8k16(sum, second, x.z, x.w);
}

}  // namespace kdtp
