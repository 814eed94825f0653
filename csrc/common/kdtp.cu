// The library's own answers: its last refusal, and which params.h it was built from.
#include <stdarg.h>
#include <stdio.h>

#include "kdtp.cuh"

namespace {
thread_local char last_refusal[512];
}

int kdtp::refuse(const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(last_refusal, sizeof last_refusal, format, list);
  va_end(list);
  return KDTP_ILLEGAL;
}

// Why the last entry called in this thread returned KDTP_ILLEGAL.
extern "C" const char* kdtp_error(void) { return last_refusal; }

// The text of a cudaError_t.
extern "C" const char* kdtp_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// sha256 of params.h, as the build gave it: a caller with another params.h would pass other structs.
extern "C" const char* kdtp_abi(void) { return KDTP_PARAMS_SHA256; }
