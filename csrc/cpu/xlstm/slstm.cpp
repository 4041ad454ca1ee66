// SPDX-License-Identifier: MIT
// sLSTM over sequences, on the CPU. What a step computes is in slstm.h.
//
// A task is a head of a few batch entries, step by step; its weights stay in the cache.

#include "slstm.h"

namespace metalcore::cpu {
namespace {

using namespace slstm;

template <typename T>
void run(const Sizes& s, const Weights<Acc<T>>& weights, const T* x, const Acc<T>* states, T* y,
         Acc<T>* last) {
  using A = Acc<T>;
  tiles::for_each_task(s.tasks(), s.is_worth_threads(), [&](int64_t number) {
    const Task<T> task(s, weights, number);
    const int64_t dp = weights.dp, each = Pieces<A>::size(task.rows * dp);
    Pieces<A> memory(4 * each + Pieces<A>::size(task.rows * weights.width()));
    const slstm::States<A> now{memory.take(task.rows * dp), memory.take(task.rows * dp),
                               memory.take(task.rows * dp), memory.take(task.rows * dp)};
    A* const gates = memory.take(task.rows * weights.width());
    std::fill_n(gates, task.rows * weights.width(), A(0));
    task.start(states, now);
    for (int64_t t = 0; t < s.steps; ++t) {
      task.run(x, t, gates, now, now, nullptr);
      for (int64_t r = 0; r < task.rows; ++r) {
        narrow_row(now.y + r * dp, s.size, y + task.result(r, t));
      }
    }
    task.end(now, last);
  });
}

std::tuple<Tensor, Tensor> slstm_forward(const Tensor& x_in, const Tensor& recurrent,
                                         std::optional<Tensor> bias,
                                         std::optional<Tensor> states_in,
                                         std::optional<double> clip) {
  const char* op = "slstm";
  const Sizes s = sizes_of(op, x_in, recurrent, bias, states_in, clip);
  const Tensor x = dense(x_in), states = states_in ? dense(*states_in) : x;
  const ScalarType dtype = x.scalar_type();
  const int64_t sizes[] = {s.batch, s.steps, s.heads, s.size};
  const int64_t of_state[] = {s.batch, 4, s.heads, s.size};
  Tensor y = empty(sizes, 4, dtype), last = empty(of_state, 4, accumulate_dtype(dtype));
  metalcore_variant = "steps";
  dispatch_float(dtype, op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const Weights<A> weights(s, recurrent, bias, false);
    run<T>(s, weights, data<T>(x), states_in ? data<A>(states) : nullptr, mutable_data<T>(y),
           mutable_data<A>(last));
  });
  return {y, last};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("slstm", kernel<&slstm_forward>); }

}  // namespace metalcore::cpu
