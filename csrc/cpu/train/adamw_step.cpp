// SPDX-License-Identifier: MIT
// AdamW on the CPU: all tensors of a list in one pass.
//   m = m + (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
//   p = (1 - lr weight_decay) p - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)
// The values of all tensors are counted through in blocks, and each thread takes a run of blocks,
// whatever tensors it lies in. The norm adds up runs of values, then the runs in order.

#include "adamw_step.h"

#include <memory>
#include <vector>

namespace metalcore::cpu {
namespace {

using simd::BFloat16;

// Values whose squares are added up by one thread: fixed, so that the norm is the same for any
// number of threads.
constexpr int64_t kSumValues = 1 << 14;

// Bytes that are fetched ahead of each of the four streams.
constexpr int64_t kAheadBytes = 512;

// The gradient, which is written back where it is unscaled.
template <typename T, typename Elements>
auto unscaled(const AdamWTensor& t, T* g, Elements elements) {
  auto grad = simd::load_in_order(g, elements);
  if (t.unscale != 1) {
    grad = grad * Acc<T>(t.unscale);
    simd::store_in_order(g, grad, elements);
  }
  return grad;
}

template <typename T, typename Elements>
void store_parameter(const AdamWTensor& t, T* p, simd::Pair<Acc<T>> value, Bits first, Bits second,
                     Elements elements) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (t.stochastic) return store_by_chance(p, value, first, second, elements);
  }
  simd::store_in_order(p, value, elements);
}

template <typename T, bool kMost>
void update(const AdamWTensor& t, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const AdamWNumbers<A> numbers(t);
  const bool by_chance = std::is_same_v<T, BFloat16> && t.stochastic;
  const int64_t step = by_chance ? kBlock : end - begin;
  for (int64_t start = begin; start < end; start += step) {
    T *p = static_cast<T*>(t.p) + start, *g = static_cast<T*>(t.g) + start;
    A *m = static_cast<A*>(t.m) + start, *v = static_cast<A*>(t.v) + start;
    A* most = kMost ? static_cast<A*>(t.most) + start : nullptr;
    Noise noise(t.seed, start / kBlock);
    simd::for_each_pair<T>(std::min(step, end - start), [&](int64_t i, auto elements) {
      __builtin_prefetch(reinterpret_cast<char*>(p + i) + kAheadBytes, 1);
      __builtin_prefetch(reinterpret_cast<char*>(g + i) + kAheadBytes);
      __builtin_prefetch(reinterpret_cast<char*>(m + i) + kAheadBytes, 1);
      __builtin_prefetch(reinterpret_cast<char*>(v + i) + kAheadBytes, 1);
      const auto grad = unscaled(t, g + i, elements);
      auto param = simd::load_in_order(p + i, elements);
      auto first = simd::load(m + i, elements), second = simd::load(v + i, elements);
      simd::Pair<A> top = {};
      if (kMost) top = simd::load(most + i, elements);
      param.first = numbers.step(param.first, grad.first, first.first, second.first,
                                 kMost ? &top.first : nullptr);
      param.second = numbers.step(param.second, grad.second, first.second, second.second,
                                  kMost ? &top.second : nullptr);
      simd::store(m + i, first, elements);
      simd::store(v + i, second, elements);
      if (kMost) simd::store(most + i, top, elements);
      const Bits chance = noise();
      store_parameter(t, p + i, param, chance, noise(), elements);
    });
  }
}

// The largest magnitude of a block of values, as bits: the order of positive floats, NaN on top.
template <typename T>
float largest_magnitude(const T* x, int64_t n) {
  Bits largest = {};
  simd::for_each_pair<T>(n, [&](int64_t i, auto elements) {
    const auto v = simd::load(x + i, elements);
    const Bits a = simd::bits_as<Bits>(v.first) & 0x7fffffff;
    const Bits b = simd::bits_as<Bits>(v.second) & 0x7fffffff;
    largest = largest > a ? largest : a;
    largest = largest > b ? largest : b;
  });
  uint32_t top = 0;
  for (int64_t i = 0; i < simd::kLanes<float>; ++i) top = std::max(top, uint32_t(largest[i]));
  return simd::bits_as<float>(top);
}

// Values whose bounds are found ahead of their update.
constexpr int64_t kRun = 8 * kBlock;

template <bool kMost>
struct EightBitBlocks {
  EightBitBlock<true> m;
  EightBitBlock<false> v, most;
  Noise noise;

  // New codes are counted from the largest value that can come up for gradients up to `gradient`,
  // so that they can be written as soon as they are computed.
  EightBitBlocks(const AdamWTensor& t, int64_t block, const AdamWNumbers<float>& n, float gradient)
      : m(t.m, block), v(t.v, block), most(kMost ? t.most : t.v, block), noise(t.seed, block) {
    gradient *= std::abs(n.gradient_factor) * float(t.unscale);
    m.set_bound(m.bound() + (gradient - m.bound()) * n.keep1);
    v.set_bound(v.bound() * n.beta2 + gradient * gradient * n.keep2);
    if (kMost) most.set_bound(std::max(most.bound(), v.bound()));
  }
};

template <typename T, bool kMost>
void update_eight_bit_block(const AdamWTensor& t, AdamWNumbers<float> numbers, T* p, T* g,
                            int64_t count, EightBitBlocks<kMost> to) {
  simd::for_each_pair<T>(count, [&](int64_t i, auto elements) {
    __builtin_prefetch(p + i + kRun, 1);
    __builtin_prefetch(g + i + kRun);
    const auto grad = unscaled(t, g + i, elements);
    auto param = simd::load_in_order(p + i, elements);
    const Bits chance[2] = {to.noise(), to.noise()};
    Bits codes[3][2];
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t j = i + half * simd::kLanes<float>;
      FloatVec& value = half ? param.second : param.first;
      FloatVec first = to.m.get(j), second = to.v.get(j), top = {};
      if (kMost) top = to.most.get(j);
      value = numbers.step(value, half ? grad.second : grad.first, first, second,
                           kMost ? &top : nullptr);
      codes[0][half] = to.m.encode(first, chance[half]);
      codes[1][half] = to.v.encode(second, chance[half]);
      if (kMost) codes[2][half] = to.most.encode(top, chance[half]);
    }
    to.m.put(i, codes[0][0], codes[0][1]);
    to.v.put(i, codes[1][0], codes[1][1]);
    if (kMost) to.most.put(i, codes[2][0], codes[2][1]);
    store_parameter(t, p + i, param, chance[0], chance[1], elements);
  });
}

// Moments in 8 bits. The bounds of a few blocks are found first, which hides how long that takes.
template <typename T, bool kMost>
void update_eight_bit(const AdamWTensor& t, int64_t begin, int64_t end) {
  const AdamWNumbers<float> numbers(t);
  T *p = static_cast<T*>(t.p), *g = static_cast<T*>(t.g);
  std::vector<EightBitBlocks<kMost>> run;
  for (int64_t start = begin; start < end; start += kRun) {
    const int64_t last = std::min(end, start + kRun);
    run.clear();
    for (int64_t i = start; i < last; i += kBlock) {
      run.emplace_back(t, i / kBlock, numbers,
                       largest_magnitude(g + i, std::min(kBlock, last - i)));
    }
    for (int64_t i = start; i < last; i += kBlock) {
      update_eight_bit_block(t, numbers, p + i, g + i, std::min(kBlock, last - i),
                             run[(i - start) / kBlock]);
    }
  }
}

// The tensors of one parameter: values, gradient, moments. Where they do not lie in memory side by
// side, copies stand in for them.
class Together {
 public:
  Together(std::vector<Tensor> given, bool eight_bit) : given_(std::move(given)), used_(given_) {
    const Tensor& p = given_[0];
    bool alike = true;
    for (const Tensor& t : given_) alike = alike && t.is_contiguous();
    if (alike) return;
    int64_t span = 1;
    for (int64_t d = 0; d < p.dim(); ++d) span += (p.size(d) - 1) * p.stride(d);
    alike = !eight_bit && span == p.numel();
    for (const Tensor& t : given_) alike = alike && t.strides().vec() == p.strides().vec();
    if (!alike) {
      for (Tensor& t : used_) t = dense(t);
    }
  }
  void* data(size_t i) const { return i < used_.size() ? used_[i].mutable_data_ptr() : nullptr; }
  void copy_back(bool with_gradient) {
    for (size_t i = 0; i < given_.size(); ++i) {
      if (used_[i].const_data_ptr() != given_[i].const_data_ptr() && (i != 1 || with_gradient)) {
        torch::stable::copy_(given_[i], used_[i]);
      }
    }
  }

 private:
  std::vector<Tensor> given_, used_;
};

// Counts the step, and returns its number.
double count(const Tensor& step) {
  if (step.scalar_type() == ScalarType::Double) return ++*mutable_data<double>(step);
  return ++*mutable_data<float>(step);
}

double value(const Tensor& scalar) {
  return scalar.scalar_type() == ScalarType::Double ? *data<double>(scalar) : *data<float>(scalar);
}

bool is_scalar(const Tensor& t) {
  return t.numel() == 1 &&
         (t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::Double);
}

void expect_moment(const Tensor& p, const Tensor& m) {
  if (m.scalar_type() == ScalarType::Byte) {
    const int64_t blocks = (p.numel() + kBlock - 1) / kBlock;
    STD_TORCH_CHECK(m.is_contiguous() && m.numel() == blocks * kBlockBytes &&
                        p.scalar_type() != ScalarType::Double,
                    "adamw_step: moments in 8 bits must be [blocks, 132], of params that are not "
                    "float64");
    return;
  }
  STD_TORCH_CHECK(
      m.scalar_type() == accumulate_dtype(p.scalar_type()) && same_sizes(m, p),
      "adamw_step: moments must have the shape of params and be float32, or float64 for float64");
}

using Tensors = std::vector<Tensor>;

void expect_lists(const Tensors& params, const Tensors& grads, const Tensors& m, const Tensors& v,
                  const Tensors& most, const Tensors& steps) {
  const size_t size = params.size();
  STD_TORCH_CHECK(grads.size() == size && m.size() == size && v.size() == size &&
                      steps.size() == size && (most.empty() || most.size() == size),
                  "adamw_step: the lists must be of one length");
  for (size_t i = 0; i < size; ++i) {
    expect_float("adamw_step", params[i]);
    expect_like("adamw_step", "a gradient", grads[i], params[i]);
    expect_moment(params[i], m[i]);
    STD_TORCH_CHECK(m[i].scalar_type() == v[i].scalar_type() &&
                        (most.empty() || most[i].scalar_type() == m[i].scalar_type()),
                    "adamw_step: the moments of a parameter must have one dtype");
    expect_moment(params[i], v[i]);
    if (!most.empty()) expect_moment(params[i], most[i]);
    STD_TORCH_CHECK(is_scalar(steps[i]), "adamw_step: steps must be float scalars on the CPU");
  }
}

// Runs body(tensor, begin, end) over all values of all tensors, in runs of whole blocks.
template <typename Body>
void for_each_run(const std::vector<AdamWTensor>& tensors, int64_t blocks, Body body) {
  parallel_for(0, blocks, kGrainElements / kBlock, [&](int64_t begin, int64_t end) {
    auto t = std::upper_bound(tensors.begin(), tensors.end(), begin,
                              [](int64_t b, const AdamWTensor& x) { return b < x.first_block; }) -
             1;
    for (; begin < end; ++t) {
      const int64_t last = std::min(end, t->first_block + (t->n + kBlock - 1) / kBlock);
      if (begin < last) {
        body(*t, (begin - t->first_block) * kBlock,
             std::min(t->n, (last - t->first_block) * kBlock));
      }
      begin = last;
    }
  });
}

void adamw_step(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                Tensors max_exp_avg_sqs, Tensors steps, double lr, double beta1, double beta2,
                double eps, double weight_decay, bool maximize, double grad_scale,
                std::optional<Tensor> grad_norm, double max_norm, bool stochastic, int64_t seed) {
  expect_lists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps);
  double factor = 1;
  if (grad_norm) {
    STD_TORCH_CHECK(is_scalar(*grad_norm), "adamw_step: grad_norm must be a float scalar");
    factor = max_norm / (value(*grad_norm) / grad_scale + 1e-6);
    if (factor > 1) factor = 1;
  }
  std::vector<Together> kept;
  std::vector<AdamWTensor> tensors;
  kept.reserve(params.size());
  tensors.reserve(params.size());
  int64_t blocks = 0;
  bool eight_bit = false;
  for (size_t i = 0; i < params.size(); ++i) {
    const bool codes = exp_avgs[i].scalar_type() == ScalarType::Byte;
    Tensors of = {params[i], grads[i], exp_avgs[i], exp_avg_sqs[i]};
    if (!max_exp_avg_sqs.empty()) of.push_back(max_exp_avg_sqs[i]);
    const Together& together = kept.emplace_back(std::move(of), codes);
    const double number = count(steps[i]);
    AdamWTensor& t = tensors.emplace_back();
    t.p = together.data(0), t.g = together.data(1), t.m = together.data(2);
    t.v = together.data(3), t.most = together.data(4);
    t.n = params[i].numel();
    t.decay = 1 - lr * weight_decay;
    t.keep1 = 1 - beta1, t.beta2 = beta2, t.keep2 = 1 - beta2, t.eps = eps;
    t.step_size = lr / (1 - std::pow(beta1, number));
    t.inverse_root = 1 / std::sqrt(1 - std::pow(beta2, number));
    t.gradient_factor = maximize ? -factor : factor;
    t.unscale = 1 / grad_scale;
    t.seed = uint32_t(seed) * 0x9e3779b9 + uint32_t(i) * 0xc2b2ae35 + uint32_t(number) * 0x85ebca6b;
    t.stochastic = stochastic;
    t.first_block = blocks;
    blocks += (t.n + kBlock - 1) / kBlock;
    eight_bit = eight_bit || codes;
    t.update = dispatch_float(params[i].scalar_type(), "adamw_step", [&](auto type) {
      using T = decltype(type);
      if constexpr (!std::is_same_v<T, double>) {
        if (codes) return t.most ? update_eight_bit<T, true> : update_eight_bit<T, false>;
      }
      return t.most ? update<T, true> : update<T, false>;
    });
  }
  metalcore_variant = eight_bit ? "blocks_8bit" : "blocks";
  for_each_run(tensors, blocks,
               [](const AdamWTensor& t, int64_t begin, int64_t end) { t.update(t, begin, end); });
  for (Together& together : kept) together.copy_back(grad_scale != 1);
}

Tensor adamw_norm(Tensors grads) {
  struct Run {
    const void* x;
    int64_t n;
    double (*squares)(const void*, int64_t);
  };
  std::vector<Run> runs;
  bool wide = false;
  for (Tensor& g : grads) {
    g = dense(g);
    wide = wide || g.scalar_type() == ScalarType::Double;
    dispatch_float(g.scalar_type(), "adamw_norm", [&](auto type) {
      using T = decltype(type);
      for (int64_t i = 0; i < g.numel(); i += kSumValues) {
        runs.push_back({data<T>(g) + i, std::min(kSumValues, g.numel() - i),
                        [](const void* x, int64_t n) -> double {
                          return simd::sum_over<T>(n, [&](int64_t j, auto elements) {
                            const auto v = simd::load(static_cast<const T*>(x) + j, elements);
                            return v * v;
                          });
                        }});
      }
    });
  }
  std::vector<double> sums(runs.size());
  parallel_for(0, int64_t(runs.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) sums[r] = runs[r].squares(runs[r].x, runs[r].n);
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  metalcore_variant = "runs";
  Tensor norm = empty(nullptr, 0, wide ? ScalarType::Double : ScalarType::Float);
  if (wide) {
    *mutable_data<double>(norm) = std::sqrt(total);
  } else {
    *mutable_data<float>(norm) = float(std::sqrt(total));
  }
  return norm;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("adamw_step", kernel<&adamw_step>);
  m.impl("adamw_norm", kernel<&adamw_norm>);
}

}  // namespace metalcore::cpu
