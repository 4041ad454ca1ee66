// SPDX-License-Identifier: MIT
// A tape replayed on the CPU. Everything that a node touches is checked before the first runs.

#include "../common/text.h"
#include "step.h"

namespace metalcore::cpu {
namespace {

using namespace decode;

class Checks {
 public:
  Checks(const Tape& tape, const Memory& memory) : tape_(tape), memory_(memory) {}

  void operator()() const {
    STD_TORCH_CHECK(tape_.tensors <= int64_t(memory_.tensors.size()), kOp, ": the tape needs ",
                    tape_.tensors, " tensors");
    // parts of 32 values that were made of each buffer, and bytes of each value
    std::vector<std::pair<int64_t, int64_t>> quantized(tape_.buffers.size());
    for (const Node& node : tape_.nodes) {
      STD_TORCH_CHECK(node.n >= 0 && node.k >= 0 && node.times > 0 && node.times < kMost, kOp,
                      ": a node of the tape has no size");
      switch (node.kind) {
        case Kind::kEmbed:
          embed(node);
          break;
        case Kind::kNorm:
          inside(node.x, node.n * node.times);
          inside(node.y, node.n * node.times);
          if (node.w >= 0) floats(node.w, node.n);
          break;
        case Kind::kQuantize:
          inside(node.x, node.n);
          STD_TORCH_CHECK(node.bytes >= 1 && node.bytes <= 3 && node.x.offset == 0 &&
                              32 * node.parts >= node.n && node.parts < kMost,
                          kOp, ": activations have 1 to 3 bytes, from the start of a buffer on");
          quantized[node.x.buffer] = {node.parts, node.bytes};
          break;
        case Kind::kRope:
          rope(node);
          break;
        case Kind::kAttend:
        case Kind::kMerge:
          attend(node);
          break;
        case Kind::kGlu:
          STD_TORCH_CHECK(node.act >= 0 && node.act <= 2, kOp, ": act must be 0, 1 or 2");
          inside(node.z, node.n);
          [[fallthrough]];
        case Kind::kAdd:
        case Kind::kSoftCap:
          inside(node.x, node.n);
          inside(node.y, node.n);
          break;
        case Kind::kLinear:
          linear(node, quantized);
          break;
      }
    }
  }

 private:
  void inside(const Place& place, int64_t n) const {
    STD_TORCH_CHECK(place.buffer >= 0 && place.buffer < int64_t(tape_.buffers.size()) && n >= 0 &&
                        n < kMost && place.offset >= 0 && place.offset < kMost &&
                        place.offset + n <= tape_.buffers[place.buffer],
                    kOp, ": a node of the tape goes past its buffer");
  }

  const Tensor& tensor(int64_t which) const {
    STD_TORCH_CHECK(which >= 0, kOp, ": a node of the tape has no weights");
    return memory_.tensors[which];
  }

  // `may_be_more`: a table of positions is longer than what a sequence has come to.
  void floats(int64_t which, int64_t n, bool may_be_more = false) const {
    const Tensor& w = tensor(which);
    expect_type<float>(w);
    STD_TORCH_CHECK(w.numel() == n || (may_be_more && w.numel() > n), kOp, ": a tensor has ",
                    w.numel(), " values, the tape needs ", n);
  }

  void embed(const Node& node) const {
    inside(node.y, node.n);
    const Tensor& table = tensor(node.w);
    int64_t width = node.n;
    if (node.type >= 0) {
      quant::expect_blocks(kOp, table, node.type);
      width = node.n / quant::block_values(node.type) * quant::block_bytes(node.type);
      STD_TORCH_CHECK(node.n % quant::block_values(node.type) == 0, kOp, ": rows of whole blocks");
    } else {
      expect_float(kOp, table);
    }
    STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == width, kOp,
                    ": a table of tokens must have rows of ", node.n, " values");
    for (const Token& token : memory_.tokens) {
      STD_TORCH_CHECK(token.id >= 0 && token.id < table.size(0), kOp, ": token ", token.id,
                      " is out of range for a table of ", table.size(0), " rows");
    }
  }

  void heads(const Node& node) const {
    STD_TORCH_CHECK(node.layer >= 0 && node.layer < memory_.layers() && node.size > 0 &&
                        node.size == memory_.size() && node.key_heads == memory_.heads() &&
                        node.key_heads > 0 && node.heads > 0 && node.heads < (1 << 20) &&
                        node.heads % node.key_heads == 0,
                    kOp, ": the cache does not fit the heads of the tape");
  }

  void rope(const Node& node) const {
    heads(node);
    inside(node.x, node.heads * node.size);
    inside(node.y, node.key_heads * node.size);
    inside(node.z, node.key_heads * node.size);
    STD_TORCH_CHECK(node.rotary >= 0 && node.rotary <= node.size && node.rotary % 2 == 0, kOp,
                    ": rotary must be even and at most the size of a head");
    if (node.rotary == 0) return;
    int64_t positions = 0;
    for (const Token& token : memory_.tokens) {
      positions = std::max(positions, token.position() + 1);
    }
    floats(node.w, positions * 2 * table_width(node), true);
  }

  void attend(const Node& node) const {
    heads(node);
    inside(node.x, node.heads * node.size);
    inside(node.y, node.heads * node.size);
    if (node.w >= 0) floats(node.w, node.heads);
  }

  void linear(const Node& node, const std::vector<std::pair<int64_t, int64_t>>& quantized) const {
    inside(node.x, node.k);
    inside(node.y, node.n);
    if (node.bias >= 0) floats(node.bias, node.n);
    const Tensor& w = tensor(node.tiles >= 0 ? node.tiles : node.w);
    if (node.tiles < 0) {
      STD_TORCH_CHECK(is_float(w.scalar_type()) && w.scalar_type() != ScalarType::Double, kOp,
                      ": plain weights must be float32, float16 or bfloat16");
      STD_TORCH_CHECK(w.dim() == 2 && w.size(0) == node.n && w.size(1) == node.k, kOp,
                      ": weights must be [", node.n, ", ", node.k, "]");
      return;
    }
    quant::expect_bytes(kOp, w);
    const Packed packed = packed_size(node);
    STD_TORCH_CHECK(w.numel() == packed.bytes, kOp, ": tiles must be those of [", node.n, ", ",
                    node.k, "]");
    const auto [parts, bytes] = quantized[node.x.buffer];
    STD_TORCH_CHECK(bytes > 0 && node.x.offset == 0 && parts >= packed.parts, kOp,
                    ": the input of packed weights must be quantized before");
  }

  const Tape& tape_;
  const Memory& memory_;
};

std::vector<Token> tokens_of(const Tensor& ids, const Tensor& rows, const Tensor& slots,
                             const Tensor& starts, const Tensor& cache) {
  const int64_t count = ids.numel();
  const Tensor all[] = {dense(ids), dense(rows), dense(slots), dense(starts)};
  for (const Tensor& x : all) {
    STD_TORCH_CHECK(x.dim() == 1 && x.numel() == count && x.scalar_type() == ScalarType::Long, kOp,
                    ": tokens, rows, slots and starts must be int64, one for each token");
  }
  STD_TORCH_CHECK(cache.dim() == 6 && cache.size(1) == 2, kOp,
                  ": the cache must be [layers, 2, rows, heads, slots, size]");
  std::vector<Token> found;
  for (int64_t m = 0; m < count; ++m) {
    const Token t{data<int64_t>(all[0])[m], data<int64_t>(all[1])[m], data<int64_t>(all[2])[m],
                  data<int64_t>(all[3])[m]};
    STD_TORCH_CHECK(t.row >= 0 && t.row < cache.size(2) && t.start >= 0 && t.start <= t.slot &&
                        t.slot < cache.size(4),
                    kOp, ": token ", m, " has no place in the cache: row ", t.row, ", slot ",
                    t.slot, ", start ", t.start);
    found.push_back(t);
  }
  return found;
}

void expect_scales(const Tensor& cache, const std::optional<Tensor>& scales) {
  STD_TORCH_CHECK(scales.has_value() == (cache.scalar_type() == ScalarType::Char), kOp,
                  ": a cache of int8 has scales, and no other");
  if (!scales) return;
  bool fits = scales->is_cpu() && scales->dim() == 5 && scales->scalar_type() == ScalarType::Float;
  for (int64_t d = 0; fits && d < 5; ++d) fits = scales->size(d) == cache.size(d);
  STD_TORCH_CHECK(fits, kOp, ": scales must be float32, one for each vector of the cache");
}

// What has gaps was written by way of a dense copy.
void put_back(Tensor to, const Tensor& written) {
  if (!to.is_contiguous()) torch::stable::copy_(to, written);
}

Tensor decode_step(StringHandle text, std::vector<Tensor> tensors, const Tensor& cache,
                   const Tensor& ids, const Tensor& rows, const Tensor& slots, const Tensor& starts,
                   std::optional<Tensor> scales) {
  const auto tape = tape_of(taken(text));
  Memory memory{std::move(tensors), dense(cache), std::nullopt,
                tokens_of(ids, rows, slots, starts, cache)};
  expect_scales(cache, scales);
  if (scales) memory.scales = dense(*scales);
  for (Tensor& x : memory.tensors) {
    STD_TORCH_CHECK(x.is_cpu(), kOp, ": tensors must be on the CPU");
    x = dense(x);
  }
  Checks(*tape, memory)();
  const int64_t sizes[] = {ids.numel(), tape->buffers[tape->out]};
  Tensor out = empty(sizes, 2, ScalarType::Float);
  metalcore_variant = "tape";
  if (sizes[0] == 0) return out;
  switch (memory.cache.scalar_type()) {
    case ScalarType::Float:
      Step<float>(*tape, memory, out).run();
      break;
    case ScalarType::Half:
      Step<tiles::Narrow<simd::Half>>(*tape, memory, out).run();
      break;
    case ScalarType::BFloat16:
      Step<tiles::Narrow<simd::BFloat16>>(*tape, memory, out).run();
      break;
    case ScalarType::Char:
      Step<tiles::Int8>(*tape, memory, out).run();
      break;
    default:
      STD_TORCH_CHECK(false, kOp, ": the cache must be float32, float16, bfloat16 or int8");
  }
  put_back(cache, memory.cache);
  if (scales) put_back(*scales, *memory.scales);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("decode_step", kernel<&decode_step>);
}

}  // namespace metalcore::cpu
