// SPDX-License-Identifier: MIT
// Products of tensors, as MetalPerformancePrimitives has them: plain sums of products, in float or
// int, from the first to the last. They are in msl_mpp, which its header makes part of mpp.
#pragma once

namespace msl_mpp {
namespace tensor_ops {
using namespace metal;
using namespace metal::msl_tensor;

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m_, int n_, int k_ = -1, bool left = false, bool right = false,
                                bool relaxed = false, mode mode_ = mode::multiply)
      : m(m_),
        n(n_),
        k(k_ > 0 ? k_ : 0),
        transpose_left(left),
        transpose_right(right),
        relaxed_precision(relaxed),
        matmul_mode(mode_) {}
  // As a number it can be an argument of a template.
  constexpr operator unsigned long() const {
    return static_cast<unsigned long>(m) | static_cast<unsigned long>(n) << 16 |
           static_cast<unsigned long>(k) << 32 | static_cast<unsigned long>(transpose_left) << 56 |
           static_cast<unsigned long>(transpose_right) << 57 |
           static_cast<unsigned long>(matmul_mode == mode::multiply_accumulate) << 58;
  }
};

// One operand or the other, wherever it is, as a matrix of a lane's call.
struct msl_operands {
  const void *a, *b;
  void* c;
};

template <unsigned long D, typename Scope, typename... Arguments>
class matmul2d {
  static constexpr int M = int(D & 0xffff), N = int(D >> 16 & 0xffff), K = int(D >> 32 & 0xffffff);
  static constexpr bool kLeft = D >> 56 & 1, kRight = D >> 57 & 1, kAdds = D >> 58 & 1;
  static constexpr int T = Scope::threads;
  // As they are in memory: a transposed operand has its rows along k.
  static constexpr int kInner = K ? K : 16;
  template <typename E>
  using left_t = cooperative_tensor<E, kLeft ? kInner : M, kLeft ? M : kInner, T>;
  template <typename E>
  using right_t = cooperative_tensor<E, kRight ? N : kInner, kRight ? kInner : N, T>;
  template <typename A, typename B>
  using sum_t =
      conditional_t<is_integral_v<typename A::value_type> && is_integral_v<typename B::value_type>,
                    int, float>;

 public:
  template <typename A, typename B, typename C>
  static constexpr auto get_left_input_cooperative_tensor() {
    return left_t<A>{};
  }
  template <typename A, typename B, typename C>
  static constexpr auto get_right_input_cooperative_tensor() {
    return right_t<B>{};
  }
  template <typename A, typename B, typename C>
  static constexpr auto get_destination_cooperative_tensor() {
    return cooperative_tensor<C, M, N, T>{};
  }

  template <typename A, typename B, typename C>
  void run(const A& a, const B& b, C&& c) const {
    using Target = remove_cv_t<remove_reference_t<C>>;
    if constexpr (is_cooperative_tensor_v<A> || is_cooperative_tensor_v<B>) {
      static_assert(T == 32, "operands in registers are those of one simdgroup");
      run_in_registers(in_registers<left_t>(a), in_registers<right_t>(b), c);
    } else {
      // Each thread computes its own elements.
      if constexpr (T >= 32) {
        msl_collective(nullptr, 0, msl_serve_all, msl::kCooperative, 0);
      }
      cooperative_tensor<typename Target::value_type, M, N, T> own{};
      for (int i = 0; i < own.capacity(); ++i) {
        const auto at = own.place(i);
        if (!at.exists()) continue;
        if constexpr (is_cooperative_tensor_v<Target>) {
          if (!is_inside(a, b, at.row, at.column)) continue;
          put(c[i], product(a, b, at.row, at.column));
        } else if (at.column < c.get_extent(0) && at.row < c.get_extent(1)) {
          put(c.at(at.column, at.row), product(a, b, at.row, at.column));
        }
      }
    }
  }

 private:
  template <typename E, typename S>
  static void put(E& target, S sum) {
    target = E(kAdds ? S(target) + sum : sum);
  }
  template <typename A, typename B>
  static bool is_inside(const A& a, const B& b, int row, int column) {
    return row < int(a.get_extent(kLeft ? 0 : 1)) && column < int(b.get_extent(kRight ? 1 : 0));
  }
  template <typename A, typename B>
  static sum_t<A, B> product(const A& a, const B& b, int row, int column) {
    using S = sum_t<A, B>;
    const int length = int(a.get_extent(kLeft ? 1 : 0));
    const int others = int(b.get_extent(kRight ? 0 : 1));
    int count = length < others ? length : others;
    if (K && K < count) count = K;
    S sum = 0;
    for (int k = 0; k < count; ++k) {
      const S x = S(kLeft ? a.at(row, k) : a.at(k, row));
      const S y = S(kRight ? b.at(k, column) : b.at(column, k));
      sum = accumulate(x, y, sum);
    }
    return sum;
  }
  static float accumulate(float x, float y, float sum) { return __builtin_fmaf(x, y, sum); }
  static int accumulate(int x, int y, int sum) { return sum + x * y; }

  template <template <typename> class Held, typename X>
  static auto in_registers(const X& x) {
    if constexpr (is_cooperative_tensor_v<X>) {
      return x;
    } else {
      Held<typename X::value_type> r{};
      r.load(x);
      return r;
    }
  }
  template <typename A, typename B, typename C>
  static void run_in_registers(const A& a, const B& b, C& c) {
    using Sum = cooperative_tensor<sum_t<A, B>, M, N, T>;
    Sum sum{};
    A own_a = a;
    B own_b = b;
    msl_operands p{&own_a, &own_b, &sum};
    msl_collective(&p, 0, serve<A, B, Sum>, msl::kCooperative, 0);
    for (int i = 0; i < Sum::layout::capacity; ++i) {
      const auto at = Sum::place(i);
      if (!at.exists()) continue;
      if constexpr (is_cooperative_tensor_v<C>) {
        put(c[i], sum[i]);
      } else if (at.column < c.get_extent(0) && at.row < c.get_extent(1)) {
        put(c.at(at.column, at.row), sum[i]);
      }
    }
  }
  template <typename A, typename B, typename Sum>
  MSL_UNWATCHED static void serve(msl::Collective* k) {
    if (!msl_all_lanes(k)) return;
    using S = typename Sum::value_type;
    S a[M][kInner], b[kInner][N];
    for (unsigned lane = 0; lane < 32; ++lane) {
      const msl_operands* p = static_cast<msl_operands*>(k->value[lane]);
      for (int i = 0; i < A::layout::capacity; ++i) {
        const typename A::layout at(lane, i);
        if (at.exists()) {
          (kLeft ? a[at.column][at.row] : a[at.row][at.column]) =
              S(static_cast<const A*>(p->a)->elements[i]);
        }
      }
      for (int i = 0; i < B::layout::capacity; ++i) {
        const typename B::layout at(lane, i);
        if (at.exists()) {
          (kRight ? b[at.column][at.row] : b[at.row][at.column]) =
              S(static_cast<const B*>(p->b)->elements[i]);
        }
      }
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
      Sum* c = static_cast<Sum*>(static_cast<msl_operands*>(k->value[lane])->c);
      for (int i = 0; i < Sum::layout::capacity; ++i) {
        const typename Sum::layout at(lane, i);
        if (!at.exists()) continue;
        S sum = 0;
        for (int l = 0; l < kInner; ++l) sum = accumulate(a[at.row][l], b[l][at.column], sum);
        c->elements[i] = sum;
      }
    }
  }
};
}  // namespace tensor_ops
}  // namespace msl_mpp
