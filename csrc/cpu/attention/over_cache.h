// SPDX-License-Identifier: MIT
// Attention over a cache, whose keys and values are of the dtype of q or of 8 bits.
#pragma once

#include <tuple>

#include "problem.h"

namespace metalcore::cpu::tiles {

// What a call gives, of which none has been looked at.
struct Given {
  const char* op;
  Tensor q, k, v;
  std::optional<Tensor> k_scale, v_scale, slopes, sinks;
  double scale;
  std::optional<double> softcap;
  std::optional<int64_t> left;
};

// Which keys each sequence has: in the rows of its entry, or in pages.
struct Places {
  std::vector<Sequence> sequences;
  std::optional<std::vector<int64_t>> table;
  int64_t page_bits = 0;
};

// Integers of a tensor of one dimension, or of rows of as many.
std::vector<int64_t> integers(const char* op, const char* name, const Tensor& x, int64_t dim);

// One for each entry, from 0 to `most`.
std::vector<int64_t> lengths_of(const char* op, const Tensor& lengths, int64_t entries,
                                int64_t most);

// Results [B, H, Tq, Dv] and the logarithm of the softmax's denominator.
std::tuple<Tensor, Tensor> attend_over_cache(const Given& given, const Sizes& s,
                                             const Places& places);

}  // namespace metalcore::cpu::tiles
