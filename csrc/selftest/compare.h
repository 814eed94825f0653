// Comparison of what a kernel left with what it must leave.
#pragma once
#include <math.h>

#include "cases.h"

inline bool is_float(int dtype) { return dtype == KDTR_FLOAT32 || dtype == KDTR_FLOAT64 || dtype == KDTR_BFLOAT16; }

// The element at `at` as a number; integers beyond 2^53 lose digits here, where they are only compared by size.
inline double number(int dtype, const unsigned char* at) {
  const uint64_t bits = kdtr_uint(at, static_cast<int>(kdtr_itemsize(dtype)));
  const uint32_t wide = dtype == KDTR_BFLOAT16 ? static_cast<uint32_t>(bits) << 16 : static_cast<uint32_t>(bits);
  float single;
  double real;
  memcpy(&single, &wide, sizeof single);
  memcpy(&real, &bits, sizeof real);
  switch (dtype) {
    case KDTR_FLOAT32: case KDTR_BFLOAT16: return single;
    case KDTR_FLOAT64: return real;
    case KDTR_INT8: return static_cast<int8_t>(bits);
    case KDTR_INT16: return static_cast<int16_t>(bits);
    case KDTR_INT32: return static_cast<int32_t>(bits);
    case KDTR_INT64: return static_cast<double>(static_cast<int64_t>(bits));
    case KDTR_FLOAT16: die("float16 cases are not read");
    default: return static_cast<double>(bits);
  }
}

// "[3, 17]" for an element of an array.
inline std::string coordinates(const kdtr_array* array, uint64_t element) {
  std::string text = "]";
  for (int i = array->n_dims - 1; i >= 0; --i) {
    text = std::to_string(element % array->dims[i]) + text;
    if (i > 0) text = ", " + text;
    element /= array->dims[i];
  }
  return "[" + text;
}

// How `found` differs from `want`, the data of `array`: empty if it does not. NaN agrees with NaN, infinity with
// itself; with atol = rtol = 0 every bit counts. `mask` is empty or says which elements count.
inline std::string difference(const kdtr_array* array, const std::vector<unsigned char>& found,
                              const std::vector<unsigned char>& want, const std::vector<unsigned char>& mask,
                              double atol, double rtol) {
  const uint64_t size = kdtr_itemsize(array->dtype), count = array->nbytes / size;
  uint64_t wrong = 0, worst = 0;
  double worst_distance = -1.0;
  for (uint64_t i = 0; i < count; ++i) {
    if (!mask.empty() && !mask[i]) continue;
    if (memcmp(&found[i * size], &want[i * size], size) == 0) continue;
    const double f = number(array->dtype, &found[i * size]), w = number(array->dtype, &want[i * size]);
    if (is_float(array->dtype) && isnan(f) && isnan(w)) continue;
    const double distance = isnan(f - w) ? INFINITY : fabs(f - w);
    if ((atol > 0 || rtol > 0) && isfinite(w) && distance <= atol + rtol * fabs(w)) continue;
    ++wrong;
    if (distance > worst_distance) worst = i, worst_distance = distance;
  }
  if (wrong == 0) return "";
  char text[512];
  snprintf(text, sizeof text, "%llu of %llu wrong, worst at %s: found %.9g, want %.9g (atol %g, rtol %g)",
           static_cast<unsigned long long>(wrong), static_cast<unsigned long long>(count),
           coordinates(array, worst).c_str(), number(array->dtype, &found[worst * size]),
           number(array->dtype, &want[worst * size]), atol, rtol);
  return text;
}
