// SPDX-License-Identifier: MIT
// What one call of attention computes, and which keys a query sees.
//
// Query i of a sequence stands at the position i + keys - queries, so that the last query stands at
// the last key. It sees the keys from its position - left to its position + right.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "../common/aten.h"
#include "../common/product.h"

namespace metalcore::cpu::tiles {

using product::kWidth;
using simd::Acc;
using simd::kLanes;
using simd::Vec;

// Keys that are computed at once. 128: 1.05x of 64 with AVX2, 1.09x for heads of 64 (AMD EPYC).
constexpr int64_t kKeys = 128;

template <typename A>
constexpr A kHidden = -std::numeric_limits<A>::infinity();

// Rows of a tensor [B, H, T, D] with a contiguous last dimension.
template <typename T>
struct Heads {
  T* values;
  int64_t batch, head, row;

  Heads(T* values, int64_t batch, int64_t head, int64_t row)
      : values(values), batch(batch), head(head), row(row) {}

  explicit Heads(const Tensor& x)
      : values(static_cast<T*>(const_cast<void*>(x.const_data_ptr()))),
        batch(x.stride(0)),
        head(x.stride(1)),
        row(x.stride(2)) {}

  T* at(int64_t b, int64_t h, int64_t t) const { return values + b * batch + h * head + t * row; }
};

// Queries and keys that belong together: a batch entry, or a packed sequence.
struct Sequence {
  int64_t batch, first_query, queries, first_key, keys;
  int64_t entry = batch;  // of numbers that each sequence has its own of

  // The position of the first query, counted in keys.
  int64_t offset() const { return keys - queries; }
};

// A mask that broadcasts to [B, H, Tq, Tk].
struct Mask {
  const void* values = nullptr;
  ScalarType dtype = ScalarType::Bool;
  int64_t batch = 0, head = 0, row = 0, column = 0;
};

// Queries first .. first + count - 1 of a head, one in each lane.
struct Panel {
  int64_t head, first, count;
};

struct Keys {
  int64_t begin, end;

  int64_t count() const { return end - begin; }
};

struct Sizes {
  int64_t batch, heads, key_heads, queries, keys, size, value_size;

  int64_t group() const { return heads / std::max<int64_t>(1, key_heads); }
};

// The arguments after the tensors, in the type sums are kept in.
template <typename A>
struct Problem {
  Sizes sizes;
  A scale;
  std::optional<A> softcap;
  int64_t left, right;
  Mask mask;
  const A* slopes = nullptr;
  int64_t slopes_batch = 0;
  const A* sinks = nullptr;
  std::vector<Sequence> sequences;

  // Those keys that some query of the panel may see.
  Keys range(const Sequence& s, const Panel& p) const {
    const int64_t first = p.first + s.offset();
    const int64_t begin = std::max<int64_t>(0, first - left);
    return {begin, std::max(begin, std::min(s.keys, first + p.count + right))};
  }

  // Whether each of the keys is near enough to each query.
  bool sees_all(const Sequence& s, const Panel& p, Keys keys) const {
    const int64_t first = p.first + s.offset();
    return keys.begin >= first + p.count - 1 - left && keys.end - 1 <= first + right;
  }

  A slope(const Sequence& s, int64_t head) const {
    return slopes ? slopes[s.entry * slopes_batch + head] : A(0);
  }
};

inline Tensor with_contiguous_rows(const Tensor& x) { return x.stride(-1) == 1 ? x : dense(x); }

// A limit that is not there is further away than any key.
inline int64_t reach(std::optional<int64_t> limit) {
  constexpr int64_t kAnywhere = int64_t(1) << 40;
  return limit ? std::max(-kAnywhere, std::min(*limit, kAnywhere)) : kAnywhere;
}

inline Sizes sizes_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, op, ": q, k, v must be 4-D");
  const Sizes s{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)};
  STD_TORCH_CHECK(k.size(0) == s.batch && v.size(0) == s.batch && v.size(1) == s.key_heads &&
                      v.size(2) == s.keys && k.size(3) == s.size &&
                      k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() &&
                      s.group() * s.key_heads == s.heads,
                  op, ": the shapes or dtypes of q, k, v do not go together");
  return s;
}

inline Mask mask_of(const char* op, const std::optional<Tensor>& mask, const Sizes& s) {
  if (!mask) return {};
  const ScalarType dtype = mask->scalar_type();
  STD_TORCH_CHECK(mask->dim() == 4 && (dtype == ScalarType::Bool || is_float(dtype)), op,
                  ": mask must be 4-D, of bool or a floating dtype");
  const int64_t full[] = {s.batch, s.heads, s.queries, s.keys};
  int64_t stride[4];
  for (int64_t d = 0; d < 4; ++d) {
    STD_TORCH_CHECK(mask->size(d) == full[d] || mask->size(d) == 1, op,
                    ": mask must broadcast to [B, H, Tq, Tk]");
    stride[d] = mask->size(d) == 1 ? 0 : mask->stride(d);
  }
  return {mask->const_data_ptr(), dtype, stride[0], stride[1], stride[2], stride[3]};
}

// One per batch entry, or by the places where packed sequences start.
inline std::vector<Sequence> sequences_of(const char* op, const std::optional<Tensor>& starts_q,
                                          const std::optional<Tensor>& starts_k, const Sizes& s) {
  std::vector<Sequence> found;
  if (!starts_q) {
    STD_TORCH_CHECK(!starts_k, op, ": packed sequences have both cu_seqlens");
    for (int64_t b = 0; b < s.batch; ++b) found.push_back({b, 0, s.queries, 0, s.keys});
    return found;
  }
  STD_TORCH_CHECK(s.batch == 1 && starts_k && starts_k->numel() == starts_q->numel() &&
                      starts_q->dim() == 1 && starts_k->dim() == 1,
                  op, ": packed sequences are one batch entry, with both cu_seqlens");
  const Tensor q = dense(to_dtype(*starts_q, ScalarType::Long));
  const Tensor k = dense(to_dtype(*starts_k, ScalarType::Long));
  const int64_t *qs = data<int64_t>(q), *ks = data<int64_t>(k);
  const int64_t last = q.numel() - 1;
  STD_TORCH_CHECK(
      last >= 0 && qs[0] == 0 && ks[0] == 0 && qs[last] == s.queries && ks[last] == s.keys, op,
      ": cu_seqlens must go from 0 to the rows of q and of k");
  for (int64_t i = 0; i < last; ++i) {
    STD_TORCH_CHECK(qs[i] <= qs[i + 1] && ks[i] <= ks[i + 1], op, ": cu_seqlens must ascend");
    found.push_back({0, qs[i], qs[i + 1] - qs[i], ks[i], ks[i + 1] - ks[i]});
  }
  return found;
}

// Numbers per head, in the type sums are kept in; `kept` owns them.
template <typename A>
const A* per_head(const char* op, const char* name, const std::optional<Tensor>& x, int64_t heads,
                  std::optional<Tensor>& kept) {
  if (!x) return nullptr;
  const ScalarType dtype = x->scalar_type();
  STD_TORCH_CHECK(x->dim() >= 1 && x->size(-1) == heads && is_float(dtype) &&
                      (dtype != ScalarType::Double || std::is_same_v<A, double>),
                  op, ": ", name, " must have a number for each head, no wider than q's");
  kept = dense(to_dtype(*x, std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float));
  return data<A>(*kept);
}

// What a Problem points to.
struct Held {
  std::optional<Tensor> slopes, sinks;
};

template <typename A>
Problem<A> problem_of(const char* op, const Sizes& s, const std::optional<Tensor>& mask,
                      const std::optional<Tensor>& slopes, const std::optional<Tensor>& sinks,
                      const std::optional<Tensor>& starts_q, const std::optional<Tensor>& starts_k,
                      double scale, std::optional<double> softcap, std::optional<int64_t> left,
                      std::optional<int64_t> right, Held& held) {
  Problem<A> p;
  p.sizes = s;
  p.scale = A(scale);
  if (softcap) p.softcap = A(*softcap);
  p.left = reach(left);
  p.right = reach(right);
  p.mask = mask_of(op, mask, s);
  p.slopes = per_head<A>(op, "alibi_slopes", slopes, s.heads, held.slopes);
  if (slopes && slopes->dim() != 1) {
    STD_TORCH_CHECK(slopes->dim() == 2 && slopes->size(0) == s.batch, op,
                    ": alibi_slopes must be [H] or [B, H]");
    p.slopes_batch = s.heads;
  }
  STD_TORCH_CHECK(!sinks || sinks->dim() == 1, op, ": sinks must be [H]");
  p.sinks = per_head<A>(op, "sinks", sinks, s.heads, held.sinks);
  p.sequences = sequences_of(op, starts_q, starts_k, s);
  return p;
}

// An unwritten tensor [B, H, T, D] that lies as [B, T, H, D], which projections take without a
// copy.
inline Tensor empty_heads(int64_t batch, int64_t heads, int64_t rows, int64_t size,
                          ScalarType dtype) {
  const int64_t sizes[] = {batch, rows, heads, size};
  return torch::stable::transpose(empty(sizes, 4, dtype), 1, 2);
}

inline void expect_rows(const char* op, const char* name, const Tensor& x, const Sizes& s,
                        ScalarType dtype) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(0) == s.batch && x.size(1) == s.heads &&
                      x.size(2) == s.queries && x.size(3) == s.value_size &&
                      x.scalar_type() == dtype,
                  op, ": ", name, " must be [B, H, Tq, Dv], with the dtype of q");
}

inline void expect_per_row(const char* op, const char* name, const Tensor& x, const Sizes& s,
                           ScalarType dtype) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(0) == s.batch && x.size(1) == s.heads &&
                      x.size(2) == s.queries && x.scalar_type() == dtype,
                  op, ": ", name, " must be [B, H, Tq], in the type of sums");
}

// Rows in the type of sums; where they have that already, they stay where they are.
template <typename T>
product::Broadcast<Acc<T>> widened(const T* from, int64_t row, int64_t count, int64_t n,
                                   product::Lines<Acc<T>> copy) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return {from, row, 1};
  } else {
    product::widen_rows(from, row, count, n, copy);
    return {copy.values, copy.row, 1};
  }
}

// A tile of keys or values in the type of sums.
template <typename T>
product::Broadcast<Acc<T>> tile_of(const Heads<const T>& x, const Sequence& s, int64_t head,
                                   Keys keys, int64_t n, product::Lines<Acc<T>> copy) {
  return widened(x.at(s.batch, head, s.first_key + keys.begin), x.row, keys.count(), n, copy);
}

inline bool is_worth_threads(const Sizes& s) {
  return s.batch * s.heads * s.queries * s.keys * s.size >= lanes::kGrainFlops;
}

// Calls body(task) for each task, on all threads; a thread that is done takes the next task.
template <typename Body>
void for_each_task(int64_t tasks, bool worth_threads, Body body) {
  std::atomic<int64_t> next = 0;
  parallel_for(0, tasks, worth_threads ? 1 : std::max<int64_t>(1, tasks), [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1)) < tasks;) body(task);
  });
}

// Memory of a task, given out in pieces that start at a cache line.
template <typename A>
class Pieces {
 public:
  explicit Pieces(int64_t values) : next_(lanes::workspace<A>(values)) {}

  // Of each piece that is to be taken, for the total.
  static int64_t size(int64_t values) { return product::round_up(values, 64 / int64_t(sizeof(A))); }

  A* take(int64_t values) {
    A* const piece = next_;
    next_ += size(values);
    return piece;
  }

 private:
  A* next_;
};

}  // namespace metalcore::cpu::tiles
