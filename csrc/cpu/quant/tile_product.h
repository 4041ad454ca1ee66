// SPDX-License-Identifier: MIT
// A tile of 16 rows times a few rows of activations, compiled once for each format.
#pragma once

#include "activations.h"

namespace metalcore::cpu::quant {

// Whether activations of so many bytes are multiplied as bytes by this CPU, or else as words.
bool takes_bytes(int count);

// What a kernel reads: a tile of `blocks` blocks, and rows of activations from `values` on.
template <typename Format>
struct Work {
  const Format& format;
  const uint8_t* tile;
  int64_t blocks;
  const Activations& activations;
  int64_t first;  // row of activations
  float* y;       // [rows][16]
};

// y[m][16] for `rows` rows.
template <typename Format>
void multiply_tile(Work<Format> work, int64_t rows);

}  // namespace metalcore::cpu::quant
