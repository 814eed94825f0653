// Several elements in one access.
#pragma once
#include <stdint.h>

namespace kdtp {

template <typename T, int kCount> struct alignas(sizeof(T) * kCount) Pack { T at[kCount]; };

// Whether rows of `row_bytes` that start at these addresses can be read and written 16 bytes at a time.
template <typename... Pointers> bool in_sixteens(int64_t row_bytes, Pointers... starts) {
  const uintptr_t all = (reinterpret_cast<uintptr_t>(starts) | ... | static_cast<uintptr_t>(row_bytes));
  return all % 16 == 0;
}

}  // namespace kdtp
