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

// The variants of kernels of rows that keep some registers, and `<function>_long_..` of those that
// keep as many as 1024 threads can have beside those that they work with.
#define INSTANTIATE_KEPT(function, name, T, WIDTH, REGISTERS) \
  template [[host_name(name "_" #T "_" #WIDTH)]] [[kernel]]   \
  decltype(function<T, WIDTH, REGISTERS>) function<T, WIDTH, REGISTERS>;

#define INSTANTIATE_KEPT_WIDTHS(function, name, REGISTERS) \
  INSTANTIATE_KEPT(function, name, float, 1, REGISTERS)    \
  INSTANTIATE_KEPT(function, name, float, 4, REGISTERS)    \
  INSTANTIATE_KEPT(function, name, half, 1, REGISTERS)     \
  INSTANTIATE_KEPT(function, name, half, 4, REGISTERS)     \
  INSTANTIATE_KEPT(function, name, bfloat, 1, REGISTERS)   \
  INSTANTIATE_KEPT(function, name, bfloat, 4, REGISTERS)

#define INSTANTIATE_ROWS(function)                 \
  INSTANTIATE_KEPT_WIDTHS(function, #function, 16) \
  INSTANTIATE_KEPT_WIDTHS(function, #function "_long", 28)
