// SPDX-License-Identifier: MIT
// Where keys and values lie: one after the other, or in pages of a cache by a table.
#pragma once

#include "eight_bit.h"
#include "problem.h"

namespace metalcore::cpu::tiles {

// Keys of a step, for which scores are kept.
constexpr int64_t kStepKeys = 64;

// A tensor of rows, by page, row of a page, and head.
template <typename S>
struct Stored {
  const S* values = nullptr;
  int64_t page = 0, row = 0, head = 0;

  const S* at(int64_t p, int64_t r, int64_t h) const {
    return values + p * page + r * row + h * head;
  }
};

template <typename S>
struct Cache {
  Stored<S> k, v;
  Stored<float> k_scale, v_scale;  // null where there are none
  const int64_t* table = nullptr;  // null: a page is a batch entry
  int64_t page_bits = 0;

  struct Place {
    int64_t page, row;
  };

  Place place(const Sequence& s, int64_t key) const {
    if (table == nullptr) return {s.batch, s.first_key + key};
    return {table[s.first_key + (key >> page_bits)], key & ((int64_t(1) << page_bits) - 1)};
  }

  bool is_there(const Sequence& s, int64_t key) const {
    return table == nullptr || table[s.first_key + (key >> page_bits)] >= 0;
  }

  // The next keys that are there, `most` of them at most.
  Keys next(const Sequence& s, Keys keys, int64_t most) const {
    if (table == nullptr) return {keys.begin, std::min(keys.begin + most, keys.end)};
    int64_t begin = keys.begin;
    while (begin < keys.end && !is_there(s, begin)) ++begin;
    int64_t end = begin;
    while (end < keys.end && end < begin + most && is_there(s, end)) ++end;
    return {begin, end};
  }

  // Whether all heads of a key lie side by side, to be read together.
  bool is_by_rows() const { return k.head < k.row; }
};

// Where the keys of a step lie, counted from their head's first: the last stands in for those past
// the end.
struct Offsets {
  int64_t k[kStepKeys], v[kStepKeys], k_scale[kStepKeys], v_scale[kStepKeys];

  template <typename S>
  void set(const Cache<S>& cache, const Sequence& s, Keys keys) {
    const int64_t count = keys.count();
    for (int64_t i = 0; i < kStepKeys; ++i) {
      const auto at = cache.place(s, keys.begin + std::min(i, count - 1));
      k[i] = at.page * cache.k.page + at.row * cache.k.row;
      v[i] = at.page * cache.v.page + at.row * cache.v.row;
      if constexpr (kIsCode<S>) {
        k_scale[i] = at.page * cache.k_scale.page + at.row * cache.k_scale.row;
        v_scale[i] = at.page * cache.v_scale.page + at.row * cache.v_scale.row;
      }
    }
  }
};

// Rows [B, H, T, D], as pages of one entry each.
template <typename S>
Stored<S> stored_by_heads(const Tensor& x) {
  return {static_cast<const S*>(x.const_data_ptr()), x.stride(0), x.stride(2), x.stride(1)};
}

// Rows [pages, page, H, D].
template <typename S>
Stored<S> stored_by_pages(const Tensor& x) {
  return {static_cast<const S*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

}  // namespace metalcore::cpu::tiles
