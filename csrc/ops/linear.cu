#include "../kernels/linear_mma.cuh"

namespace {

using kdtp::Linear;

// Whether the tensor cores take it; a matter of the matrix, not of the call.
bool on_tensor_cores(const Linear& p, int64_t dtype) { return dtype == KDTP_BF16 && p.in % kdtp::kBlock == 0; }

int run_plain(const Linear& p, int64_t dtype, void* stream) {
  kdtp::Launch how;
  const int out_tiles = (p.out + kdtp::kDotOuts - 1) / kdtp::kDotOuts;
  how.grid = dim3(out_tiles, (p.rows + kdtp::kDotRows - 1) / kdtp::kDotRows, p.heads);
  how.block = dim3(kdtp::dot_threads(p.in));
  if (dtype == KDTP_F32) return kdtp::launch(kdtp::linear_kernel<float>, how, stream, p);
  return kdtp::launch(kdtp::linear_kernel<__nv_bfloat16>, how, stream, p);
}

template <int kTiles, int kOutWarps> int run_tile(const Linear& p, int splits, void* stream) {
  using Tile = kdtp::LinearTile<kTiles, kOutWarps>;
  kdtp::Launch how;
  const int out_tiles = (p.out + Tile::kOuts - 1) / Tile::kOuts;
  how.grid = dim3(splits, (p.rows + Tile::kRows - 1) / Tile::kRows, out_tiles * p.heads);
  how.block = dim3(kdtp::kLinearThreads);
  how.shared = Tile::kShared;
  how.cluster = splits;
  return kdtp::launch(kdtp::linear_mma_kernel<kTiles, kOutWarps>, how, stream, p);
}

// The inputs are split until the blocks fill the GPU: 132 SMs (H200), two blocks each. By the matrix alone, so that the
// order of a sum is the same on every GPU and for any number of rows.
int splits_of(const Linear& p, int tiles, int parts) {
  int splits = 1;
  while (splits < 8 && 2 * splits * tiles <= 264 && 2 * splits * parts * kdtp::kBlock <= p.in) splits *= 2;
  return splits;
}

int run_tensor_cores(const Linear& p, void* stream) {
  const int wide = (p.out + 127) / 128 * p.heads, narrow = (p.out + 31) / 32 * p.heads;
  if (wide >= 16) {
    const int splits = splits_of(p, wide, 1);
    if (p.rows <= 8) return run_tile<1, 8>(p, splits, stream);
    if (p.rows <= 16) return run_tile<2, 8>(p, splits, stream);
    if (p.rows <= 32) return run_tile<4, 8>(p, splits, stream);
    return run_tile<8, 8>(p, splits, stream);
  }
  const int splits = splits_of(p, narrow, 4);
  if (p.rows <= 8) return run_tile<1, 2>(p, splits, stream);
  if (p.rows <= 16) return run_tile<2, 2>(p, splits, stream);
  return run_tile<4, 2>(p, splits, stream);
}

int run(const char* op, const Linear& p, int64_t dtype, void* stream) {
  if (p.rows == 0) return 0;
  if (!on_tensor_cores(p, dtype)) return run_plain(p, dtype, stream);
  const int64_t strides = p.x_row | p.x_head;
  KDTP_WANT(strides % 8 == 0, "%s: x strides %lld, %lld: must be multiples of 8 for bf16 with in %d, a multiple of 32",
            op, (long long)p.x_row, (long long)p.x_head, p.in);
  KDTP_WANT((reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.w)) % 16 == 0,
            "%s: x %p, w %p: must be aligned to 16 bytes for bf16 with in %d, a multiple of 32", op, p.x, p.w, p.in);
  return run_tensor_cores(p, stream);
}

// What both entries refuse alike.
int check(const char* op, int64_t rows, int64_t heads, int64_t in, int64_t out, int64_t dtype) {
  KDTP_WANT(rows >= 0 && rows <= 1 << 18, "%s: rows %lld: must be 0..%d", op, (long long)rows, 1 << 18);
  KDTP_WANT(in >= 1 && in <= 1 << 20, "%s: in %lld: must be 1..%d", op, (long long)in, 1 << 20);
  KDTP_WANT(out >= 1 && out <= 1 << 20, "%s: out %lld: must be 1..%d", op, (long long)out, 1 << 20);
  KDTP_WANT(heads >= 1 && heads <= 1024, "%s: heads %lld: must be 1..1024", op, (long long)heads);
  KDTP_WANT(heads * ((out + 127) / 128) <= 65535, "%s: out %lld: must be at most %d with %lld heads", op,
            (long long)out, (int)(65535 / heads * 128), (long long)heads);
  KDTP_WANT(dtype == KDTP_F32 || dtype == KDTP_BF16, "%s: dtype %lld: must be 0 (f32) or 1 (bf16)", op,
            (long long)dtype);
  return 0;
}

}  // namespace

extern "C" int kdtp_linear(const KdtpLinearArgs* a) {
  if (const int code = check("linear", a->rows, 1, a->in, a->out, a->dtype)) return code;
  KDTP_WANT(a->x_stride >= a->in, "linear: x_stride %lld: must be at least in, %lld", (long long)a->x_stride,
            (long long)a->in);
  KDTP_WANT(a->y_stride >= a->out, "linear: y_stride %lld: must be at least out, %lld", (long long)a->y_stride,
            (long long)a->out);
  KDTP_WANT(a->out_f32 == 0 || a->out_f32 == 1, "linear: out_f32 %lld: must be 0 or 1", (long long)a->out_f32);
  const Linear p = {a->x, a->w, a->y, (int)a->rows, (int)a->in, (int)a->out, 1, a->x_stride, 0, a->y_stride, 0,
                    a->out_f32 == 1};
  return run("linear", p, a->dtype, a->stream);
}

extern "C" int kdtp_linear_heads(const KdtpLinearHeadsArgs* a) {
  if (const int code = check("linear_heads", a->rows, a->heads, a->in, a->out, a->dtype)) return code;
  const Linear p = {a->x, a->w, a->y, (int)a->rows, (int)a->in, (int)a->out, (int)a->heads, a->x_row, a->x_head,
                    a->y_row, a->y_head, false};
  return run("linear_heads", p, a->dtype, a->stream);
}
