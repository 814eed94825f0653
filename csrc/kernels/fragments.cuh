// Products with weights that are streamed from memory to registers once, without a stop in shared memory.
//
// The weights are the A side of mma.m16n8k16 (16 outputs), activations the B side (8 rows), for any number of rows:
// what a row gives cannot depend on its neighbours. A lane has outputs g = lane / 4 and g + 8, and row g; t = lane % 4.
// The order of inputs within a block of 32 is free as long as both sides agree: lane t takes inputs 8 t .. 8 t + 7, 16
// bytes in a row on either side, as its share of two steps of 16 inputs.
#pragma once
#include <cuda_bf16.h>

#include "../common/mma.cuh"

namespace kdtp {

constexpr int kBlock = 32;  // inputs

// 16 bytes that will not be read again soon: they bypass the L1, and bring the rest of their 256 bytes into the L2.
// If not `present`, `from` is not read, and the result is anything at all.
__device__ __forceinline__ uint4 stream_16(const void* from, bool present) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from), "r"(static_cast<int>(present)));
  return v;
}

// 8 bytes, as stream_16.
__device__ __forceinline__ uint2 stream_8(const void* from, bool present) {
  uint2 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];\n}"
      : "=r"(v.x), "=r"(v.y)
      : "l"(from), "r"(static_cast<int>(present)));
  return v;
}

// 16 bytes that others read, too, and that the kernel before may have written; anything if not `present`.
__device__ __forceinline__ uint4 load_16(const void* from, bool present) {
  uint4 v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "r"(static_cast<int>(present))
               : "memory");
  return v;
}

// Eight bfloat16 times a power of two.
__device__ __forceinline__ void scale_16(uint4& values, float scale) {
  auto* const pairs = reinterpret_cast<__nv_bfloat162*>(&values);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __hmul2(pairs[i], __float2bfloat162_rn(scale));
}

// A block of 32 inputs as A fragments of its two steps; `low` and `high` are of outputs g and g + 8, from input 8 t on.
// `zero` is 0, but the compiler must not know: where it sees mere copies, it makes new ones for every product, at the
// price of a third of all instructions and registers.
struct Fragments {
  uint32_t first[4], second[4];

  __device__ Fragments(const uint4& low, const uint4& high, uint32_t zero)
      : first{low.x | zero, high.x | zero, low.y | zero, high.y | zero},
        second{low.z | zero, high.z | zero, low.w | zero, high.w | zero} {}
};

// sum += w x over a block of 32 inputs, x of row g from input 8 t on.
__device__ __forceinline__ void mma_block(float (&sum)[4], const Fragments& w, const uint4& x) {
  mma_m16n8k16(sum, w.first, x.x, x.y);
  mma_m16n8k16(sum, w.second, x.z, x.w);
}

// a b, as mma_m16n8k16 has them, on its own: no zeros need to be laid into d first.
__device__ __forceinline__ void mma_m16n8k16_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

}  // namespace kdtp
