// SPDX-License-Identifier: MIT
// What a tape does to one row at a time: norms, activations, rotation. The arithmetic is that of
// the ops `rms_norm`, `rope`, `swiglu`, `geglu` and `soft_cap`.
#pragma once

#include "../quant/activations.h"
#include "../train/activation.h"
#include "../train/norm.h"
#include "../train/rotate.h"
#include "tape.h"

namespace metalcore::cpu::decode {

// y [times][n] of x, each row with one scale [n].
inline void normalize(const Node& node, const float* x, const float* scale, float* y) {
  for (int64_t t = 0; t < node.times; ++t) {
    const float* const row = x + t * node.n;
    const float squares = simd::sum_over<float>(node.n, [&](int64_t i, auto elements) {
      const auto v = simd::load(row + i, elements);
      return v * v;
    });
    const float rms = reciprocal_rms(squares, node.n, float(node.eps));
    simd::for_each_pair<float>(node.n, [&](int64_t i, auto elements) {
      auto v = simd::load(row + i, elements) * rms;
      if (scale) v = v * simd::load(scale + i, elements);
      simd::store(y + t * node.n + i, v, elements);
    });
  }
}

// y = act(x) * z
inline void gate(const Node& node, const float* x, const float* z, float* y) {
  const auto run = [&](auto act) {
    simd::for_each_pair<float>(node.n, [&](int64_t i, auto elements) {
      const auto g = simd::load(x + i, elements), u = simd::load(z + i, elements);
      simd::Pair<float> v;
      v.first = act.template value<float>(g.first) * u.first;
      v.second = act.template value<float>(g.second) * u.second;
      simd::store(y + i, v, elements);
    });
  };
  if (node.act == 0) return run(Silu());
  node.act == 1 ? run(Gelu()) : run(GeluTanh());
}

// y += scale * x
inline void add_row(const Node& node, const float* x, float* y) {
  for (int64_t i = 0; i < node.n; ++i) y[i] += float(node.scale) * x[i];
}

// y = cap tanh(x / cap)
inline void cap_row(const Node& node, const float* x, float* y) {
  const float cap = float(node.cap);
  simd::for_each_pair<float>(node.n, [&](int64_t i, auto elements) {
    const auto v = simd::load(x + i, elements);
    const auto capped = [&](simd::FloatVec a) {
      return simd::Tanh<simd::FloatVec>(a / cap).value * cap;
    };
    simd::store(y + i, simd::Pair<float>{capped(v.first), capped(v.second)}, elements);
  });
}

// Rows of a table of cosines and signed sines, [positions, 2, width].
inline int64_t table_width(const Node& node) {
  constexpr int64_t kWhole = 32;
  const int64_t part = node.interleaved ? node.rotary : node.rotary / 2;
  return (part + kWhole - 1) / kWhole * kWhole * (node.interleaved ? 1 : 2);
}

// One head, at the position whose row of the table is given; y may be x.
inline void rotate_head(const Node& node, const float* x, const float* table, float* y) {
  const Rotation how{node.size, node.rotary, node.rotary / 2, node.interleaved != 0, false};
  const int64_t width = table_width(node);
  rotate_row(how, x, table, table + width, width / 2, y,
             [](float* to, auto v, auto elements) { simd::store(to, v, elements); });
}

}  // namespace metalcore::cpu::decode
