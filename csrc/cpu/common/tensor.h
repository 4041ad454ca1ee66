// SPDX-License-Identifier: MIT
// What kernels need of torch's stable ABI: tensors, dtype dispatch, threads, the trace.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>

#include "failure.h"
#include "simd.h"
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

// Its name up to torch 2.12.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

// Says which of its variants a kernel took, on every path; `metalcore.trace()` reads it after the
// call.
extern thread_local const char* metalcore_variant;

extern "C" void metalcore_prefer_huge_pages(void* start, int64_t bytes);

namespace metalcore::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__SANITIZE_THREAD__)
// The sanitizer does not see how torch's threads wait for each other, nor may they read where the
// marks are before they have waited.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  static char started, ended;
  __tsan_release(&started);
  torch::stable::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    __tsan_acquire(&started);
    body(first, last);
    __tsan_release(&ended);
  });
  __tsan_acquire(&ended);
}
#else
using torch::stable::parallel_for;
#endif

// Elements per task. Below this, starting a thread costs more than it saves.
constexpr int64_t kGrainElements = 16 * 1024;

inline int64_t grain_rows(int64_t row_elements) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, row_elements));
}

inline Tensor dense(const Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

inline Tensor turned(const Tensor& x) { return torch::stable::transpose(x, -2, -1); }

// Whether matrices stand in memory column by column, and not row by row.
inline bool is_by_columns(const Tensor& x) {
  return !x.is_contiguous() && turned(x).is_contiguous();
}

// Dense memory, row by row or column by column as it is in x.
inline Tensor dense_either_way(const Tensor& x) { return is_by_columns(x) ? x : dense(x); }

// x in dense memory, laid out as it is in `like`.
inline Tensor laid_out_as(const Tensor& like, const Tensor& x) {
  return is_by_columns(like) ? turned(dense(turned(x))) : dense(x);
}

// Kernels read raw memory, so every call is held to what they expect, whoever made it: by these
// functions, by those of a family, and by `data`, which gives no pointer of another type.
inline bool same_sizes(const Tensor& a, const Tensor& b) {
  return std::ranges::equal(a.sizes(), b.sizes());
}

inline void expect_like(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  STD_TORCH_CHECK(t.scalar_type() == x.scalar_type() && same_sizes(t, x), op, ": ", name,
                  " must have the shape and dtype of x");
}

inline bool is_float(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

inline void expect_float(const char* op, const Tensor& x) {
  STD_TORCH_CHECK(is_float(x.scalar_type()), op,
                  ": the dtype must be float32, float64, float16 or bfloat16");
}

inline void expect_rows(const char* op, const Tensor& x) {
  expect_float(op, x);
  STD_TORCH_CHECK(x.dim() > 0, op, ": x must have rows");
}

// A choice of the op's schema, from 0 on.
inline void expect_choice(const char* op, const char* name, int64_t value, int64_t count) {
  STD_TORCH_CHECK(value >= 0 && value < count, op, ": ", name, " must be from 0 to ", count - 1,
                  ", got ", value);
}

template <typename T>
constexpr ScalarType dtype_of() {
  if (std::is_same_v<T, float>) return ScalarType::Float;
  if (std::is_same_v<T, double>) return ScalarType::Double;
  if (std::is_same_v<T, int32_t>) return ScalarType::Int;
  if (std::is_same_v<T, int64_t>) return ScalarType::Long;
  return std::is_same_v<T, simd::Half> ? ScalarType::Half : ScalarType::BFloat16;
}

template <typename T>
void expect_type(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == dtype_of<T>(),
                  "metalcore: a tensor has another dtype than the rest of the call implies");
}

template <typename T>
const T* data(const Tensor& x) {
  expect_type<T>(x);
  return static_cast<const T*>(x.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& x) {
  expect_type<T>(x);
  return static_cast<T*>(x.mutable_data_ptr());
}

// A contiguous, unwritten CPU tensor. The allocator returns large blocks to the system and takes
// them anew; in huge pages their first touch takes 1/512 of the page faults (3x for 4096 x 4096).
inline Tensor empty(const int64_t* sizes, int64_t dim, ScalarType dtype) {
  std::array<int64_t, 64> strides;
  int64_t step = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = step;
    step *= std::max<int64_t>(1, sizes[d]);
  }
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dim, sizes, strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(), 0, &handle));
  Tensor y(handle);
  metalcore_prefer_huge_pages(y.mutable_data_ptr(), y.numel() * y.element_size());
  return y;
}

inline Tensor empty_like(const Tensor& x) {
  return empty(x.sizes().data(), x.dim(), x.scalar_type());
}

// The same in the layout of x, which is dense either way.
inline Tensor empty_laid_out_as(const Tensor& x) {
  return is_by_columns(x) ? turned(cpu::empty_like(turned(x))) : cpu::empty_like(x);
}

// Whether an output of this many elements, in runs of `run`, should go past the caches: it would
// not stay there. From 4 MiB on (1.3x for a norm of bfloat16 1024 x 4096), where each run is a
// whole number of Pairs.
template <typename T>
bool streams_past_cache(const T* y, int64_t elements, int64_t run) {
  constexpr int64_t kManyBytes = 4 << 20;
  return elements * int64_t(sizeof(T)) >= kManyBytes && run % simd::kStep<T> == 0 &&
         reinterpret_cast<uintptr_t>(y) % MC_REGISTER_BYTES == 0;
}

// Calls body(T()) with the C++ type of a floating dtype.
template <typename Body>
auto dispatch_float(ScalarType dtype, const char* op, Body body) {
  switch (dtype) {
    case ScalarType::Float:
      return body(float());
    case ScalarType::Double:
      return body(double());
    case ScalarType::Half:
      return body(simd::Half());
    case ScalarType::BFloat16:
      return body(simd::BFloat16());
    default:
      STD_TORCH_CHECK(false, op, ": the dtype must be float32, float64, float16 or bfloat16");
  }
}

inline ScalarType accumulate_dtype(ScalarType dtype) {
  STD_TORCH_CHECK(is_float(dtype),
                  "metalcore: the dtype must be float32, float64, float16 or bfloat16");
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// What an op registers: its function for the dispatcher. A call starts without a variant, so that
// a trace never shows that of another op.
//   m.impl("qr", kernel<&qr>);
template <auto* function>
void kernel(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  metalcore_variant = "";
  fail_as_torch([=] { TORCH_BOX(function)(stack, num_args, num_outputs); });
}

}  // namespace metalcore::cpu
