// SPDX-License-Identifier: MIT
// Attention over pages of a cache, on the CPU.
// Key t of sequence b is row t % page of page table[b][t / page]; or, with cu_seqlens_k, of the row
// table[cu_seqlens_k[b] + t]. A page of -1 is never read.

#include <bit>

#include "over_cache.h"

namespace metalcore::cpu {
namespace {

using namespace tiles;

constexpr const char* kOp = "paged_attention";

// Where each sequence starts, and the end, which is `rows`.
std::vector<int64_t> starts_of(const char* name, const Tensor& starts, int64_t rows) {
  const std::vector<int64_t> found = integers(kOp, name, starts, 1);
  STD_TORCH_CHECK(
      !found.empty() && found.front() == 0 && found.back() == rows && std::ranges::is_sorted(found),
      kOp, ": ", name, " must ascend from 0 to the rows there are");
  return found;
}

Sizes sizes_in_pages(const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, kOp, ": q and caches must be 4-D");
  const Sizes s{q.size(0), q.size(1), k.size(2), q.size(2), 0, q.size(3), v.size(3)};
  STD_TORCH_CHECK(v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == s.key_heads &&
                      k.size(3) == s.size && s.group() * s.key_heads == s.heads,
                  kOp, ": the shapes of q and the caches do not go together");
  STD_TORCH_CHECK(k.size(1) > 0 && std::has_single_bit(uint64_t(k.size(1))), kOp,
                  ": a page must have a power of two of rows");
  return s;
}

// Queries of each sequence: as many for all, or by their starts.
std::vector<Sequence> queries_of(const std::optional<Tensor>& starts, const Sizes& s,
                                 int64_t entries) {
  std::vector<Sequence> found;
  if (!starts) {
    STD_TORCH_CHECK(entries == s.batch, kOp, ": each entry of q must have keys");
    for (int64_t b = 0; b < entries; ++b) found.push_back({b, 0, s.queries, 0, 0});
    return found;
  }
  const std::vector<int64_t> first = starts_of("cu_seqlens_q", *starts, s.queries);
  STD_TORCH_CHECK(s.batch == 1 && int64_t(first.size()) == entries + 1, kOp,
                  ": packed queries are one entry, of as many sequences as keys");
  for (int64_t b = 0; b < entries; ++b) {
    found.push_back({0, first[b], first[b + 1] - first[b], 0, 0, b});
  }
  return found;
}

std::tuple<Tensor, Tensor> paged_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> k_scale,
    std::optional<Tensor> v_scale, const Tensor& table, std::optional<Tensor> lengths,
    std::optional<Tensor> starts_q, std::optional<Tensor> starts_k, std::optional<Tensor> slopes,
    std::optional<Tensor> sinks, double scale, std::optional<double> softcap,
    std::optional<int64_t> left) {
  Sizes s = sizes_in_pages(q, k, v);
  STD_TORCH_CHECK(lengths.has_value() != starts_k.has_value(), kOp,
                  ": keys have lengths or cu_seqlens_k");
  Places places;
  places.page_bits = std::countr_zero(uint64_t(k.size(1)));
  places.table = integers(kOp, "block_table", table, starts_k ? 1 : 2);
  for (const int64_t page : *places.table) {
    STD_TORCH_CHECK(-1 <= page && page < k.size(0), kOp, ": block_table must hold pages, or -1");
  }
  if (starts_k) {
    STD_TORCH_CHECK(places.page_bits == 0, kOp, ": rows of their own are pages of one");
    const std::vector<int64_t> first = starts_of("cu_seqlens_k", *starts_k, table.size(0));
    places.sequences = queries_of(starts_q, s, int64_t(first.size()) - 1);
    for (size_t b = 0; b + 1 < first.size(); ++b) {
      places.sequences[b].first_key = first[b];
      places.sequences[b].keys = first[b + 1] - first[b];
    }
  } else {
    const int64_t pages = table.size(1);
    const auto keys = lengths_of(kOp, *lengths, table.size(0), pages * k.size(1));
    places.sequences = queries_of(starts_q, s, table.size(0));
    for (size_t b = 0; b < keys.size(); ++b) {
      places.sequences[b].first_key = int64_t(b) * pages;
      places.sequences[b].keys = keys[b];
    }
  }
  for (const Sequence& x : places.sequences) s.keys = std::max(s.keys, x.keys);
  return attend_over_cache({kOp, q, k, v, k_scale, v_scale, slopes, sinks, scale, softcap, left}, s,
                           places);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("paged_attention", kernel<&paged_attention>);
}

}  // namespace metalcore::cpu
