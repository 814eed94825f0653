#include <algorithm>

#include "../kernels/linear_mma.cuh"
#include "../kernels/linear_wide.cuh"

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

// All of the rows at once if they fit, else as many buffers as do, so that their latency is hidden. Little memory, so that
// two blocks, or one and the next kernel's, share a multiprocessor.
kdtp::Chunks chunks_of(int rows, int parts, int ahead, int blocks) {
  constexpr int kRoom = 88 * 1024;
  static_assert(kRoom <= kdtp::kSharedMost, "a portable kernel");
  const auto chunks = [&](int each, int buffers) {
    // No bank conflicts: an odd number of half lines, as eight lanes read 64 bytes of two rows.
    return kdtp::Chunks{each, rows, (parts * each * 4 + 3) / 8 * 8 + 4, buffers};
  };
  const auto fits = [&](const kdtp::Chunks& c) { return rows * c.stride * c.buffers * 16 <= kRoom; };
  if (const auto all = chunks(blocks, 1); fits(all)) return all;
  int each = ahead, buffers = 2;
  while (buffers < kdtp::kBuffersMost && fits(chunks(each, buffers + 1))) ++buffers;
  while (each + ahead < blocks && fits(chunks(each + ahead, buffers))) each += ahead;
  return chunks(each, buffers);
}

template <class Tile> kdtp::Launch tile_launch(const Linear& p, int parts) {
  kdtp::Launch how;
  const int out_tiles = (p.out + Tile::kOuts - 1) / Tile::kOuts;
  how.cluster = parts / Tile::kParts;
  how.grid = dim3(how.cluster, (p.rows + Tile::kRows - 1) / Tile::kRows, out_tiles * p.heads);
  how.block = dim3(kdtp::kLinearThreads);
  return how;
}

template <int kTiles, int kOutWarps> int run_few(const Linear& p, int parts, void* stream) {
  using Tile = kdtp::LinearTile<kTiles, kOutWarps>;
  kdtp::Launch how = tile_launch<Tile>(p, parts);
  const int rows = kTiles == 1 ? p.rows : Tile::kRows, blocks = (p.in / kdtp::kBlock + parts - 1) / parts;
  const auto chunks = chunks_of(rows, Tile::kParts, kdtp::kBlocksAhead<Tile>, blocks);
  how.shared = std::max(rows * chunks.stride * chunks.buffers * 16, Tile::kSumBytes);
  return kdtp::launch(kdtp::linear_mma_kernel<kTiles, kOutWarps>, how, stream, p, chunks);
}

// A deep ring where the device then holds all blocks at once; else one that leaves room for two blocks to a
// multiprocessor, or what every device has.
template <int kTiles, int kOutWarps> int run_many(const Linear& p, int parts, void* stream) {
  using Tile = kdtp::LinearTile<kTiles, kOutWarps>;
  constexpr bool kShort = kOutWarps == 1;  // all parts in one block
  kdtp::Launch how = tile_launch<Tile>(p, parts);
  const auto run = [&](auto depth) {
    how.shared = kdtp::WideShared<Tile, depth.value>::kBytes;
    return kdtp::launch(kdtp::linear_wide_kernel<kTiles, kOutWarps, depth.value>, how, stream, p);
  };
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  constexpr int kDeep = 8, kTwo = 5, kPortable = 3;
  static_assert(kdtp::WideShared<Tile, kPortable>::kBytes <= kdtp::kSharedMost, "a portable kernel");
  how.shared = kdtp::WideShared<Tile, kDeep>::kBytes;
  if constexpr (!kShort) {
    if (how.shared <= most && kdtp::fits_at_once(kdtp::linear_wide_kernel<kTiles, kOutWarps, kDeep>, how))
      return run(std::integral_constant<int, kDeep>());
    if (kdtp::WideShared<Tile, kTwo>::kBytes <= most) return run(std::integral_constant<int, kTwo>());
  }
  return run(std::integral_constant<int, kPortable>());
}

// Tiles of up to 8 * kTilesMost rows.
template <int kOutWarps, int kTilesMost> int run_rows(const Linear& p, int parts, void* stream) {
  if (p.rows <= 8) return run_few<1, kOutWarps>(p, parts, stream);
  if (p.rows <= 16) return run_few<2, kOutWarps>(p, parts, stream);
  if (p.rows <= 32 || kTilesMost == 4) return run_many<4, kOutWarps>(p, parts, stream);
  return run_many<kTilesMost, kOutWarps>(p, parts, stream);
}

// Parts of the inputs: so many that one warp for each part of 16 outputs fills 132 SMs (H200) with 8 warps each, or
// fills them several times with little to spare. By the matrix alone: the order of a sum is the same on every GPU and
// for any number of rows.
int parts_of(const Linear& p) {
  constexpr int kWarps = 132 * kdtp::kLinearWarps;
  const int tiles = (p.out + 15) / 16 * p.heads, blocks = p.in / kdtp::kBlock;
  int best = 1;
  double best_share = 0.0;
  for (int parts = 1; parts <= 32 && parts <= blocks; parts *= 2) {
    const int warps = tiles * parts;
    if (parts > 8 && (warps > kWarps || 4 * parts > blocks)) break;
    const double share = static_cast<double>(warps) / ((warps + kWarps - 1) / kWarps * kWarps);
    if (share > 1.02 * best_share) best = parts, best_share = share;
  }
  return best;
}

// Few rows, or short ones: all parts in one block, which has nobody to wait for. Many: wider tiles of outputs, so that
// rows are read by fewer blocks. The choice was made by measuring on an H200; it moves no bit of a result.
int run_tensor_cores(const Linear& p, void* stream) {
  const int parts = parts_of(p);
  const bool little = p.rows <= 8 || p.in <= 512;
  const bool four = parts >= 16 || (parts == 8 && p.rows <= 32);
  const int here = little ? std::min(parts, 8) : four ? 4 : parts == 8 || parts == 2 ? 2 : 1;
  if (here == 8) return run_rows<1, 4>(p, parts, stream);
  if (here == 4) return run_rows<2, 4>(p, parts, stream);
  if (here == 2) return run_rows<4, 8>(p, parts, stream);
  return run_rows<8, 8>(p, parts, stream);
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
