// SPDX-License-Identifier: MIT
// Values by index on the CPU, on [outer, size, inner].
//   gather        y[o, k, i] = x[o, index[o, k, i], i]
//   index_select  y[o, k, i] = x[o, index[k], i]
//   scatter_add   y[o, index[o, k, i], i] += src[o, k, i], in the order of k
// Threads share out the outer dimension, and for scatter_add also columns, so that one thread adds
// up all that meets in a place.

#include <vector>

#include "../common/tensor.h"

namespace metalcore::cpu {
namespace {

using simd::Acc;

void expect_values(const char* op, const Tensor& x) {
  expect_float(op, x);
  STD_TORCH_CHECK(x.dim() == 3, op, ": x must be [outer, size, inner]");
}

void expect_index(const char* op, const Tensor& index, int64_t size) {
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Long, op, ": index must be int64");
  const int64_t* p = data<int64_t>(index);
  const int64_t count = index.numel();
  uint64_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, uint64_t(p[i]));
  for (int64_t i = 0; i < count && largest >= uint64_t(size); ++i) {
    STD_TORCH_CHECK(p[i] >= 0 && p[i] < size, op, ": index ", p[i],
                    " is out of range for a dimension of ", size);
  }
}

// Calls body with an unsigned integer of an element's size: values are only moved.
template <typename Body>
void dispatch_size(const Tensor& x, Body body) {
  const int64_t bytes = x.element_size();
  STD_TORCH_CHECK(bytes == 2 || bytes == 4 || bytes == 8, "gather: no elements of ", bytes,
                  " bytes");
  if (bytes == 2) return body(uint16_t());
  if (bytes == 4) return body(uint32_t());
  body(uint64_t());
}

Tensor gather(const Tensor& x_in, const Tensor& index_in) {
  const Tensor x = dense(x_in), index = dense(index_in);
  expect_values("gather", x);
  STD_TORCH_CHECK(index.dim() == 3 && x.size(0) == index.size(0) && x.size(2) == index.size(2),
                  "gather: index must have the outer and inner sizes of x");
  const int64_t size = x.size(1), count = index.size(1), inner = x.size(2);
  expect_index("gather", index, size);
  Tensor y = empty(index.sizes().data(), 3, x.scalar_type());
  dispatch_size(x, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(x.const_data_ptr());
    const int64_t* at = data<int64_t>(index);
    T* to = static_cast<T*>(y.mutable_data_ptr());
    parallel_for(0, x.size(0) * count, grain_rows(inner), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* plane = from + r / count * size * inner;
        for (int64_t i = 0; i < inner; ++i) {
          to[r * inner + i] = plane[at[r * inner + i] * inner + i];
        }
      }
    });
  });
  metalcore_variant = "values";
  return y;
}

Tensor index_select(const Tensor& x_in, const Tensor& index_in) {
  const Tensor x = dense(x_in), index = dense(index_in);
  expect_values("index_select", x);
  STD_TORCH_CHECK(index.dim() == 1, "index_select: index must be [count]");
  const int64_t size = x.size(1), count = index.numel();
  const int64_t bytes = x.size(2) * x.element_size();
  expect_index("index_select", index, size);
  const int64_t sizes[] = {x.size(0), count, x.size(2)};
  Tensor y = empty(sizes, 3, x.scalar_type());
  const char* from = static_cast<const char*>(x.const_data_ptr());
  const int64_t* at = data<int64_t>(index);
  char* to = static_cast<char*>(y.mutable_data_ptr());
  parallel_for(0, x.size(0) * count, grain_rows(x.size(2)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t k = r % count;
      if (k + 8 < count) __builtin_prefetch(from + (r / count * size + at[k + 8]) * bytes);
      std::copy_n(from + (r / count * size + at[k]) * bytes, bytes, to + r * bytes);
    }
  });
  metalcore_variant = "rows";
  return y;
}

// Columns that a thread adds up at a time; values of half precision are kept in float32 meanwhile.
constexpr int64_t kColumns = 64;

Tensor scatter_add(const Tensor& x_in, const Tensor& index_in, const Tensor& src_in) {
  const Tensor x = dense(x_in), index = dense(index_in), src = dense(src_in);
  expect_values("scatter_add", x);
  STD_TORCH_CHECK(
      index.dim() == 3 && same_sizes(index, src) && x.scalar_type() == src.scalar_type() &&
          x.size(0) == index.size(0) && x.size(2) == index.size(2),
      "scatter_add: index and src must have one shape, with the outer and inner sizes of x");
  const int64_t size = x.size(1), count = index.size(1), inner = x.size(2);
  expect_index("scatter_add", index, size);
  Tensor y = cpu::empty_like(x);
  dispatch_float(x.scalar_type(), "scatter_add", [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const T *xp = data<T>(x), *sp = data<T>(src);
    const int64_t* at = data<int64_t>(index);
    T* yp = mutable_data<T>(y);
    const int64_t tiles = (inner + kColumns - 1) / kColumns;
    const int64_t work = (size + count) * std::min(inner, kColumns);
    parallel_for(0, x.size(0) * tiles, grain_rows(work), [&](int64_t begin, int64_t end) {
      std::vector<A> sums(size * std::min(inner, kColumns));
      for (int64_t t = begin; t < end; ++t) {
        const int64_t o = t / tiles, first = t % tiles * kColumns;
        const int64_t width = std::min(kColumns, inner - first);
        const T *from = xp + o * size * inner + first, *add = sp + o * count * inner + first;
        const int64_t* where = at + o * count * inner + first;
        T* to = yp + o * size * inner + first;
        for (int64_t d = 0; d < size; ++d) {
          for (int64_t i = 0; i < width; ++i) sums[d * width + i] = A(from[d * inner + i]);
        }
        for (int64_t k = 0; k < count; ++k) {
          for (int64_t i = 0; i < width; ++i) {
            sums[where[k * inner + i] * width + i] += A(add[k * inner + i]);
          }
        }
        for (int64_t d = 0; d < size; ++d) {
          for (int64_t i = 0; i < width; ++i) to[d * inner + i] = T(sums[d * width + i]);
        }
      }
    });
  });
  metalcore_variant = "columns";
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("gather", kernel<&gather>);
  m.impl("index_select", kernel<&index_select>);
  m.impl("scatter_add", kernel<&scatter_add>);
}

}  // namespace metalcore::cpu
