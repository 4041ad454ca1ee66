// SPDX-License-Identifier: MIT
// New keys and values into a cache, on the CPU: token t of entry b goes to row slots[b][t], which
// is row slot % page of page slot / page.

#include "cache.h"
#include "encode.h"

namespace metalcore::cpu {
namespace {

using namespace tiles;

constexpr const char* kOp = "paged_write";

// Keys or values, and where they go.
struct Target {
  const char* name;
  Tensor x, cache;
  std::optional<Tensor> scale;

  void expect_fits(const Tensor& slots) const {
    bool fits = x.dim() == 4 && cache.dim() == 4 && x.size(0) == slots.size(0) &&
                x.size(2) == slots.size(1) && cache.size(2) == x.size(1) &&
                cache.size(3) == x.size(3);
    const ScalarType dtype = fits ? cache.scalar_type() : ScalarType::Undefined;
    const bool has_codes = dtype == ScalarType::Char || dtype == ScalarType::Byte;
    fits = fits && is_float(x.scalar_type()) && (has_codes || dtype == x.scalar_type());
    STD_TORCH_CHECK(fits, kOp, ": ", name, " and its cache do not go together");
    STD_TORCH_CHECK(scale ? has_codes : dtype != ScalarType::Char, kOp, ": int8 has a scale for ",
                    name, ", and only 8 bits have");
    if (!scale) return;
    fits = scale->dim() == 3 && scale->scalar_type() == ScalarType::Float;
    for (int64_t d = 0; fits && d < 3; ++d) fits = scale->size(d) == cache.size(d);
    STD_TORCH_CHECK(fits, kOp, ": the scale of ", name, " must be float32, one for each row");
  }

  template <typename S, typename T>
  void write(const int64_t* slots, int64_t page) const {
    const int64_t tokens = x.size(2), heads = x.size(1), n = x.size(3);
    const Heads<const T> from(x);
    const Stored<S> to = stored_by_pages<S>(cache);
    const Stored<float> scales = scale ? stored_by_pages<float>(*scale) : Stored<float>{};
    parallel_for(0, x.size(0) * tokens, grain_rows(heads * n), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (slots[i] < 0) continue;
        const int64_t p = slots[i] / page, row = slots[i] % page;
        for (int64_t h = 0; h < heads; ++h) {
          const T* const source = from.at(i / tokens, h, i % tokens);
          S* const target = const_cast<S*>(to.at(p, row, h));
          if constexpr (kIsCode<S>) {
            const float s = encode_row(source, n, scale.has_value(), target);
            if (scale) *const_cast<float*>(scales.at(p, row, h)) = s;
          } else {
            std::memcpy(target, source, n * sizeof(T));
          }
        }
      }
    });
  }

  void write(const int64_t* slots) const {
    const int64_t page = std::max<int64_t>(1, cache.size(1));
    dispatch_float(x.scalar_type(), kOp, [&](auto type) {
      using T = decltype(type);
      switch (cache.scalar_type()) {
        case ScalarType::Char:
          return write<Int8, T>(slots, page);
        case ScalarType::Byte:
          return write<Float8, T>(slots, page);
        default:
          return write<T, T>(slots, page);
      }
    });
  }
};

// Caches of rows with gaps are written by way of a dense copy.
struct Written {
  Tensor to, dense_to;

  explicit Written(const Tensor& x) : to(x), dense_to(with_contiguous_rows(x)) {}

  void finish() {
    if (dense_to.const_data_ptr() != to.const_data_ptr()) torch::stable::copy_(to, dense_to);
  }
};

void paged_write(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                 std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                 const Tensor& slots) {
  const ScalarType dtype = slots.scalar_type();
  STD_TORCH_CHECK(slots.dim() == 2 && (dtype == ScalarType::Int || dtype == ScalarType::Long), kOp,
                  ": slots must be int32 or int64 [B, T]");
  const Target given[] = {{"k", k, k_cache, k_scale}, {"v", v, v_cache, v_scale}};
  for (const Target& t : given) t.expect_fits(slots);
  STD_TORCH_CHECK(k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1), kOp,
                  ": both caches must have as many rows");
  const Tensor all = dense(to_dtype(slots, ScalarType::Long));
  const int64_t* const at = data<int64_t>(all);
  const int64_t rows = k_cache.size(0) * k_cache.size(1);
  for (int64_t i = 0; i < all.numel(); ++i) {
    STD_TORCH_CHECK(-1 <= at[i] && at[i] < rows, kOp, ": slots must be rows of the cache, or -1");
  }
  metalcore_variant = k_cache.scalar_type() == k.scalar_type() ? "rows" : "codes";
  for (const Target& t : given) {
    Written cache(t.cache);
    Target{t.name, with_contiguous_rows(t.x), cache.dense_to, t.scale}.write(at);
    cache.finish();
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("paged_write", kernel<&paged_write>);
}

}  // namespace metalcore::cpu
