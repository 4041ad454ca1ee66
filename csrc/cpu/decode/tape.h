// SPDX-License-Identifier: MIT
// A tape: one token's way through a model, as a text. It is read once and kept.
//
//   buffers 64 96 64 512 out 3
//   embed y=0 w=0 n=64
//   linear x=0 y=1+32 w=2 n=64 k=64 add=1
//
// A line is a node: its name and what it works on. Buffers hold a row of floats for each token;
// `y=1+32` is buffer 1 from its value 32 on. `w`, `bias`, `tiles` and the like count tensors.
#pragma once

#include <cmath>
#include <locale>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "../common/tensor.h"

namespace metalcore::cpu::decode {

constexpr const char* kOp = "decode_step";

enum class Kind { kEmbed, kNorm, kQuantize, kRope, kMerge, kGlu, kAdd, kSoftCap, kLinear, kAttend };

// Values of a row: of a buffer, from `offset` on.
struct Place {
  int64_t buffer = -1, offset = 0;
};

struct Node {
  Kind kind = Kind::kEmbed;
  // what is read, what is written; of rope the values, of a gated unit what is gated
  Place x, y, z;
  int64_t n = 0, k = 0, times = 1, layer = 0;
  // tensors
  int64_t w = -1, bias = -1, tiles = -1;
  // what the reference reads of weights in groups
  int64_t scales = -1, biases = -1;
  // of weights: a type of ggml, or bits and groups; bytes of an activation, and parts of a row
  int64_t type = -1, bits = 0, group = 0, offsets = 0, dtype = 0, bytes = 0, parts = 0;
  // of attention
  int64_t heads = 0, key_heads = 0, size = 0, rotary = 0, interleaved = 0, window = 0;
  int64_t act = 0, add = 0;
  double eps = 0, scale = 1, cap = 0;
};

// Nodes between which nothing has to wait: of rows one after the other, or products of one input.
struct Stage {
  Kind kind;
  size_t first, count;
};

struct Tape {
  std::vector<int64_t> buffers;
  int64_t out = -1;
  std::vector<Node> nodes;
  std::vector<Stage> stages;
  int64_t tensors = 0;  // as many at least
  int64_t weights = 0;  // values of matrices
};

// Sizes and counts of a tape are below it.
constexpr int64_t kMost = int64_t(1) << 32;

namespace detail {

inline const std::map<std::string, Kind>& kinds() {
  static const std::map<std::string, Kind> names = {
      {"embed", Kind::kEmbed},      {"norm", Kind::kNorm},     {"quantize", Kind::kQuantize},
      {"rope", Kind::kRope},        {"glu", Kind::kGlu},       {"add", Kind::kAdd},
      {"soft_cap", Kind::kSoftCap}, {"linear", Kind::kLinear}, {"attend", Kind::kAttend}};
  return names;
}

inline const std::map<std::string, int64_t Node::*>& integers() {
  static const std::map<std::string, int64_t Node::*> names = {{"n", &Node::n},
                                                               {"k", &Node::k},
                                                               {"times", &Node::times},
                                                               {"layer", &Node::layer},
                                                               {"w", &Node::w},
                                                               {"bias", &Node::bias},
                                                               {"tiles", &Node::tiles},
                                                               {"type", &Node::type},
                                                               {"scales", &Node::scales},
                                                               {"biases", &Node::biases},
                                                               {"bits", &Node::bits},
                                                               {"group", &Node::group},
                                                               {"offsets", &Node::offsets},
                                                               {"dtype", &Node::dtype},
                                                               {"bytes", &Node::bytes},
                                                               {"parts", &Node::parts},
                                                               {"heads", &Node::heads},
                                                               {"key_heads", &Node::key_heads},
                                                               {"size", &Node::size},
                                                               {"rotary", &Node::rotary},
                                                               {"interleaved", &Node::interleaved},
                                                               {"window", &Node::window},
                                                               {"act", &Node::act},
                                                               {"add", &Node::add}};
  return names;
}

inline std::istringstream reader(const std::string& text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  return in;
}

template <typename T>
T number(const std::string& text) {
  auto in = reader(text);
  T value = {};
  in >> value;
  STD_TORCH_CHECK(in && in.peek() == std::istringstream::traits_type::eof(), kOp,
                  ": the tape has `", text, "` for a number");
  return value;
}

inline void set(Node& node, const std::string& name, const std::string& value) {
  if (name == "x" || name == "y" || name == "z") {
    const size_t plus = value.find('+');
    Place& place = name == "x" ? node.x : name == "y" ? node.y : node.z;
    place.buffer = number<int64_t>(value.substr(0, plus));
    if (plus != std::string::npos) place.offset = number<int64_t>(value.substr(plus + 1));
    return;
  }
  if (name == "eps" || name == "scale" || name == "cap") {
    (name == "eps" ? node.eps : name == "scale" ? node.scale : node.cap) = number<double>(value);
    return;
  }
  const auto found = integers().find(name);
  STD_TORCH_CHECK(found != integers().end(), kOp, ": the tape names an unknown `", name, "`");
  const int64_t given = number<int64_t>(value);
  STD_TORCH_CHECK(given >= -1 && given < kMost, kOp, ": the tape has ", name, "=", value);
  node.*found->second = given;
}

inline bool is_of_rows(Kind kind) { return kind != Kind::kLinear && kind != Kind::kAttend; }

// Whether a node may run beside those of a stage: rows follow each other in order, products read
// one input, and write nothing that another of them touches.
inline bool joins(const Tape& tape, const Stage& stage, const Node& node) {
  if (is_of_rows(stage.kind)) return is_of_rows(node.kind);
  if (stage.kind != Kind::kLinear || node.kind != Kind::kLinear || node.add) return false;
  for (size_t i = stage.first; i < stage.first + stage.count; ++i) {
    const Node& other = tape.nodes[i];
    const bool overlaps = other.y.buffer == node.y.buffer &&
                          other.y.offset < node.y.offset + node.n &&
                          node.y.offset < other.y.offset + other.n;
    if (overlaps || other.add || other.y.buffer == node.x.buffer || node.y.buffer == other.x.buffer)
      return false;
  }
  return true;
}

}  // namespace detail

inline Tape read_tape(const std::string& text) {
  Tape tape;
  auto lines = detail::reader(text);
  std::string line, word;
  STD_TORCH_CHECK(std::getline(lines, line), kOp, ": the tape is empty");
  auto head = detail::reader(line);
  head >> word;
  STD_TORCH_CHECK(word == "buffers", kOp, ": a tape starts with its buffers");
  while (head >> word && word != "out") tape.buffers.push_back(detail::number<int64_t>(word));
  STD_TORCH_CHECK(head >> tape.out && tape.out >= 0 && tape.out < int64_t(tape.buffers.size()), kOp,
                  ": the tape does not say which buffer is the result");
  for (const int64_t n : tape.buffers) {
    STD_TORCH_CHECK(n > 0 && n < kMost, kOp, ": a buffer of ", n, " values");
  }
  const auto put = [&](const Node& node) {
    if (tape.stages.empty() || !detail::joins(tape, tape.stages.back(), node)) {
      tape.stages.push_back({node.kind, tape.nodes.size(), 0});
    }
    tape.stages.back().count += 1;
    tape.nodes.push_back(node);
    tape.tensors = std::max({tape.tensors, node.w + 1, node.bias + 1, node.tiles + 1});
    if (node.kind == Kind::kLinear) tape.weights += node.n * node.k;
  };
  while (std::getline(lines, line)) {
    auto words = detail::reader(line);
    words >> word;
    const auto kind = detail::kinds().find(word);
    STD_TORCH_CHECK(kind != detail::kinds().end(), kOp, ": the tape has an unknown node `", word,
                    "`");
    Node node;
    node.kind = kind->second;
    while (words >> word) {
      const size_t equals = word.find('=');
      STD_TORCH_CHECK(equals != std::string::npos, kOp, ": the tape has `", word, "`");
      detail::set(node, word.substr(0, equals), word.substr(equals + 1));
    }
    put(node);
    if (node.kind == Kind::kAttend) {
      node.kind = Kind::kMerge;
      put(node);
    }
  }
  STD_TORCH_CHECK(!tape.nodes.empty(), kOp, ": the tape has no nodes");
  return tape;
}

// Tapes that were read, the last few of them.
inline std::shared_ptr<const Tape> tape_of(const std::string& text) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const Tape>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(text);
  if (found != known.end()) return found->second;
  constexpr size_t kKept = 16;
  auto made = std::make_shared<const Tape>(read_tape(text));
  if (known.size() >= kKept) known.clear();
  known.emplace(text, made);
  return made;
}

}  // namespace metalcore::cpu::decode
