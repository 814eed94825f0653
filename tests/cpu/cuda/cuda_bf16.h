// The type alone: kernels that compute with it are not run on a CPU.
#pragma once
#include <cuda_runtime.h>

struct __nv_bfloat16 { uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16) { abort(); }
inline __nv_bfloat16 __float2bfloat16_rn(float) { abort(); }
