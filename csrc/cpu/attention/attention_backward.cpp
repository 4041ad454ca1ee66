// SPDX-License-Identifier: MIT
// The gradient of attention on the CPU, tile by tile, without a matrix of scores.
//   P^T = exp(S^T - lse),  dS^T = P^T * (dP^T - delta),  delta = dO.O - dlse
// The products between are in backward_products.h.
// Queries stand in the lanes, as in the way forward; for dK and dV it is the head's elements. A
// task owns the keys it adds gradients to, and goes through the heads of their group in order;
// where there are few heads, keys are split into parts, whose dQ are added in order. Sums are kept
// in float32 (float64), and depend on shapes alone.

#include <memory>
#include <tuple>

#include "backward_products.h"
#include "backward_rows.h"

namespace metalcore::cpu {
namespace {

using namespace tiles;

// Tasks to make of a call with fewer groups of heads, and the fewest keys of each.
constexpr int64_t kTasks = 8, kPartKeys = 4 * kKeys;

template <typename A>
std::unique_ptr<A[]> memory_of(int64_t values) {
  return std::make_unique_for_overwrite<A[]>(std::max<int64_t>(1, values));
}

template <typename T, typename Products>
struct Backward {
  using A = Acc<T>;
  static constexpr int64_t W = kWidth<A>;

  const Problem<A>& problem;
  Heads<const T> q, k, v, dout;
  Heads<T> dq, dk, dv;
  const A *lse, *delta;  // [B, H, Tq]
  A* partial;            // dq of each part [parts, B, H, Tq, width], where there are several
  int64_t parts;
  int64_t width, value_width;  // head sizes in whole Pairs
  Products products;

  struct Task {
    Sequence sequence;
    int64_t key_head, part;
    Keys keys;
  };

  // Of a head's queries, panel by panel.
  struct Head {
    PanelMemory<A> panels;
    A* sums;  // dQ in lanes
    A *lse, *delta;
  };

  struct Memory {
    Head head;
    TileMemory<A> tile;
    A *rows, *factors;  // of a panel
    A *dkeys, *dvalues;
  };

  // Whether one head alone adds to the keys of a task: sums of a tile are then done with it.
  bool is_by_tiles() const { return problem.sizes.group() == 1; }

  Memory memory(const Task& t) const {
    const int64_t sums = is_by_tiles() ? std::min(kKeys, t.keys.count()) : t.keys.count();
    const int64_t lanes = product::round_up(t.sequence.queries, W);
    const int64_t wide = std::max(width, value_width);
    const int64_t sizes[] = {lanes * width,
                             lanes * value_width,
                             lanes * width,
                             lanes * value_width,
                             lanes * width,
                             lanes,
                             lanes,
                             kKeys * width,
                             kKeys * value_width,
                             kKeys * W,
                             kKeys * W,
                             kKeys * W,
                             kKeys * W,
                             W * wide,
                             W,
                             sums * width,
                             sums * value_width};
    int64_t total = 0;
    for (const int64_t n : sizes) total += Pieces<A>::size(n);
    Pieces<A> pieces(total);
    A* p[17];
    for (int i = 0; i < 17; ++i) p[i] = pieces.take(sizes[i]);
    return {{{p[0], p[1], p[2], p[3]}, p[4], p[5], p[6]},
            {p[7], p[8], p[9], p[10], p[11], p[12]},
            p[13],
            p[14],
            p[15],
            p[16]};
  }

  // `count` rows of x and W - count of zeros, also where a query has no keys: it may hold anything.
  void load_rows(const Heads<const T>& x, const Task& t, const Panel& p, const A* lse_of, int64_t n,
                 int64_t row, A* to) const {
    const T* from = x.at(t.sequence.batch, p.head, t.sequence.first_query + p.first);
    product::widen_rows(from, x.row, p.count, n, {to, row});
    for (int64_t i = 0; i < W; ++i) {
      if (i >= p.count || lse_of[i] == std::numeric_limits<A>::infinity()) {
        std::fill_n(to + i * row, row, A(0));
      }
    }
  }

  Panel panel(const Task& t, int64_t head, int64_t i) const {
    return {head, i * W, std::min(W, t.sequence.queries - i * W)};
  }

  PanelMemory<A> panel_memory(const Head& m, int64_t i) const {
    const PanelMemory<A>& p = m.panels;
    return {p.queries + i * W * width, p.gradients + i * W * value_width, p.rows + i * W * width,
            p.gradient_rows + i * W * value_width};
  }

  void start_head(const Task& t, int64_t head, const Head& m, A* scratch) const {
    const Sizes& s = problem.sizes;
    const int64_t panels = (t.sequence.queries + W - 1) / W;
    for (int64_t i = 0; i < panels; ++i) {
      const Panel p = panel(t, head, i);
      const int64_t from =
          (t.sequence.batch * s.heads + head) * s.queries + t.sequence.first_query + p.first;
      for (int64_t l = 0; l < W; ++l) {
        const bool has_keys = l < p.count && lse[from + l] != kHidden<A>;
        // exp(score - inf) is 0
        m.lse[i * W + l] = has_keys ? lse[from + l] : -kHidden<A>;
        m.delta[i * W + l] = has_keys ? delta[from + l] : A(0);
      }
      const PanelMemory<A> memory = panel_memory(m, i);
      load_rows(q, t, p, m.lse + i * W, s.size, width, memory.rows);
      load_rows(dout, t, p, m.lse + i * W, s.value_size, value_width, memory.gradient_rows);
      products.start(memory, scratch);
    }
    std::fill_n(m.sums, panels * W * width, A(0));
  }

  // Scores become P, and the gradients of P those of the scores.
  template <bool kHides>
  void pull_back(int64_t keys, const A* lse_of, const A* delta_of, const TileMemory<A>& m) const {
    change_scores(m.scores, keys, [&](Vec<A> x, int64_t k, int j) {
      constexpr int64_t L = kLanes<A>;
      A* const at = m.gradients + k * W + j * L;
      Vec<A> share = simd::exp(x - simd::load_as<Vec<A>>(lse_of + j * L));
      Vec<A> d = share * (simd::load_as<Vec<A>>(at) - simd::load_as<Vec<A>>(delta_of + j * L));
      if (problem.softcap) d *= simd::load_as<Vec<A>>(m.slopes + k * W + j * L);
      if constexpr (kHides) {
        d = x == kHidden<A> ? Vec<A>{} : d;
        share = x == kHidden<A> ? -Vec<A>{} : share;
      }
      std::memcpy(at, &d, sizeof(d));
      return share;
    });
  }

  // Adds what panel i of a head and the keys it sees of the tile give each other.
  void add(const Task& t, int64_t head, int64_t i, Keys range, const typename Products::Tile& tile,
           const Memory& m) const {
    const Panel of = panel(t, head, i);
    const Keys near = problem.range(t.sequence, of);
    Keys seen{std::max(range.begin, near.begin), std::min(range.end, near.end)};
    if (seen.count() <= 0) return;
    const int64_t skipped = products.whole(seen.begin - range.begin);
    seen.begin = range.begin + skipped;
    const int64_t count = seen.count();
    const TileMemory<A>& w = m.tile;
    const Cover mask = cover(problem.mask, t.sequence, of, seen, w.bias);
    if (mask == Cover::kAll) return;
    const PanelMemory<A> queries = panel_memory(m.head, i);
    products.scores(queries, tile, skipped, count, w.scores);
    const Cover hides =
        finish_scores<A>(problem, t.sequence, of, seen, mask, w.scores, w.bias, w.slopes);
    products.gradients(queries, tile, skipped, count, w.gradients);
    if (hides == Cover::kSome) {
      pull_back<true>(count, m.head.lse + i * W, m.head.delta + i * W, w);
    } else {
      pull_back<false>(count, m.head.lse + i * W, m.head.delta + i * W, w);
    }
    const int64_t from = seen.begin - (is_by_tiles() ? range : t.keys).begin;
    products.add(
        queries, tile, skipped, count, of.count, hides, w,
        {m.dvalues + from * value_width, m.dkeys + from * width, m.head.sums + i * W * width});
  }

  void finish_head(const Task& t, int64_t head, const Memory& m) const {
    const Sizes& s = problem.sizes;
    std::fill_n(m.factors, W, problem.scale);
    for (int64_t i = 0; i * W < t.sequence.queries; ++i) {
      const Panel p = panel(t, head, i);
      const int64_t row = t.sequence.first_query + p.first;
      product::from_lanes<A>(m.head.sums + i * W * width, width, m.factors, {m.rows, width});
      for (int64_t l = 0; l < p.count; ++l) {
        const A* from = m.rows + l * width;
        if (parts > 1) {
          const int64_t entry = t.part * s.batch + t.sequence.batch;
          std::copy_n(from, width,
                      partial + ((entry * s.heads + head) * s.queries + row + l) * width);
        } else {
          store_row(from, A(1), s.size, dq.at(t.sequence.batch, head, row + l));
        }
      }
    }
  }

  static void store_row(const A* from, A factor, int64_t n, T* to) {
    simd::for_each_pair<T>(n, [&](int64_t d, auto elements) {
      simd::store_in_order(to + d, simd::load(from + d) * factor, elements);
    });
  }

  void start_keys(Keys keys, const Memory& m) const {
    std::fill_n(m.dkeys, keys.count() * width, A(0));
    std::fill_n(m.dvalues, keys.count() * value_width, A(0));
  }

  void finish_keys(const Task& t, Keys keys, const Memory& m) const {
    const Sizes& s = problem.sizes;
    for (int64_t i = 0; i < keys.count(); ++i) {
      const int64_t row = t.sequence.first_key + keys.begin + i;
      store_row(m.dkeys + i * width, problem.scale, s.size,
                dk.at(t.sequence.batch, t.key_head, row));
      store_row(m.dvalues + i * value_width, A(1), s.value_size,
                dv.at(t.sequence.batch, t.key_head, row));
    }
  }

  void operator()(const Task& t) const {
    const Sizes& s = problem.sizes;
    const Memory m = memory(t);
    if (!is_by_tiles()) start_keys(t.keys, m);
    const int64_t panels = (t.sequence.queries + W - 1) / W;
    typename Products::Tile tile;
    for (int64_t head = t.key_head * s.group(); head < (t.key_head + 1) * s.group(); ++head) {
      start_head(t, head, m.head, m.rows);
      for (int64_t begin = t.keys.begin; begin < t.keys.end; begin += kKeys) {
        const Keys range{begin, std::min(begin + kKeys, t.keys.end)};
        const int64_t row = t.sequence.first_key + begin;
        products.load(k.at(t.sequence.batch, t.key_head, row), k.row,
                      v.at(t.sequence.batch, t.key_head, row), v.row, range.count(), m.tile, tile);
        if (is_by_tiles()) start_keys(range, m);
        for (int64_t i = 0; i < panels; ++i) add(t, head, i, range, tile, m);
        if (is_by_tiles()) finish_keys(t, range, m);
      }
      finish_head(t, head, m);
    }
    if (!is_by_tiles()) finish_keys(t, t.keys, m);
  }

  // The sum of the parts' dq, in order.
  void add_parts() const {
    const Sizes& s = problem.sizes;
    const int64_t rows = s.batch * s.heads * s.queries;
    parallel_for(0, rows, grain_rows(width * parts), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* const to = dq.at(r / (s.heads * s.queries), r / s.queries % s.heads, r % s.queries);
        simd::for_each_pair<T>(s.size, [&](int64_t d, auto elements) {
          simd::Pair<A> sum = {};
          for (int64_t p = 0; p < parts; ++p) {
            sum += simd::load(partial + (p * rows + r) * width + d);
          }
          simd::store_in_order(to + d, sum, elements);
        });
      }
    });
  }
};

template <typename B>
std::vector<typename B::Task> tasks_of(const B& b) {
  std::vector<typename B::Task> tasks;
  for (const Sequence& sequence : b.problem.sequences) {
    const int64_t each = (sequence.keys + b.parts - 1) / b.parts;
    for (int64_t h = 0; h < b.problem.sizes.key_heads; ++h) {
      for (int64_t part = 0; part < b.parts; ++part) {
        const Keys keys{std::min(part * each, sequence.keys),
                        std::min((part + 1) * each, sequence.keys)};
        tasks.push_back({sequence, h, part, keys});
      }
    }
  }
  return tasks;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout_in, std::optional<Tensor> dlse_in, const Tensor& out_in,
    const Tensor& lse_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    std::optional<Tensor> mask, std::optional<Tensor> slopes, std::optional<Tensor> sinks,
    std::optional<Tensor> starts_q, std::optional<Tensor> starts_k, double scale,
    std::optional<double> softcap, std::optional<int64_t> left, std::optional<int64_t> right) {
  const char* op = "attention_backward";
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in),
               v = with_contiguous_rows(v_in), dout = with_contiguous_rows(dout_in),
               out = with_contiguous_rows(out_in);
  const Sizes s = sizes_of(op, q, k, v);
  expect_rows(op, "out", out, s, q.scalar_type());
  expect_rows(op, "dout", dout, s, q.scalar_type());
  const ScalarType sums = accumulate_dtype(q.scalar_type());
  const Tensor lse = dense(lse_in);
  expect_per_row(op, "lse", lse, s, sums);
  std::optional<Tensor> dlse;
  if (dlse_in) {
    dlse = dense(*dlse_in);
    expect_per_row(op, "dlse", *dlse, s, sums);
  }
  Tensor dq = empty_heads(s.batch, s.heads, s.queries, s.size, q.scalar_type());
  Tensor dk = empty_heads(s.batch, s.key_heads, s.keys, s.size, q.scalar_type());
  Tensor dv = empty_heads(s.batch, s.key_heads, s.keys, s.value_size, q.scalar_type());
  return dispatch_float(q.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    Held held;
    const Problem<A> problem = problem_of<A>(op, s, mask, slopes, sinks, starts_q, starts_k, scale,
                                             softcap, left, right, held);
    const int64_t width = product::round_up(s.size, simd::kStep<T>);
    const int64_t groups = std::max<int64_t>(1, int64_t(problem.sequences.size()) * s.key_heads);
    const int64_t parts =
        std::max<int64_t>(1, std::min((kTasks + groups - 1) / groups, s.keys / kPartKeys));
    const int64_t rows = s.batch * s.heads * s.queries;
    const auto delta = memory_of<A>(rows);
    row_products<T>(s, dout, out, dlse ? data<A>(*dlse) : nullptr, delta.get());
    const auto partial = memory_of<A>(parts > 1 ? parts * rows * width : 0);
    const int64_t value_width = product::round_up(s.value_size, simd::kStep<T>);
    const auto run = [&](auto products, const char* variant) {
      const Backward<T, decltype(products)> backward{problem,
                                                     Heads<const T>(q),
                                                     Heads<const T>(k),
                                                     Heads<const T>(v),
                                                     Heads<const T>(dout),
                                                     Heads<T>(dq),
                                                     Heads<T>(dk),
                                                     Heads<T>(dv),
                                                     data<A>(lse),
                                                     delta.get(),
                                                     partial.get(),
                                                     parts,
                                                     width,
                                                     value_width,
                                                     products};
      const auto tasks = tasks_of(backward);
      metalcore_variant = variant;
      for_each_task(int64_t(tasks.size()), is_worth_threads(s),
                    [&](int64_t t) { backward(tasks[t]); });
      if (parts > 1) backward.add_parts();
    };
    if (takes_dots<T>(s.size) && takes_dots<T>(s.value_size)) {
#if defined(MC_DOTS)
      if constexpr (std::is_same_v<T, simd::BFloat16>) {
        run(ByDots{problem, width, value_width}, parts > 1 ? "panels_dots_split" : "panels_dots");
      }
#endif
    } else {
      run(ByFloats<T>{problem, width, value_width}, parts > 1 ? "panels_split" : "panels");
    }
    const Tensor dsinks = sink_gradients(problem, sinks, data<A>(lse), delta.get());
    return std::tuple<Tensor, Tensor, Tensor, Tensor>(dq, dk, dv, dsinks);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("attention_backward", kernel<&attention_backward>);
}

}  // namespace metalcore::cpu
