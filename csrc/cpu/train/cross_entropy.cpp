// SPDX-License-Identifier: MIT
// Cross entropy of rows of n logits on the CPU, and its gradient in the same visit of a row.
//   y = softcap * tanh(x / softcap), or x where there is no cap;  p = exp(y - lse)
//   loss = (1 - e) w_t (lse - y_t) + e / n * sum_j w_j (lse - y_j) + z w_t lse^2
//   dy_j = p_j * ((1 - e) w_t + e / n * sum(w) + 2 z w_t lse) - e / n * w_j - [j = t] (1 - e) w_t
//
// Rows are independent, so each thread takes a block of them. The sum of a row is taken over pieces
// that stay in the first cache while their maximum is found; the second visit finds the row in the
// outer caches, and writes the gradient beside it or in its place.

#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../common/math.h"
#include "norm.h"

namespace metalcore::cpu {
namespace {

constexpr int64_t kPieceElements = 4096;

enum Reduction : int64_t { kNone, kMean, kSum };

// What is the same for all rows.
template <typename T>
struct Terms {
  const Acc<T>* weight;  // [n], in the order of Pairs of T, or null
  Acc<T> weight_sum;
  Acc<T> smoothing, z_loss, softcap;
  int64_t n;
};

template <typename T, bool kCapped>
class LossRow {
  using A = Acc<T>;

 public:
  LossRow(const Terms<T>& terms, const T* x, int64_t target, A target_weight)
      : terms_(terms),
        x_(x),
        target_(target),
        w_(target_weight),
        y_target_(cap(static_cast<A>(x[target]))) {
    lse_ = log_sum_exp();
    const A e = terms.smoothing, share = e / A(terms.n);
    nll_ = (1 - e) * w_;
    even_ = share;
    mass_ = nll_ + share * terms.weight_sum + 2 * terms.z_loss * w_ * lse_;
  }

  A loss() const {
    A loss = nll_ * (lse_ - y_target_) + terms_.z_loss * w_ * lse_ * lse_;
    if (even_ != 0) loss += even_ * (terms_.weight_sum * lse_ - weighted_sum());
    return loss;
  }

  A lse() const { return lse_; }

  // dx may be the memory of x.
  void gradient(A scale, T* dx, bool streams) const {
    const A mass = mass_ * scale, even = even_ * scale, x_target = static_cast<A>(x_[target_]);
    write_row<T>(terms_.n, streams, [&](int64_t i, auto elements, auto put) {
      const auto t = squashed(simd::load(x_ + i, elements));
      const auto y = kCapped ? t * terms_.softcap : t;
      auto d = exp(y - both(lse_)) * mass;
      if (even != 0) d = d - weight_at(i, elements) * even;
      if (kCapped) d = d - d * t * t;
      put(dx + i, d);
    });
    // orders the store below after those that went past the caches
    if (streams) simd::end_stream();
    const A t = kCapped ? std::tanh(x_target / terms_.softcap) : A(0);
    const A d = std::exp(y_target_ - lse_) * mass - even * w_ - nll_ * scale;
    dx[target_] = static_cast<T>(d * (1 - t * t));
  }

 private:
  static simd::Pair<A> both(A v) {
    const auto lanes = simd::splat<simd::Vec<A>>(v);
    return {lanes, lanes};
  }

  // called, it would pass registers through memory: 2.4x for a gradient in place of the logits
  [[gnu::always_inline]] static simd::Pair<A> exp(simd::Pair<A> v) {
    return {simd::exp(v.first), simd::exp(v.second)};
  }

  A cap(A v) const { return kCapped ? terms_.softcap * std::tanh(v / terms_.softcap) : v; }

  // y / softcap, or y where there is no cap
  simd::Pair<A> squashed(simd::Pair<A> x) const {
    if constexpr (!kCapped) return x;
    const auto u = x * (1 / terms_.softcap);
    return {simd::Tanh<simd::Vec<A>>(u.first).value, simd::Tanh<simd::Vec<A>>(u.second).value};
  }

  template <typename Elements>
  simd::Pair<A> capped(int64_t i, Elements elements) const {
    const auto v = squashed(simd::load(x_ + i, elements));
    return kCapped ? v * terms_.softcap : v;
  }

  template <typename Elements>
  simd::Pair<A> weight_at(int64_t i, Elements elements) const {
    return terms_.weight ? load_scale<T>(terms_.weight + i, elements) : both(1);
  }

  // v with minus infinity past the row's end
  static simd::Pair<A> closed(simd::Pair<A> v, simd::All) { return v; }
  static simd::Pair<A> closed(simd::Pair<A> v, simd::First first) {
    A lanes[simd::kStep<T>];
    simd::store(lanes, v);
    for (int64_t i = first.count; i < simd::kStep<T>; ++i) {
      lanes[simd::slot<T>(i)] = -std::numeric_limits<A>::infinity();
    }
    return simd::load(lanes);
  }

  // NaN does not count: it shows in the sum.
  A largest(int64_t begin, int64_t count) const {
    simd::Pair<A> even = both(-std::numeric_limits<A>::infinity()), odd = even;
    const auto take = [&](simd::Pair<A>& most, int64_t i, auto elements) {
      const auto v = closed(simd::load(x_ + begin + i, elements), elements);
      most = {simd::larger(v.first, most.first), simd::larger(v.second, most.second)};
    };
    int64_t i = 0;
    for (; i + 2 * simd::kStep<T> <= count; i += 2 * simd::kStep<T>) {
      take(even, i, simd::All{});
      take(odd, i + simd::kStep<T>, simd::All{});
    }
    simd::for_each_pair<T>(count - i,
                           [&](int64_t j, auto elements) { take(even, i + j, elements); });
    const auto lanes =
        simd::larger(simd::larger(even.first, even.second), simd::larger(odd.first, odd.second));
    A most = lanes[0];
    for (int64_t lane = 1; lane < simd::kLanes<A>; ++lane) most = std::max(most, A(lanes[lane]));
    return cap(most);
  }

  A log_sum_exp() const {
    A most = -std::numeric_limits<A>::infinity(), sum = 0;
    for (int64_t begin = 0; begin < terms_.n; begin += kPieceElements) {
      const int64_t count = std::min(kPieceElements, terms_.n - begin);
      const A now = std::max(most, largest(begin, count));
      // a piece of minus infinities alone adds nothing
      const A origin = std::isinf(now) && now < 0 ? A(0) : now;
      const A added = simd::sum_over<T>(count, [&](int64_t i, auto elements) {
        return exp(closed(capped(begin + i, elements), elements) - both(origin));
      });
      sum = (sum == 0 ? A(0) : sum * std::exp(most - origin)) + added;
      most = now;
    }
    return most + std::log(sum);
  }

  A weighted_sum() const {
    return simd::sum_over<T>(terms_.n, [&](int64_t i, auto elements) {
      const auto y = capped(i, elements);
      return terms_.weight ? y * weight_at(i, elements) : y;
    });
  }

  const Terms<T>& terms_;
  const T* x_;
  const int64_t target_;
  const A w_, y_target_;
  A lse_, nll_, even_, mass_;
};

void expect_classes(const int64_t* target, int64_t rows, int64_t classes, int64_t ignore) {
  for (int64_t r = 0; r < rows; ++r) {
    if (target[r] != ignore && (target[r] < 0 || target[r] >= classes)) {
      throw std::out_of_range("cross_entropy: targets must be from 0 to " +
                              std::to_string(classes - 1) + " or ignore_index " +
                              std::to_string(ignore) + ", got " + std::to_string(target[r]) +
                              " in row " + std::to_string(r));
    }
  }
}

// What the losses are divided by.
template <typename A>
A divisor(Reduction reduction, const std::optional<Tensor>& given, const int64_t* target,
          const A* weight_of_row, int64_t rows, int64_t ignore) {
  if (reduction != kMean) return 1;
  if (given) {
    return dispatch_float(given->scalar_type(), "cross_entropy", [&](auto type) {
      return static_cast<A>(data<decltype(type)>(*given)[0]);
    });
  }
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (target[r] != ignore) sum += weight_of_row ? weight_of_row[r] : A(1);
  }
  return static_cast<A>(sum);
}

// Everything of one call. dlogits is null where no gradient is wanted, and may be the logits.
template <typename T>
struct Call {
  using A = Acc<T>;
  Terms<T> terms;
  const int64_t* target;
  const A* weight_of_row;
  int64_t rows, ignore;
  A divisor;
  const T* logits;
  T* dlogits;
  bool streams;
  A* losses;
  A* lse;

  template <bool kCapped>
  void run() const {
    const int64_t n = terms.n;
    parallel_for(0, rows, grain_rows(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (target[r] == ignore) {
          losses[r] = 0;
          if (lse) lse[r] = 0;
          if (dlogits) std::fill_n(dlogits + r * n, n, T(0));
          continue;
        }
        const A w = weight_of_row ? weight_of_row[r] : A(1);
        const LossRow<T, kCapped> row(terms, logits + r * n, target[r], w);
        losses[r] = row.loss() / divisor;
        if (lse) lse[r] = row.lse();
        if (dlogits) row.gradient(1 / divisor, dlogits + r * n, streams);
      }
    });
  }
};

struct Options {
  int64_t ignore;
  double smoothing, z_loss, softcap;
  Reduction reduction;
};

template <typename T>
void compute(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& weight,
             const std::optional<Tensor>& denominator, const Options& options, Tensor& loss,
             Tensor* lse, Tensor* dlogits) {
  using A = Acc<T>;
  const int64_t rows = logits.size(0), n = logits.size(1);
  const int64_t* t = data<int64_t>(target);
  expect_classes(t, rows, n, options.ignore);
  std::optional<Scale<T>> scale;
  std::vector<A> weight_of_row;
  A weight_sum = A(n);
  if (weight) {
    scale.emplace(weight, 0.0, n, "cross_entropy");
    weight_of_row.resize(rows);
    const auto at = [&](int64_t i) {
      if (std::is_same_v<T, A>) return scale->get()[i];
      return scale->get()[i / simd::kStep<T> * simd::kStep<T> + simd::slot<T>(i % simd::kStep<T>)];
    };
    for (int64_t r = 0; r < rows; ++r) weight_of_row[r] = t[r] == options.ignore ? A(0) : at(t[r]);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += at(i);
    weight_sum = static_cast<A>(sum);
  }
  const A* own = weight ? weight_of_row.data() : nullptr;
  std::vector<A> scratch(options.reduction == kNone ? 0 : rows);
  const bool streams = dlogits && dlogits->const_data_ptr() != logits.const_data_ptr() &&
                       streams_past_cache<T>(*dlogits, n);
  metalcore_variant = streams ? "rows_streamed" : "rows";
  const Call<T> call{{weight ? scale->get() : nullptr, weight_sum, A(options.smoothing),
                      A(options.z_loss), A(options.softcap), n},
                     t,
                     own,
                     rows,
                     options.ignore,
                     divisor<A>(options.reduction, denominator, t, own, rows, options.ignore),
                     data<T>(logits),
                     dlogits ? mutable_data<T>(*dlogits) : nullptr,
                     streams,
                     options.reduction == kNone ? mutable_data<A>(loss) : scratch.data(),
                     lse ? mutable_data<A>(*lse) : nullptr};
  options.softcap > 0 ? call.template run<true>() : call.template run<false>();
  if (options.reduction == kNone) return;
  double sum = 0;
  for (A one : scratch) sum += one;
  // the mean of nothing is NaN, as torch has it
  mutable_data<A>(loss)[0] = options.reduction == kMean && call.divisor == 0 ? A(NAN) : A(sum);
}

Options checked(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& weight,
                const std::optional<Tensor>& denominator, Options options) {
  expect_float("cross_entropy", logits);
  STD_TORCH_CHECK(logits.dim() == 2, "cross_entropy: logits must be [rows, classes]");
  expect_choice("cross_entropy", "reduction", options.reduction, 3);
  STD_TORCH_CHECK(target.dim() == 1 && target.size(0) == logits.size(0) &&
                      target.scalar_type() == ScalarType::Long,
                  "cross_entropy: target must be int64, one per row");
  STD_TORCH_CHECK(!weight || (weight->dim() == 1 && weight->numel() == logits.size(1)),
                  "cross_entropy: weight must have a value per class");
  STD_TORCH_CHECK(
      !denominator || (denominator->numel() == 1 && is_float(denominator->scalar_type())),
      "cross_entropy: denominator must be one number");
  return options;
}

Tensor empty_loss(const Tensor& logits, Reduction reduction) {
  const int64_t rows = logits.size(0);
  return empty(&rows, reduction == kNone ? 1 : 0, accumulate_dtype(logits.scalar_type()));
}

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits_in, const Tensor& target_in,
                                         std::optional<Tensor> weight,
                                         std::optional<Tensor> denominator, int64_t ignore_index,
                                         double label_smoothing, double z_loss, double softcap,
                                         int64_t reduction, bool need_dlogits) {
  const Options options =
      checked(logits_in, target_in, weight, denominator,
              {ignore_index, label_smoothing, z_loss, softcap, static_cast<Reduction>(reduction)});
  const Tensor logits = dense(logits_in), target = dense(target_in);
  constexpr int64_t kNothing = 0;
  Tensor loss = empty_loss(logits, options.reduction);
  Tensor dlogits =
      need_dlogits ? cpu::empty_like(logits) : empty(&kNothing, 1, logits.scalar_type());
  dispatch_float(logits.scalar_type(), "cross_entropy", [&](auto type) {
    compute<decltype(type)>(logits, target, weight, denominator, options, loss, nullptr,
                            need_dlogits ? &dlogits : nullptr);
  });
  return {loss, dlogits};
}

std::tuple<Tensor, Tensor> cross_entropy_in_place(Tensor logits, const Tensor& target_in,
                                                  std::optional<Tensor> weight,
                                                  std::optional<Tensor> denominator,
                                                  int64_t ignore_index, double label_smoothing,
                                                  double z_loss, double softcap,
                                                  int64_t reduction) {
  const Options options =
      checked(logits, target_in, weight, denominator,
              {ignore_index, label_smoothing, z_loss, softcap, static_cast<Reduction>(reduction)});
  const Tensor target = dense(target_in);
  Tensor x = dense(logits), loss = empty_loss(logits, options.reduction), lse = empty_per_row(x);
  dispatch_float(x.scalar_type(), "cross_entropy", [&](auto type) {
    compute<decltype(type)>(x, target, weight, denominator, options, loss, &lse, &x);
  });
  if (!logits.is_contiguous()) torch::stable::copy_(logits, x);
  return {loss, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("cross_entropy", kernel<&cross_entropy>);
  m.impl("cross_entropy_", kernel<&cross_entropy_in_place>);
}

}  // namespace metalcore::cpu
