// SPDX-License-Identifier: MIT
// What a check knows of the bytes of a region: a cell for every 2^shift of them, as many as the
// accesses so far allow, so that most accesses touch one.
#pragma once

#include "check.h"

namespace msl {

template <typename Cell>
class Shadow {
 public:
  void begin(uint64_t bytes) {
    *this = {};
    bytes_ = bytes;
    cells_ = allocate();
  }
  void end() {
    if (cells_) free_bytes(cells_, cell_bytes());
    cells_ = nullptr;
  }
  bool is_on() const { return cells_; }
  uint32_t bytes_per_cell() const { return 1u << shift_; }

  // The cells of an access, which they cover exactly.
  struct Cells {
    Cell *first, *last;
    Cell* begin() const { return first; }
    Cell* end() const { return last; }
  };
  MSL_INLINE Cells of(uint64_t offset, uint32_t size) {
    if (__builtin_expect((offset | size) & ((1u << shift_) - 1), 0)) refine(offset | size);
    if (offset < low_) low_ = offset;
    if (offset + size > high_) high_ = offset + size;
    Cell* first = cells_ + (offset >> shift_);
    return {first, first + (size >> shift_)};
  }

 private:
  Cell* cells_ = nullptr;
  unsigned shift_ = 4;
  uint64_t bytes_ = 0;
  uint64_t low_ = ~0ull, high_ = 0;  // bytes touched so far

  size_t cell_bytes() const { return ((bytes_ >> shift_) + 2) * sizeof(Cell); }
  Cell* allocate() const { return static_cast<Cell*>(lazy_zeros(cell_bytes())); }

  // Makes cells small enough for what begins or ends at `edge`, keeping what is known.
  __attribute__((noinline)) void refine(uint64_t edge) {
    Shadow fine = *this;
    fine.shift_ = static_cast<unsigned>(__builtin_ctzll(edge));
    fine.cells_ = fine.allocate();
    const unsigned step = shift_ - fine.shift_;
    if (low_ < high_) {
      for (uint64_t i = low_ >> fine.shift_; i <= (high_ - 1) >> fine.shift_; ++i) {
        fine.cells_[i] = cells_[i >> step];
      }
    }
    end();
    *this = fine;
  }
};

}  // namespace msl
