// SPDX-License-Identifier: MIT
// The variants of elementwise kernels: `<function>_<type>_<values per thread>`.
#pragma once

#include "chunk.h"

#define INSTANTIATE_WIDTH(function, T, WIDTH)                    \
  template [[host_name(#function "_" #T "_" #WIDTH)]] [[kernel]] \
  decltype(function<T, WIDTH>) function<T, WIDTH>;

#define INSTANTIATE_WIDTHS(function)     \
  INSTANTIATE_WIDTH(function, float, 1)  \
  INSTANTIATE_WIDTH(function, float, 4)  \
  INSTANTIATE_WIDTH(function, half, 1)   \
  INSTANTIATE_WIDTH(function, half, 4)   \
  INSTANTIATE_WIDTH(function, bfloat, 1) \
  INSTANTIATE_WIDTH(function, bfloat, 4)
