// SPDX-License-Identifier: MIT
// What norms share: the scale of a row, and the types they come in.
#pragma once

#include "chunk.h"
#include "reduce.h"

// Chunks of a row that a thread keeps in registers.
constant constexpr int KEEP = 4;

// offset + weight[i], or 1 where there is no weight.
template <typename wide, typename stored>
inline wide scale_at(device const stored* weight, long has_weight, float offset, long i) {
  return has_weight != 0 ? wide(weight[i]) + offset : wide(1.0f);
}

// `<function>_<type>_<type of the weight>_<values of a chunk>`
#define INSTANTIATE(function, T, W, WIDTH)                              \
  template [[host_name(#function "_" #T "_" #W "_" #WIDTH)]] [[kernel]] \
  decltype(function<T, W, WIDTH>) function<T, W, WIDTH>;

#define INSTANTIATE_TYPES(function)        \
  INSTANTIATE(function, float, float, 1)   \
  INSTANTIATE(function, float, float, 4)   \
  INSTANTIATE(function, half, half, 1)     \
  INSTANTIATE(function, half, half, 4)     \
  INSTANTIATE(function, half, float, 1)    \
  INSTANTIATE(function, half, float, 4)    \
  INSTANTIATE(function, bfloat, bfloat, 1) \
  INSTANTIATE(function, bfloat, bfloat, 4) \
  INSTANTIATE(function, bfloat, float, 1)  \
  INSTANTIATE(function, bfloat, float, 4)
