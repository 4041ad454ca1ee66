// SPDX-License-Identifier: MIT
// Attention of the last few queries of sequences whose keys are in a cache, on the CPU.
// Entry b has lengths[b] keys; what the cache holds after them is never read.

#include "over_cache.h"

namespace metalcore::cpu {
namespace {

using namespace tiles;

Sizes sizes_in_cache(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, op, ": q, k, v must be 4-D");
  const Sizes s{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)};
  STD_TORCH_CHECK(k.size(0) == s.batch && v.size(0) == s.batch && v.size(1) == s.key_heads &&
                      v.size(2) == s.keys && k.size(3) == s.size &&
                      s.group() * s.key_heads == s.heads,
                  op, ": the shapes of q, k, v do not go together");
  return s;
}

std::tuple<Tensor, Tensor> attention_decode(
    const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> k_scale,
    std::optional<Tensor> v_scale, std::optional<Tensor> lengths, std::optional<Tensor> slopes,
    std::optional<Tensor> sinks, double scale, std::optional<double> softcap,
    std::optional<int64_t> left) {
  const char* op = "attention_decode";
  const Sizes s = sizes_in_cache(op, q, k, v);
  std::vector<int64_t> keys(s.batch, s.keys);
  if (lengths) keys = lengths_of(op, *lengths, s.batch, s.keys);
  Places places;
  for (int64_t b = 0; b < s.batch; ++b) places.sequences.push_back({b, 0, s.queries, 0, keys[b]});
  return attend_over_cache({op, q, k, v, k_scale, v_scale, slopes, sinks, scale, softcap, left}, s,
                           places);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("attention_decode", kernel<&attention_decode>);
}

}  // namespace metalcore::cpu
