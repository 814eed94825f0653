// INT4 experts from the published packing to that of the kernels. One 16-byte load of a lane gives its part of the A
// fragments of mma.m16n8k16 for 16 outputs and 64 inputs, and the 32 lanes' parts lie side by side.
//
// Lane i looks after outputs g = i / 4 and g + 8 and, of every 32 inputs, the eight from t * 8 on, t = i % 4: eight in
// a row, so that it reads the activations in 16 bytes, too. (A product may take the inputs in any order, if both sides
// take the same.) Word 2 * b + s holds the fragments of step s (16 inputs) of block b (32 inputs): nibbles j and j + 4
// are the lower and upper half of register j, which is of output g + 8 * (j % 2) and of inputs
// 32 b + 8 t + 4 s + 2 * (j / 2) and the next.
#pragma once
#include "../common/launch.cuh"
#include "../common/kdtp.cuh"

namespace kdtp {

constexpr int kInt4Outs = 16, kInt4Ins = 64;  // a tile of 32 lanes * 16 bytes

// packed [experts, out, in / 8] -> packed_out [experts, out / 16, in / 64, 32 lanes]; a thread makes one lane's part.
// scales [experts, out, in / 32] -> scales_out [experts, out / 16, in / 64, 8]: outputs g and g + 8 in the first block,
// then in the second.
__global__ void __launch_bounds__(256) moe_repack_kernel(const uint32_t* packed, const uint16_t* scales, uint4* packed_out,
                                                        ushort4* scales_out, int64_t tiles, int out, int in) {
  follow_kernel_before();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, tile = at / 32;
  if (tile >= tiles) return;
  const int lane = at % 32, g = lane / 4, t = lane % 4, steps = in / kInt4Ins, step = tile % steps;
  const int64_t row = tile / steps * kInt4Outs + g;  // of all experts' outputs, one below the other
  uint32_t word[4] = {};
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {  // outputs g, g + 8: the lane's eight inputs are one published word
      const uint32_t from = packed[(row + 8 * upper) * (in / 8) + step * 8 + b * 4 + t];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int half = i % 2, pair = i / 2 % 2, s = i / 4;  // of the register; which register; which step
        word[2 * b + s] |= (from >> 4 * i & 15u) << 4 * (upper + 2 * pair + 4 * half);
      }
    }
  }
  packed_out[at] = make_uint4(word[0], word[1], word[2], word[3]);
  if (t == 0) {
    const uint16_t* low = scales + row * (in / 32) + step * 2;
    const uint16_t* high = low + 8 * (in / 32);
    scales_out[tile * 8 + g] = make_ushort4(low[0], high[0], low[1], high[1]);
  }
}

}  // namespace kdtp
