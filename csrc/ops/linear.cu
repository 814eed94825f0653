#include "../common/launch.cuh"
#include "../kernels/linear.cuh"

namespace {

using kdtp::Linear;

int run_plain(const Linear& p, int64_t dtype, void* stream) {
  kdtp::Launch how;
  how.grid = dim3((p.out + kdtp::kDotOuts - 1) / kdtp::kDotOuts, (p.rows + kdtp::kDotRows - 1) / kdtp::kDotRows, p.heads);
  how.block = dim3(kdtp::dot_threads(p.in));
  if (dtype == KDTP_F32) return kdtp::launch(kdtp::linear_kernel<float>, how, stream, p);
  return kdtp::launch(kdtp::linear_kernel<__nv_bfloat16>, how, stream, p);
}

// What both entries refuse alike.
int check(const char* op, int64_t rows, int64_t heads, int64_t in, int64_t out, int64_t dtype) {
  KDTP_WANT(rows >= 0 && rows <= 1 << 18, "%s: rows %lld: must be 0..%d", op, (long long)rows, 1 << 18);
  KDTP_WANT(in >= 1 && in <= 1 << 20, "%s: in %lld: must be 1..%d", op, (long long)in, 1 << 20);
  KDTP_WANT(out >= 1 && out <= 1 << 20, "%s: out %lld: must be 1..%d", op, (long long)out, 1 << 20);
  KDTP_WANT(heads >= 1 && heads <= 1024, "%s: heads %lld: must be 1..1024", op, (long long)heads);
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
  return a->rows == 0 ? 0 : run_plain(p, a->dtype, a->stream);
}

extern "C" int kdtp_linear_heads(const KdtpLinearHeadsArgs* a) {
  if (const int code = check("linear_heads", a->rows, a->heads, a->in, a->out, a->dtype)) return code;
  const Linear p = {a->x, a->w, a->y, (int)a->rows, (int)a->in, (int)a->out, (int)a->heads, a->x_row, a->x_head,
                    a->y_row, a->y_head, false};
  return a->rows == 0 ? 0 : run_plain(p, a->dtype, a->stream);
}
