// SPDX-License-Identifier: MIT
// Rotary position embedding on the CPU: y[j] = x[j] * cos[j] + x[partner(j)] * sin[j], where the
// partner is half a row away or next door and the sign of the sine is part of the table.
//
// A task takes a few positions of one batch entry. It spreads their cosines and sines over rows in
// the accumulation type once, and turns all heads of q and k by them.

#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "rotate.h"

namespace metalcore::cpu {
namespace {

// Positions per task: their tables stay in the first cache (16 KiB for 128 rotated values).
constexpr int64_t kPositionsPerTask = 16;

// One of q and k: strides of batch, head and position, in elements; the last dimension has 1.
template <typename T>
struct Heads {
  const T* x = nullptr;
  T* y = nullptr;
  int64_t count = 0;
  int64_t x_batch, x_head, x_position, y_batch, y_head, y_position;
};

// Cosines and signed sines of one position, [rotary] each, in the order of Pairs of T. Those of the
// second half start at a whole Pair.
template <typename T>
class Tables {
  using A = Acc<T>;
  static constexpr int64_t kStep = simd::kStep<T>;

 public:
  explicit Tables(const Rotation& how)
      : how_(how),
        part_(how.interleaved ? how.rotary : how.half),
        padded_((part_ + kStep - 1) / kStep * kStep),
        row_(padded_ * (how.interleaved ? 1 : 2)),
        cos_(kPositionsPerTask * row_),
        sin_(kPositionsPerTask * row_),
        spread_(2 * how.rotary) {}

  const A* cos(int64_t position) const { return cos_.data() + position * row_; }
  const A* sin(int64_t position) const { return sin_.data() + position * row_; }
  int64_t second() const { return padded_; }

  template <typename W>
  void fill(int64_t position, const W* cos, const W* sin, int64_t given) {
    A *c = spread_.data(), *s = c + how_.rotary;
    for (int64_t i = 0; i < given; ++i) c[i] = clean(cos[i]);
    for (int64_t i = 0; i < given; ++i) s[i] = clean(sin[i]);
    if (given < how_.rotary) {
      repeat(c);
      repeat(s);
    }
    sign(s);
    place(c, cos_.data() + position * row_);
    place(s, sin_.data() + position * row_);
  }

 private:
  // simd::store to bfloat16 wants a NaN without payload
  template <typename W>
  static A clean(W w) {
    const A v = static_cast<A>(w);
    return v == v ? v : A(NAN);
  }

  void repeat(A* t) const {
    if (how_.interleaved) {
      for (int64_t i = how_.half - 1; i >= 0; --i) t[2 * i] = t[2 * i + 1] = t[i];
    } else {
      std::copy_n(t, how_.half, t + how_.half);
    }
  }

  // Turned back, what an element took from its partner goes to the partner.
  void sign(A* s) const {
    const int64_t first = how_.interleaved ? 2 : 1, away = how_.interleaved ? 1 : how_.half;
    for (int64_t i = 0; i < how_.half; ++i) {
      const A a = s[first * i], b = s[first * i + away];
      s[first * i] = how_.inverse ? b : -a;
      s[first * i + away] = how_.inverse ? -a : b;
    }
  }

  void place(const A* from, A* to) const {
    for (int64_t start = 0; start < how_.rotary; start += part_, to += padded_) {
      if constexpr (std::is_same_v<T, simd::BFloat16>) {
        constexpr int64_t kLanes = kStep / 2;
        int64_t i = 0;
        for (; i + kStep <= part_; i += kStep) {
          for (int64_t j = 0; j < kLanes; ++j) to[i + j] = from[start + i + 2 * j];
          for (int64_t j = 0; j < kLanes; ++j) to[i + kLanes + j] = from[start + i + 2 * j + 1];
        }
        for (; i < part_; ++i) {
          to[i / kStep * kStep + simd::slot<T>(i % kStep)] = from[start + i];
        }
      } else {
        std::copy_n(from + start, part_, to);
      }
    }
  }

  const Rotation how_;
  const int64_t part_, padded_, row_;
  std::vector<A> cos_, sin_, spread_;
};

// All heads at `count` positions from `first` of a batch entry, in the order of memory.
template <typename T>
void rotate_heads(const Rotation& how, const Heads<T>& heads, const Tables<T>& tables,
                  int64_t batch, int64_t first, int64_t count, bool streams) {
  const auto rotate = [&](int64_t h, int64_t p) {
    const T* x =
        heads.x + batch * heads.x_batch + h * heads.x_head + (first + p) * heads.x_position;
    T* y = heads.y + batch * heads.y_batch + h * heads.y_head + (first + p) * heads.y_position;
    if (streams) {
      rotate_row(how, x, tables.cos(p), tables.sin(p), tables.second(), y,
                 [](T* to, auto v, auto) { simd::stream(to, v); });
    } else {
      rotate_row(how, x, tables.cos(p), tables.sin(p), tables.second(), y,
                 [](T* to, auto v, auto elements) { simd::store(to, v, elements); });
    }
  };
  if (heads.y_head < heads.y_position) {
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t h = 0; h < heads.count; ++h) rotate(h, p);
    }
  } else {
    for (int64_t h = 0; h < heads.count; ++h) {
      for (int64_t p = 0; p < count; ++p) rotate(h, p);
    }
  }
}

template <typename T>
bool streams_past_cache(const Heads<T>& heads, const Rotation& how, int64_t elements) {
  return how.half % simd::kStep<T> == 0 && cpu::streams_past_cache(heads.y, elements, how.size);
}

// The result: without gaps, with the heads of a position together if x has them so.
Tensor empty_laid_out_as(const Tensor& x, int64_t heads_dim) {
  const bool together = x.stride(heads_dim) < x.stride(3 - heads_dim);
  std::array<int64_t, 4> sizes;
  std::copy_n(x.sizes().data(), 4, sizes.begin());
  const bool swapped = together != (heads_dim == 2);
  if (swapped) std::swap(sizes[1], sizes[2]);
  const Tensor y = empty(sizes.data(), 4, x.scalar_type());
  return swapped ? torch::stable::transpose(y, 1, 2) : y;
}

template <typename T>
Heads<T> heads_of(const Tensor& x, const Tensor& y, int64_t heads_dim) {
  const int64_t position_dim = 3 - heads_dim;
  return {data<T>(x),  mutable_data<T>(y),  x.size(heads_dim),
          x.stride(0), x.stride(heads_dim), x.stride(position_dim),
          y.stride(0), y.stride(heads_dim), y.stride(position_dim)};
}

void expect_rows(const Tensor& positions, int64_t rows) {
  const int64_t* p = data<int64_t>(positions);
  for (int64_t i = 0; i < positions.numel(); ++i) {
    if (p[i] < 0 || p[i] >= rows) {
      throw std::out_of_range("rope: position_ids must be from 0 to " + std::to_string(rows - 1) +
                              ", the last row of cos and sin, got " + std::to_string(p[i]));
    }
  }
}

void expect_shapes(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos,
                   const Tensor& sin, const std::optional<Tensor>& positions, int64_t heads_dim,
                   int64_t rotary) {
  STD_TORCH_CHECK(q.dim() == 4 && (heads_dim == 1 || heads_dim == 2),
                  "rope: q must have 4 dimensions, and heads_dim be 1 or 2");
  const int64_t seen = q.size(3 - heads_dim);
  STD_TORCH_CHECK(
      !k || (k->dim() == 4 && k->scalar_type() == q.scalar_type() && k->size(0) == q.size(0) &&
             k->size(3) == q.size(3) && k->size(3 - heads_dim) == seen),
      "rope: k must have the shape and dtype of q, but for the heads");
  STD_TORCH_CHECK(rotary > 0 && rotary % 2 == 0 && rotary <= q.size(3),
                  "rope: rotary_dim must be even and at most the head size");
  STD_TORCH_CHECK(cos.scalar_type() == sin.scalar_type() && same_sizes(cos, sin),
                  "rope: cos and sin must be alike");
  const int64_t rank = cos.dim();
  STD_TORCH_CHECK(
      (rank == 2 || rank == 3) && (cos.size(-1) == rotary || cos.size(-1) * 2 == rotary),
      "rope: cos must be [S, R] or [B, S, R], R rotary_dim or half of it");
  const Tensor& given = positions ? *positions : cos;
  const int64_t last = positions ? given.dim() - 1 : rank - 2;
  STD_TORCH_CHECK(last >= 0 && last <= 1 && given.size(last) == seen && (!positions || rank == 2) &&
                      (last == 0 || given.size(0) == 1 || given.size(0) == q.size(0)),
                  "rope: cos or positions must have an entry for each position of q");
  STD_TORCH_CHECK(!positions || positions->scalar_type() == ScalarType::Long,
                  "rope: positions must be int64");
}

// The last dimension of q and k must be contiguous; everything else may have any strides.
Tensor with_dense_rows(const Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) == 1 ? x : torch::stable::contiguous(x);
}

template <typename T>
void rope_all(const Rotation& how, const Heads<T>& q, const Heads<T>& k, int64_t batches,
              int64_t count, const Tensor& cos, const Tensor& sin,
              const std::optional<Tensor>& positions) {
  const int64_t given = cos.size(-1);
  const Tensor& by_batch = positions ? *positions : cos;
  const bool per_batch = by_batch.dim() == (positions ? 2 : 3) && by_batch.size(0) > 1;
  const int64_t* picked = positions ? data<int64_t>(*positions) : nullptr;
  const bool q_streams = streams_past_cache(q, how, batches * count * q.count * how.size);
  const bool k_streams = k.x && streams_past_cache(k, how, batches * count * k.count * how.size);
  metalcore_variant = q_streams ? "positions_streamed" : "positions";
  const int64_t blocks = (count + kPositionsPerTask - 1) / kPositionsPerTask;
  const int64_t task = kPositionsPerTask * (q.count + k.count) * how.size;

  dispatch_float(cos.scalar_type(), "rope", [&](auto type) {
    using W = decltype(type);
    const W *cp = data<W>(cos), *sp = data<W>(sin);
    parallel_for(0, batches * blocks, grain_rows(task), [&](int64_t begin, int64_t end) {
      Tables<T> tables(how);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / blocks, first = task % blocks * kPositionsPerTask;
        const int64_t here = std::min(kPositionsPerTask, count - first);
        for (int64_t p = 0; p < here; ++p) {
          const int64_t entry = (per_batch ? batch * count : 0) + first + p;
          const int64_t row = picked ? picked[entry] : entry;
          tables.fill(p, cp + row * given, sp + row * given, given);
        }
        rotate_heads(how, q, tables, batch, first, here, q_streams);
        if (k.x) rotate_heads(how, k, tables, batch, first, here, k_streams);
      }
      simd::end_stream();
    });
  });
}

std::tuple<Tensor, Tensor> rope(const Tensor& q_in, std::optional<Tensor> k_in,
                                const Tensor& cos_in, const Tensor& sin_in,
                                std::optional<Tensor> positions_in, int64_t heads_dim,
                                int64_t rotary_dim, bool interleaved, bool inverse) {
  expect_shapes(q_in, k_in, cos_in, sin_in, positions_in, heads_dim, rotary_dim);
  const Tensor q = with_dense_rows(q_in), cos = dense(cos_in), sin = dense(sin_in);
  std::optional<Tensor> k, positions;
  if (k_in) k = with_dense_rows(*k_in);
  if (positions_in) {
    positions = dense(*positions_in);
    expect_rows(*positions, cos.size(0));
  }
  constexpr int64_t kNothing = 0;
  Tensor q_out = empty_laid_out_as(q_in, heads_dim);
  Tensor k_out = k ? empty_laid_out_as(*k_in, heads_dim) : empty(&kNothing, 1, q.scalar_type());
  const Rotation how{q.size(3), rotary_dim, rotary_dim / 2, interleaved, inverse};
  dispatch_float(q.scalar_type(), "rope", [&](auto type) {
    using T = decltype(type);
    rope_all<T>(how, heads_of<T>(q, q_out, heads_dim),
                k ? heads_of<T>(*k, k_out, heads_dim) : Heads<T>{}, q.size(0),
                q.size(3 - heads_dim), cos, sin, positions);
  });
  return {q_out, k_out};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("rope", kernel<&rope>); }

}  // namespace metalcore::cpu
