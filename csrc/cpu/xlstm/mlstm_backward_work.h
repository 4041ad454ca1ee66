// SPDX-License-Identifier: MIT
// The memory of a task of the mLSTM's gradient.
#pragma once

#include <memory>

#include "mlstm.h"

namespace metalcore::cpu::mlstm {

// The memory of a task. Rows are of whole Pairs; rows that become lanes are kWidth at a time.
template <typename T>
struct Work {
  using A = Acc<T>;

  int64_t dp, ep, rows, turned;
  tiles::Pieces<A> memory;
  Chunk<A> here;
  Lines<A> qs, ks, vs, us, dqs, dks, dvs, dC, S, P, weights;
  A *dn, *products, *dl, *panel;
  // before each chunk, and after the last: C^T [E, dp], then n
  A* states;
  std::unique_ptr<A[]> many_states;

  static int64_t values(int64_t chunk, int64_t dp, int64_t ep, int64_t rows, int64_t turned) {
    const auto size = [](int64_t n) { return tiles::Pieces<A>::size(n); };
    return Chunk<A>::values(chunk) + size(rows * dp) * 3 + size(rows * ep) * 3 +
           size(rows * turned) + size(turned * ep) + 3 * size(rows * rows) + size(dp) +
           2 * size(rows) + size(std::max(dp, ep) * kWidth<A>);
  }

  // Room for `chunks` states and one more; a thread keeps it, but for those of long sequences.
  Work(int64_t D, int64_t E, int64_t chunk, int64_t chunks)
      : dp(padded<T>(D)),
        ep(padded<T>(E)),
        rows(product::round_up(chunk, kWidth<A>)),
        turned(product::round_up(dp, kWidth<A>)),
        memory(values(chunk, dp, ep, rows, turned) + kept_states(E, chunks)),
        here(memory, chunk) {
    const int64_t all = (chunks + 1) * each_state(E);
    if (kept_states(E, chunks)) {
      states = memory.take(all);
    } else {
      many_states = std::make_unique_for_overwrite<A[]>(all);
      states = many_states.get();
    }
    for (Lines<A>* x : {&qs, &ks, &dqs}) *x = {memory.take(rows * dp), dp};
    for (Lines<A>* x : {&vs, &us, &dvs}) *x = {memory.take(rows * ep), ep};
    dks = {memory.take(rows * turned), turned};
    dC = {memory.take(turned * ep), ep};
    for (Lines<A>* x : {&S, &P, &weights}) *x = {memory.take(rows * rows), rows};
    dn = memory.take(dp);
    products = memory.take(rows), dl = memory.take(rows);
    panel = memory.take(std::max(dp, ep) * kWidth<A>);
    for (Lines<A> x : {qs, ks}) std::fill_n(x.values, rows * dp, A(0));
    for (Lines<A> x : {vs, us}) std::fill_n(x.values, rows * ep, A(0));
    std::fill_n(dC.values, turned * ep, A(0));
    std::fill_n(dn, dp, A(0));
  }

  int64_t each_state(int64_t E) const { return E * dp + dp; }
  int64_t kept_states(int64_t E, int64_t chunks) const {
    constexpr int64_t kMostBytes = 8 << 20;
    const int64_t all = tiles::Pieces<A>::size((chunks + 1) * each_state(E));
    return all * int64_t(sizeof(A)) <= kMostBytes ? all : 0;
  }
};

}  // namespace metalcore::cpu::mlstm
