// SPDX-License-Identifier: MIT
// One replay of a tape, for M tokens. Token m is written to slot slots[m] of row rows[m] of the
// cache [layers, 2, rows, heads, slots, size], and sees the keys from starts[m] on. A cache of 8
// bits has scales [layers, 2, rows, heads, slots].
//
// Threads share each stage's tasks and wait for its end before the next. Each has a run of tasks,
// so that it goes on in memory where it was, and then takes those of others: whoever comes late
// finds its tasks taken, and no number of threads is needed.
#pragma once

#include <atomic>
#include <thread>

#include "../attention/encode.h"
#include "../attention/parts.h"
#include "linear.h"
#include "rows.h"

namespace metalcore::cpu::decode {

struct Token {
  int64_t id, row, slot, start;

  int64_t position() const { return slot - start; }
};

// What is in memory where: the tensors of a call, of which `check` looks at each.
struct Memory {
  std::vector<Tensor> tensors;
  Tensor cache;
  std::optional<Tensor> scales;
  std::vector<Token> tokens;

  int64_t layers() const { return cache.size(0); }
  int64_t rows() const { return cache.size(2); }
  int64_t heads() const { return cache.size(3); }
  int64_t slots() const { return cache.size(4); }
  int64_t size() const { return cache.size(5); }
};

// Work of a step, in products, from which on threads are worth their waiting.
inline const Knob threads_from("decode_step", "threads_from", 1 << 20);

inline void rest() {
#if defined(__SSE2__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename S>
class Step {
 public:
  Step(const Tape& tape, const Memory& memory, const Tensor& out)
      : tape_(tape), memory_(memory), M_(int64_t(memory.tokens.size())) {
    int64_t values = 0;
    for (const int64_t n : tape.buffers) values += padded(M_ * n);
    floats_ = std::make_unique_for_overwrite<float[]>(values);
    float* next = floats_.get();
    for (size_t b = 0; b < tape.buffers.size(); ++b) {
      buffers_.push_back(int64_t(b) == tape.out ? mutable_data<float>(out) : next);
      next += padded(M_ * tape.buffers[b]);
    }
    activations_.resize(tape.buffers.size());
    products_.resize(tape.nodes.size());
    attends_.resize(tape.nodes.size(), -1);
    for (size_t i = 0; i < tape.nodes.size(); ++i) prepare(i);
  }

  void run() {
    const bool is_worth = tape_.weights * M_ >= threads_from;
    threads_ = is_worth ? int64_t(torch::stable::get_num_threads()) : 1;
    if (threads_ == 1) {
      for (const Stage& stage : tape_.stages) {
        const int64_t tasks = tasks_of(stage);
        for (int64_t t = 0; t < tasks; ++t) task(stage, t, tasks);
      }
      return;
    }
    std::vector<Counter> done(tape_.stages.size()), next(done.size() * threads_);
    parallel_for(0, threads_, 1, [&](int64_t own, int64_t) { take_part(own, next, done); });
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> tasks = 0;
  };

  struct Attend {
    tiles::Problem<float> problem;
    tiles::Cache<S> cache;
    const Node* node;
    std::shared_ptr<const tiles::Parts<float, S>> parts;
  };

  static int64_t padded(int64_t n) { return product::round_up(n, 16); }

  float* at(const Place& place, int64_t m) const {
    return buffers_[place.buffer] + m * tape_.buffers[place.buffer] + place.offset;
  }

  const float* floats(int64_t tensor) const {
    return tensor < 0 ? nullptr : data<float>(memory_.tensors[tensor]);
  }

  void prepare(size_t i) {
    const Node& node = tape_.nodes[i];
    if (node.kind == Kind::kQuantize) {
      const int count = int(node.bytes);
      activations_[node.x.buffer] = {M_, node.parts, count, !quant::takes_bytes(count)};
    } else if (node.kind == Kind::kLinear) {
      const Tensor& w = memory_.tensors[node.tiles >= 0 ? node.tiles : node.w];
      products_[i] = {&node,
                      w.scalar_type(),
                      w.const_data_ptr(),
                      floats(node.bias),
                      at(node.x, 0),
                      tape_.buffers[node.x.buffer],
                      &activations_[node.x.buffer],
                      at(node.y, 0),
                      tape_.buffers[node.y.buffer]};
    } else if (node.kind == Kind::kAttend) {
      attends_[i] = attends_[i + 1] = int64_t(attend_.size());
      prepare_attention(node);
    }
  }

  void prepare_attention(const Node& node) {
    Attend made;
    made.node = &node;
    made.problem.sizes = {memory_.rows(),  node.heads, node.key_heads, M_,
                          memory_.slots(), node.size,  node.size};
    made.problem.scale = float(node.scale);
    if (node.cap > 0) made.problem.softcap = float(node.cap);
    made.problem.left = node.window > 0 ? node.window - 1 : tiles::reach(std::nullopt);
    made.problem.right = 0;
    made.problem.sinks = floats(node.w);
    const int64_t row = node.size, head = row * memory_.slots(), page = head * node.key_heads;
    made.cache.k = {stored(node.layer, 0), page, row, head};
    made.cache.v = {stored(node.layer, 1), page, row, head};
    if (memory_.scales) {
      made.cache.k_scale = {scales(node.layer, 0), page / row, 1, head / row};
      made.cache.v_scale = {scales(node.layer, 1), page / row, 1, head / row};
    }
    for (const Attend& other : attend_) {
      const Node& n = *other.node;
      if (n.heads == node.heads && n.window == node.window) made.parts = other.parts;
    }
    if (!made.parts) {
      std::vector<tiles::Sequence> sequences;
      for (int64_t m = 0; m < M_; ++m) {
        const Token& t = memory_.tokens[m];
        sequences.push_back({t.row, m, 1, t.start, t.position() + 1});
      }
      made.parts = std::make_shared<const tiles::Parts<float, S>>(few(made), sequences);
    }
    attend_.push_back(std::move(made));
  }

  // Keys (0) or values (1) of a layer, and their scales.
  S* stored(int64_t layer, int64_t which) const {
    return static_cast<S*>(memory_.cache.mutable_data_ptr()) +
           (2 * layer + which) * vectors() * memory_.size();
  }

  float* scales(int64_t layer, int64_t which) const {
    return mutable_data<float>(*memory_.scales) + (2 * layer + which) * vectors();
  }

  int64_t vectors() const { return memory_.rows() * memory_.heads() * memory_.slots(); }

  tiles::FewQueries<float, S> few(const Attend& a) const {
    const Node& node = *a.node;
    const int64_t width = product::round_up(node.size, simd::kStep<float>);
    const auto heads = [&](const Place& place) {
      return tiles::Heads<float>(at(place, 0), 0, node.size, tape_.buffers[place.buffer]);
    };
    const auto q = heads(node.x);
    return {a.problem, tiles::Heads<const float>(q.values, q.batch, q.head, q.row),
            a.cache,   heads(node.y),
            nullptr,   width,
            width};
  }

  int64_t tasks_of(const Stage& stage) const {
    if (stage.kind == Kind::kAttend) {
      return int64_t(attend_[attends_[stage.first]].parts->tasks.size());
    }
    if (stage.kind != Kind::kLinear) return M_;
    constexpr int64_t kTasksEach = 4;
    return threads_ == 1 ? 1 : std::min(units_of(stage), kTasksEach * threads_);
  }

  int64_t units_of(const Stage& stage) const {
    int64_t units = 0;
    for (size_t i = 0; i < stage.count; ++i) units += products_[stage.first + i].units();
    return units;
  }

  void task(const Stage& stage, int64_t t, int64_t tasks) {
    if (stage.kind == Kind::kAttend) {
      const Attend& a = attend_[attends_[stage.first]];
      few(a)(a.parts->tasks[t]);
    } else if (stage.kind == Kind::kLinear) {
      multiply(stage, t, tasks);
    } else {
      for (size_t i = 0; i < stage.count; ++i) row(stage.first + i, t);
    }
  }

  void multiply(const Stage& stage, int64_t t, int64_t tasks) const {
    const int64_t units = units_of(stage), end = units * (t + 1) / tasks;
    float* const sums = lanes::workspace<float>(M_ * kUnit);
    int64_t first = 0;
    for (size_t i = 0; i < stage.count; ++i) {
      const Product& p = products_[stage.first + i];
      const int64_t begin = std::max(first, units * t / tasks);
      for (int64_t u = begin; u < std::min(end, first + p.units()); ++u) {
        multiply_unit(p, u - first, M_, sums);
      }
      first += p.units();
    }
  }

  void row(size_t i, int64_t m) {
    const Node& node = tape_.nodes[i];
    switch (node.kind) {
      case Kind::kEmbed:
        return embed(node, m);
      case Kind::kNorm:
        return normalize(node, at(node.x, m), floats(node.w), at(node.y, m));
      case Kind::kQuantize:
        return quant::put_row(at(node.x, m), node.n, activations_[node.x.buffer], m);
      case Kind::kRope:
        return rotate(node, m);
      case Kind::kMerge:
        return merge(attend_[attends_[i]], m);
      case Kind::kGlu:
        return gate(node, at(node.x, m), at(node.z, m), at(node.y, m));
      case Kind::kAdd:
        return add_row(node, at(node.x, m), at(node.y, m));
      case Kind::kSoftCap:
        return cap_row(node, at(node.x, m), at(node.y, m));
      case Kind::kLinear:
      case Kind::kAttend:
        return;
    }
  }

  void embed(const Node& node, int64_t m) const {
    const Tensor& table = memory_.tensors[node.w];
    const int64_t id = memory_.tokens[m].id;
    float* const y = at(node.y, m);
    if (node.type >= 0) {
      quant::dispatch_type(kOp, node.type, [&](auto type) {
        constexpr int64_t kType = decltype(type)::value;
        const auto from = static_cast<const uint8_t*>(table.const_data_ptr());
        quant::row_floats<kType>(from + id * table.size(1), node.n / quant::block_values(kType), y);
      });
    } else {
      dispatch_float(table.scalar_type(), kOp, [&](auto type) {
        const auto from = data<decltype(type)>(table) + id * node.n;
        for (int64_t i = 0; i < node.n; ++i) y[i] = float(from[i]);
      });
    }
    for (int64_t i = 0; i < node.n; ++i) y[i] *= float(node.scale);
  }

  // Queries are turned where they are; keys and values go to the cache.
  void rotate(const Node& node, int64_t m) const {
    const Token& token = memory_.tokens[m];
    const int64_t size = node.size;
    const float* const table =
        node.rotary ? floats(node.w) + token.position() * 2 * table_width(node) : nullptr;
    float *const q = at(node.x, m), *const k = at(node.y, m), *const v = at(node.z, m);
    if (table) {
      for (int64_t h = 0; h < node.heads; ++h) {
        rotate_head(node, q + h * size, table, q + h * size);
      }
      for (int64_t h = 0; h < node.key_heads; ++h) {
        rotate_head(node, k + h * size, table, k + h * size);
      }
    }
    for (int64_t h = 0; h < node.key_heads; ++h) {
      const int64_t to = (token.row * node.key_heads + h) * memory_.slots() + token.slot;
      store(node, 0, k + h * size, to);
      store(node, 1, v + h * size, to);
    }
  }

  // A head of keys (0) or values (1) as vector `to` of its layer.
  void store(const Node& node, int64_t which, const float* from, int64_t to) const {
    S* const place = stored(node.layer, which) + to * node.size;
    if constexpr (std::is_same_v<S, float>) {
      std::copy_n(from, node.size, place);
    } else if constexpr (std::is_same_v<S, tiles::Int8>) {
      scales(node.layer, which)[to] = tiles::encode_row(from, node.size, true, place);
    } else {
      for (int64_t i = 0; i < node.size; ++i) place[i].value = decltype(place[i].value)(from[i]);
    }
  }

  // Groups of a row's heads follow each other.
  void merge(const Attend& a, int64_t m) const {
    const auto fit = few(a);
    const int64_t each = a.parts->groups() / M_;
    for (int64_t g = m * each; g < (m + 1) * each; ++g) a.parts->merge(fit, g);
  }

  // `next` counts what was taken of each run of a stage, `done` what of a stage is complete.
  void take_part(int64_t own, std::vector<Counter>& next, std::vector<Counter>& done) {
    for (size_t s = 0; s < tape_.stages.size(); ++s) {
      const Stage& stage = tape_.stages[s];
      const int64_t tasks = tasks_of(stage);
      for (int64_t i = 0; i < threads_; ++i) {
        const int64_t run = (own + i) % threads_;
        const int64_t first = tasks * run / threads_, end = tasks * (run + 1) / threads_;
        auto& taken = next[s * threads_ + run].tasks;
        for (int64_t t; (t = first + taken.fetch_add(1, std::memory_order_relaxed)) < end;) {
          task(stage, t, tasks);
          done[s].tasks.fetch_add(1, std::memory_order_release);
        }
      }
      // the results of others are complete where their count is
      constexpr int kPatience = 4096;
      for (int spins = 0; done[s].tasks.load(std::memory_order_acquire) < tasks; ++spins) {
        spins < kPatience ? rest() : std::this_thread::yield();
      }
    }
  }

  const Tape& tape_;
  const Memory& memory_;
  const int64_t M_;
  int64_t threads_ = 1;
  std::unique_ptr<float[]> floats_;
  std::vector<float*> buffers_;
  std::vector<quant::Activations> activations_;
  std::vector<Product> products_;
  std::vector<int64_t> attends_;  // of a node
  std::vector<Attend> attend_;
};

}  // namespace metalcore::cpu::decode
