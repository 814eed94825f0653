#include "../kernels/all_reduce.cuh"

namespace {

using kdtp::Exchange;

constexpr int kNormedMost = 8192;  // width with a norm: one pack of bfloat16 a thread, two of float32

Exchange exchange(const KdtpAllReduceArgs* a) {
  Exchange e = {};
  void* const rooms[] = {a->room0, a->room1, a->room2, a->room3, a->room4, a->room5, a->room6, a->room7};
  for (int i = 0; i < a->size; ++i) e.rooms[i] = static_cast<uint4*>(rooms[i]);
  e.part = a->part_bytes / sizeof(uint4);
  e.rank = a->rank;
  e.size = a->size;
  e.state = static_cast<int*>(a->state);
  e.failure = static_cast<int*>(a->failure);
  e.timeout = a->timeout_ns;
  const unsigned form = a->dtype * 2 + (a->residual != nullptr);
  e.stamp = {(unsigned)a->stamp, (unsigned)a->rows, (unsigned)a->width, form};
  return e;
}

// Few packs go to many small blocks: one multiprocessor takes its time to write to seven peers.
template <typename T, int kGroup> int run_flat(const KdtpAllReduceArgs* a) {
  const int64_t packs = a->rows * a->width / kdtp::kNormPack<T>;
  int threads = 128;
  while (threads < kdtp::kReduceThreadsMost && threads * a->blocks < packs) threads *= 2;
  const int64_t blocks = (packs + threads - 1) / threads;
  kdtp::Launch how;
  how.grid = dim3(blocks < a->blocks ? blocks : a->blocks);
  how.block = dim3(threads);
  return kdtp::launch(kdtp::all_reduce_kernel<T, kGroup>, how, a->stream, exchange(a), static_cast<const T*>(a->x),
                      static_cast<T*>(a->out), packs);
}

template <typename T, int kPacks, int kGroup, int kThreads> int run_norm(const KdtpAllReduceArgs* a) {
  const int packs = a->width / kdtp::kNormPack<T>;
  kdtp::Launch how;
  how.grid = dim3(a->rows < a->blocks ? a->rows : a->blocks);
  how.block = dim3(kPacks > 1 ? kdtp::kNormThreadsMost : (packs + 31) / 32 * 32);  // as rms_norm has them
  return kdtp::launch(kdtp::all_reduce_norm_kernel<T, kPacks, kGroup, kThreads>, how, a->stream, exchange(a),
                      static_cast<const T*>(a->x), static_cast<T*>(a->residual), static_cast<const float*>(a->weight),
                      static_cast<T*>(a->out), (int)a->rows, (int)a->width, (float)a->eps);
}

// kGroup: so many peers' words are asked for at once, as far as there are registers; speed counts in bfloat16, and up to
// the 7168 columns of DeepSeek-V3 and Kimi-K2.
constexpr int kUsualThreads = 896;

template <typename T, int kGroup> int run_group(const KdtpAllReduceArgs* a) {
  constexpr int kMost = kdtp::kNormThreadsMost;
  if (a->residual == nullptr) return run_flat<T, kGroup>(a);
  const int64_t packs = a->width / kdtp::kNormPack<T>;
  if (packs <= kUsualThreads) return run_norm<T, 1, kGroup, kUsualThreads>(a);
  if constexpr (sizeof(T) == 4)
    if (packs > kMost) return run_norm<T, 2, 2, kMost>(a);
  return run_norm<T, 1, 2, kMost>(a);
}

template <typename T> int run(const KdtpAllReduceArgs* a) {
  return a->size <= 2 ? run_group<T, 2>(a) : run_group<T, 4>(a);
}

}  // namespace

extern "C" int kdtp_all_reduce(const KdtpAllReduceArgs* a) {
  KDTP_WANT(a->size >= 1 && a->size <= kdtp::kReduceRanksMost, "all_reduce: size %lld: must be 1..%d",
            (long long)a->size, kdtp::kReduceRanksMost);
  KDTP_WANT(a->rank >= 0 && a->rank < a->size, "all_reduce: rank %lld: must be 0..%lld", (long long)a->rank,
            (long long)a->size - 1);
  KDTP_WANT(a->blocks >= 1 && a->blocks <= kdtp::kReduceBlocksMost, "all_reduce: blocks %lld: must be 1..%d",
            (long long)a->blocks, kdtp::kReduceBlocksMost);
  KDTP_WANT(a->stamp >= 0 && a->stamp <= INT32_MAX, "all_reduce: stamp %lld: must be 0..%d", (long long)a->stamp,
            INT32_MAX);
  KDTP_WANT(a->timeout_ns >= 1, "all_reduce: timeout_ns %lld: must be at least 1", (long long)a->timeout_ns);
  KDTP_WANT(a->rows >= 0 && a->rows <= INT32_MAX, "all_reduce: rows %lld: must be 0..%d", (long long)a->rows, INT32_MAX);
  KDTP_WANT(a->width >= 1 && a->width <= INT32_MAX, "all_reduce: width %lld: must be 1..%d", (long long)a->width,
            INT32_MAX);
  KDTP_WANT((a->residual == nullptr) == (a->weight == nullptr), "all_reduce: residual and weight: must both be there, "
            "or none");
  KDTP_DISPATCH("all_reduce", a->dtype, {
    const int64_t row_bytes = a->width * sizeof(T);
    const int64_t stamps = kdtp::kReduceBlocksMost * sizeof(uint4);
    KDTP_WANT(row_bytes % 16 == 0, "all_reduce: width %lld: must make rows of whole 16 bytes", (long long)a->width);
    KDTP_WANT(a->residual == nullptr || a->width <= kNormedMost,
              "all_reduce: width %lld: must be at most %d with a residual", (long long)a->width, kNormedMost);
    KDTP_WANT(a->part_bytes % 16 == 0 && a->part_bytes >= stamps + a->rows * row_bytes,
              "all_reduce: part_bytes %lld: must be a multiple of 16, at least %lld", (long long)a->part_bytes,
              (long long)(stamps + a->rows * row_bytes));
    KDTP_WANT(kdtp::in_sixteens(0, a->x, a->residual, a->out, a->room0, a->room1, a->room2, a->room3, a->room4, a->room5,
                                a->room6, a->room7),
              "all_reduce: x, residual, out, rooms: must start at multiples of 16 bytes");
    if (a->rows == 0) return 0;
    return run<T>(a);
  })
}

namespace {

// Errors here are told once: they must not come up again at a launch.
int told(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return static_cast<int>(error);
}

cudaError_t make_room(int64_t bytes, void** room, cudaIpcMemHandle_t* handle) {
  cudaError_t error = cudaMalloc(room, bytes);
  if (error != cudaSuccess) return error;
  error = cudaMemset(*room, 0xFF, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(handle, *room);
  if (error != cudaSuccess) cudaFree(*room);
  return error;
}

}  // namespace

// Not for a step: these wait for the device, which becomes this thread's, and allocate.

// A room on `device`, all bits 1, and the handle [64] by which other processes open it.
extern "C" int kdtp_room_make(int64_t bytes, int64_t device, void** room, unsigned char* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == 64, "the handle's size");
  KDTP_WANT(bytes >= 1, "room_make: bytes %lld: must be at least 1", (long long)bytes);
  cudaIpcMemHandle_t made;
  cudaError_t error = cudaSetDevice((int)device);
  if (error == cudaSuccess) error = make_room(bytes, room, &made);
  if (error == cudaSuccess) memcpy(handle, &made, sizeof made);
  return told(error);
}

// Another process's room, on `device` or a GPU that it can reach.
extern "C" int kdtp_room_open(const unsigned char* handle, int64_t device, void** room) {
  cudaIpcMemHandle_t made;
  memcpy(&made, handle, sizeof made);
  cudaError_t error = cudaSetDevice((int)device);
  if (error == cudaSuccess) error = cudaIpcOpenMemHandle(room, made, cudaIpcMemLazyEnablePeerAccess);
  return told(error);
}

// Free one's own room, or close another's.
extern "C" int kdtp_room_close(void* room, int64_t device, int64_t own) {
  cudaError_t error = cudaSetDevice((int)device);
  if (error == cudaSuccess) error = own ? cudaFree(room) : cudaIpcCloseMemHandle(room);
  return told(error);
}
