// SPDX-License-Identifier: MIT
// What AdamW does to a register of values, and its moments in 8 bits.
#pragma once

#include <cmath>

#include "../common/tensor.h"

namespace metalcore::cpu {

using simd::Acc;
using simd::Bits;
using simd::FloatVec;
using simd::Vec;

// Values that share a scale where moments are kept in 8 bits, and the bytes they take.
constexpr int64_t kBlock = 128;
constexpr int64_t kBlockBytes = kBlock + sizeof(float);

// One tensor of the list, and the numbers of its step.
struct AdamWTensor {
  void *p, *g, *m, *v, *most;
  int64_t n;
  double decay, keep1, beta2, keep2, step_size, inverse_root, eps, gradient_factor, unscale;
  uint32_t seed;
  bool stochastic;
  void (*update)(const AdamWTensor&, int64_t begin, int64_t end);
  // where it starts, in blocks, among those of all tensors
  int64_t first_block;
};

// The numbers of a step in the type that it computes in.
template <typename A>
struct AdamWNumbers {
  A decay, keep1, beta2, keep2, step_size, inverse_root, eps, gradient_factor;

  explicit AdamWNumbers(const AdamWTensor& t)
      : decay(t.decay),
        keep1(t.keep1),
        beta2(t.beta2),
        keep2(t.keep2),
        step_size(t.step_size),
        inverse_root(t.inverse_root),
        eps(t.eps),
        gradient_factor(t.gradient_factor) {}

  // Updates the moments, and the largest second one where there is a pointer to it; returns p.
  template <typename V>
  V step(V p, V g, V& m, V& v, V* most) const {
    g = g * gradient_factor;
    m = m + (g - m) * keep1;
    v = v * beta2 + g * g * keep2;
    V divisor = v;
    if (most) {
      // as torch.maximum: a NaN on either side stays
      *most = divisor = ((*most > v) | (*most != *most)) ? *most : v;
    }
    return p * decay - (m * step_size) / (simd::square_root(divisor) * inverse_root + eps);
  }
};

inline uint32_t hash(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21f0aaad;
  x = (x ^ (x >> 15)) * 0x735a2d97;
  return x ^ (x >> 15);
}

// Random bits for the values of a block: the places of a sequence that covers the range evenly, any
// of the bits do, from a start that is a hash of the block.
class Noise {
 public:
  Noise(uint32_t seed, int64_t block) {
    const uint32_t start = hash(seed + uint32_t(block) * 0x9e3779b9);
    for (uint32_t lane = 0; lane < simd::kLanes<float>; ++lane) next_[lane] = lane * kStep;
    next_ += start;
  }
  // Of the next kLanes values.
  Bits operator()() {
    const Bits now = next_;
    next_ += kStep * uint32_t(simd::kLanes<float>);
    return now;
  }

 private:
  static constexpr uint32_t kStep = 0x9e3779b1;
  Bits next_;
};

// Stores one of the two bfloat16 values around each v, the nearer one with the better chance.
template <typename Elements>
void store_by_chance(simd::BFloat16* p, simd::Pair<float> v, Bits first, Bits second,
                     Elements elements) {
  const Bits low = simd::bits_as<Bits>(v.first) + (first & 0xffff);
  const Bits high = simd::bits_as<Bits>(v.second) + (second & 0xffff);
  if constexpr (std::is_same_v<Elements, simd::All>) {
    simd::store_upper_halves(p, low, high);
  } else {
    simd::BFloat16 part[simd::kStep<simd::BFloat16>];
    simd::store_upper_halves(part, low, high);
    std::memcpy(p, part, sizeof(*p) * elements.count);
  }
}

// One block of a moment in 8 bits. A code is the sign and the upper bits of a float32, three of the
// mantissa among them, counted from an origin that the block has in common. Code 0 of a signed
// moment is 0.
template <bool kSigned>
class EightBitBlock {
 public:
  EightBitBlock(void* moment, int64_t block)
      : codes_(static_cast<uint8_t*>(moment) + block * kBlockBytes) {
    std::memcpy(&origin_, codes_ + kBlock, sizeof(origin_));
    old_origin_ = origin_;
  }

  // What no value is above.
  float bound() const { return simd::bits_as<float>((kLargest + origin_) << kShift); }

  // From now on codes are stored for values up to `bound`.
  void set_bound(float bound) {
    const uint32_t top = (simd::bits_as<uint32_t>(bound) + ((1u << kShift) - 1)) >> kShift;
    origin_ = std::max(top, kLargest) - kLargest;
    std::memcpy(codes_ + kBlock, &origin_, sizeof(origin_));
  }

  FloatVec get(int64_t i) const {
    if constexpr (kSigned) {
      const auto code = simd::widen_signed_bytes(codes_ + i);
      const Bits magnitude = Bits(code < 0 ? -code : code);
      const Bits bits = ((magnitude + old_origin_) << kShift) & ~Bits(magnitude == 0);
      return simd::bits_as<FloatVec>(bits | (Bits(code) & 0x80000000));
    } else {
      return simd::bits_as<FloatVec>((simd::widen_bytes(codes_ + i) + old_origin_) << kShift);
    }
  }

  // Rounds up where the noise carries: its lower 20 bits where there is a sign, else the upper
  // ones.
  Bits encode(FloatVec v, Bits noise) const {
    const Bits bits = simd::bits_as<Bits>(v);
    if constexpr (kSigned) {
      const Bits code = ((bits & 0x7fffffff) + (noise & ((1u << kShift) - 1))) >> kShift;
      const auto kept = simd::SignedBits(code) - int32_t(origin_);
      const simd::SignedBits positive = kept > 0 ? kept : 0 * kept;
      const auto sign = simd::SignedBits(bits) >> 31;
      return Bits((positive ^ sign) - sign);
    } else {
      return ((bits + (noise >> (32 - kShift))) >> kShift) - origin_;
    }
  }

  void put(int64_t i, Bits first, Bits second) {
    simd::store_as_bytes<kSigned>(codes_ + i, first, second);
  }

 private:
  static constexpr uint32_t kShift = 20, kLargest = kSigned ? 127 : 255;
  uint8_t* codes_;
  uint32_t origin_, old_origin_;
};

}  // namespace metalcore::cpu
