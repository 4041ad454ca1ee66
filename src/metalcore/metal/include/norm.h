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

// Kernels that keep a row as it is stored, KEPT chunks per thread: 16 registers for rows of four
// values at a time, and `<function>_long_..` 28, for rows of float that these cannot hold.
#define INSTANTIATE_NORM(function, name, T, W, WIDTH, KEPT)        \
  template [[host_name(name "_" #T "_" #W "_" #WIDTH)]] [[kernel]] \
  decltype(function<T, W, WIDTH, KEPT>) function<T, W, WIDTH, KEPT>;

#define INSTANTIATE_NORMS(function)                                 \
  INSTANTIATE_NORM(function, #function, float, float, 1, 4)         \
  INSTANTIATE_NORM(function, #function, float, float, 4, 4)         \
  INSTANTIATE_NORM(function, #function "_long", float, float, 4, 7) \
  INSTANTIATE_NORM(function, #function, half, half, 1, 8)           \
  INSTANTIATE_NORM(function, #function, half, half, 4, 8)           \
  INSTANTIATE_NORM(function, #function, half, float, 1, 8)          \
  INSTANTIATE_NORM(function, #function, half, float, 4, 8)          \
  INSTANTIATE_NORM(function, #function, bfloat, bfloat, 1, 8)       \
  INSTANTIATE_NORM(function, #function, bfloat, bfloat, 4, 8)       \
  INSTANTIATE_NORM(function, #function, bfloat, float, 1, 8)        \
  INSTANTIATE_NORM(function, #function, bfloat, float, 4, 8)

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
