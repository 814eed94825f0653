// Launches with what <<<>>> cannot say: clusters, and kernels that start before the one in front of them has ended.
//
// Kernels of a step follow each other without a gap: each is put on the device while the one before still runs, takes
// from memory what no such kernel writes (weights, index tables, committed rows of the cache), and then waits. What is
// copied, written by kernels launched in another way, or before an event of another stream that is waited for, is there
// before the first one starts. Every block of every kernel that is launched here calls wait_for_kernel_before() once,
// before it touches anything that kernels write or read, and before it ends: then "the kernel before has ended" means
// that all before it have.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <utility>

namespace kdtp {

constexpr int kSharedMost = 101376;  // bytes of shared memory that a block can have on sm_120

struct Launch {
  dim3 grid;
  dim3 block;
  size_t shared = 0;     // dynamic, bytes
  unsigned cluster = 1;  // blocks in a row along x that can read each other's shared memory
};

// `how` as CUDA wants it.
class LaunchConfig {
 public:
  explicit LaunchConfig(const Launch& how, void* stream = nullptr) {
    attributes_[0].id = cudaLaunchAttributeClusterDimension;
    attributes_[0].val.clusterDim.x = how.cluster;
    attributes_[0].val.clusterDim.y = attributes_[0].val.clusterDim.z = 1;
    attributes_[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[1].val.programmaticStreamSerializationAllowed = 1;
    config_.gridDim = how.grid;
    config_.blockDim = how.block;
    config_.dynamicSmemBytes = how.shared;
    config_.stream = static_cast<cudaStream_t>(stream);
    config_.attrs = attributes_;
    config_.numAttrs = 2;
  }
  LaunchConfig(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2];
  cudaLaunchConfig_t config_ = {};
};

// Let `kernel` have the shared memory that `how` asks for; returns the CUDA error.
template <typename Kernel> int allow_shared(Kernel* kernel, const Launch& how) {
  if (how.shared <= 32 * 1024) return 0;  // 48 KB need no leave, but what the kernel has declared counts, too
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  return static_cast<int>(cudaFuncSetAttribute(kernel, attribute, static_cast<int>(how.shared)));
}

// Launch `kernel`; returns the CUDA error.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), const Launch& how, void* stream, Arguments&&... arguments) {
  if (const int error = allow_shared(kernel, how)) return error;
  const LaunchConfig config(how, stream);
  return static_cast<int>(cudaLaunchKernelEx(config.get(), kernel, std::forward<Arguments>(arguments)...));
}

// Whether the device holds all of the grid's clusters at once.
template <typename Kernel> bool fits_at_once(Kernel* kernel, const Launch& how) {
  if (allow_shared(kernel, how) != 0) return false;
  const LaunchConfig config(how);
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, config.get()) != cudaSuccess) return false;
  return static_cast<int64_t>(how.grid.x) / how.cluster * how.grid.y * how.grid.z <= clusters;
}

// All threads of the cluster; what they wrote to shared memory is seen by all.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same before the end of a block whose memory others have read; it orders nothing.
__device__ __forceinline__ void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The float at the place of `local` in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float cluster_float(const float* local, int rank) {
  float value;
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
      : "=f"(value)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(local))), "r"(rank)
      : "memory");
  return value;
}

// Everything that the kernel before has written is there when this returns. Such memory is read by ordinary loads, so
// pointers to it are never __restrict__: the compiler would think that nobody writes it, and load whenever it likes.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Once every block has called it (or ended), the kernel behind may start, on what the device has left.
__device__ __forceinline__ void let_kernel_behind_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// What a kernel starts with that has nothing to fetch before.
__device__ __forceinline__ void follow_kernel_before() {
  let_kernel_behind_start();
  wait_for_kernel_before();
}

}  // namespace kdtp
