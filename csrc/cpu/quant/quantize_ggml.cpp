// SPDX-License-Identifier: MIT
// Floats to ggml's blocks and back, byte for byte as ggml's reference.
// This file is compiled without contraction of products and sums, which changes bytes.

#include "search.h"

namespace metalcore::cpu {
namespace {

using namespace quant;

// The value of largest magnitude, the first one of several; 0 for zeros.
float largest(const float* x) {
  float most = 0, found = 0;
  for (int i = 0; i < 32; ++i) {
    if (std::fabs(x[i]) > most) {
      most = std::fabs(x[i]);
      found = x[i];
    }
  }
  return found;
}

// Nibbles of value i and i + 16 side by side, after the fifth bits if there are any.
void put_quants(const uint8_t* q, bool has_fifth, uint8_t* to) {
  if (has_fifth) {
    uint32_t high = 0;
    for (int i = 0; i < 32; ++i) high |= uint32_t(q[i] >> 4) << i;
    std::memcpy(to, &high, sizeof(high));
    to += 4;
  }
  for (int i = 0; i < 16; ++i) to[i] = uint8_t((q[i] & 15) | (q[i + 16] & 15) << 4);
}

template <int64_t type>
void quantize_signed(const float* x, uint8_t* b) {
  constexpr int kMiddle = type == kQ4_0 ? 8 : 16;
  const float d = largest(x) / -float(kMiddle), inverse = d != 0 ? 1.0f / d : 0.0f;
  put_half(b, d);
  uint8_t q[32];
  for (int i = 0; i < 32; ++i) {
    q[i] = uint8_t(std::min(2 * kMiddle - 1, int(x[i] * inverse + (kMiddle + 0.5f))));
  }
  put_quants(q, type == kQ5_0, b + 2);
}

template <int64_t type>
void quantize_affine(const float* x, uint8_t* b) {
  constexpr int kMost = type == kQ4_1 ? 15 : 31;
  float low = x[0], high = x[0];
  for (int i = 1; i < 32; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  const float d = (high - low) / float(kMost), inverse = d != 0 ? 1.0f / d : 0.0f;
  put_half(b, d);
  put_half(b + 2, low);
  uint8_t q[32];
  for (int i = 0; i < 32; ++i) {
    q[i] = uint8_t(std::min(kMost, int((x[i] - low) * inverse + 0.5f)));
  }
  put_quants(q, type == kQ5_1, b + 4);
}

void quantize_q8_0(const float* x, uint8_t* b) {
  const float d = std::fabs(largest(x)) / 127.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
  put_half(b, d);
  for (int i = 0; i < 32; ++i) b[2 + i] = uint8_t(int8_t(std::round(x[i] * inverse)));
}

void quantize_mxfp4(const float* x, uint8_t* b) {
  const float most = std::fabs(largest(x));
  // the logarithm rounded to float: up to a whole number just below a power of two
  const float power = std::floor(float(std::log2(double(most))));
  b[0] = most > 0 ? uint8_t(std::clamp(power - 2 + 127, 0.0f, 255.0f)) : 0;
  const float d = half_power(b[0]);
  uint8_t q[32];
  for (int i = 0; i < 32; ++i) {
    float least = std::fabs(x[i]);
    q[i] = 0;
    for (int j = 1; j < 16; ++j) {
      const float off = std::fabs(float(kTwiceE2M1[j]) * d - x[i]);
      if (off < least) {
        least = off;
        q[i] = uint8_t(j);
      }
    }
  }
  put_quants(q, false, b + 1);
}

// Sixteen groups of n values at a time: values in lanes, fitted, and quants back in rows.
constexpr int kAtOnce = 16;

template <int n, typename Fit>
void fit_groups(const float* x, int count, uint8_t (*q)[n], Fit fit) {
  for (int first = 0; first < count; first += kLanesOfGroups) {
    FloatVec values[n], quants[n];
    for (int lane = 0; lane < kLanesOfGroups; ++lane) {
      // groups past the end repeat the last one
      const float* group = x + std::min(first + lane, count - 1) * n;
      for (int i = 0; i < n; ++i) values[i][lane] = group[i];
    }
    fit(first, values, quants);
    const int lanes = int(std::min<int64_t>(kLanesOfGroups, count - first));
    for (int lane = 0; lane < lanes; ++lane) {
      for (int i = 0; i < n; ++i) q[first + lane][i] = uint8_t(quants[i][lane]);
    }
  }
}

struct Scales {
  float values[kAtOnce + simd::kLanes<float>];
  void put(int first, FloatVec v) { std::memcpy(values + first, &v, sizeof(v)); }
};

// One block of q4_K or q5_K, from the fits of its 8 groups.
template <int64_t type>
void put_k_block(const float* x, const float* scale, const float* least, uint8_t (*q)[32],
                 uint8_t* b) {
  constexpr int kMost = type == kQ4_K ? 15 : 31;
  float most_scale = 0, most_least = 0;
  for (int g = 0; g < 8; ++g) {
    most_scale = std::max(most_scale, scale[g]);
    most_least = std::max(most_least, least[g]);
  }
  const float per_scale = most_scale > 0 ? 63.0f / most_scale : 0.0f;
  const float per_least = most_least > 0 ? 63.0f / most_least : 0.0f;
  std::memset(b, 0, block_bytes(type));
  put_half(b, most_scale / 63.0f);
  put_half(b + 2, most_least / 63.0f);
  const float d = half_at(b), dmin = half_at(b + 2);
  for (int g = 0; g < 8; ++g) {
    const auto s = uint8_t(std::clamp(nearest(per_scale * scale[g]), 0.0f, 63.0f));
    const auto m = uint8_t(std::clamp(nearest(per_least * least[g]), 0.0f, 63.0f));
    if (g < 4) {
      b[4 + g] |= s;
      b[8 + g] |= m;
    } else {
      b[8 + g] = uint8_t((s & 15) | (m & 15) << 4);
      b[g] |= uint8_t(s >> 4 << 6);
      b[4 + g] |= uint8_t(m >> 4 << 6);
    }
    const float step = d * float(s), offset = dmin * float(m);
    if (step == 0) continue;
    for (int i = 0; i < 32; ++i) {
      q[g][i] = uint8_t(std::clamp(nearest((x[32 * g + i] + offset) / step), 0.0f, float(kMost)));
    }
  }
  uint8_t* low = b + block_bytes(type) - 128;
  for (int g = 0; g < 8; g += 2, low += 32) {
    for (int i = 0; i < 32; ++i) low[i] = uint8_t((q[g][i] & 15) | (q[g + 1][i] & 15) << 4);
  }
  if (type == kQ5_K) {
    for (int g = 0; g < 8; ++g) {
      for (int i = 0; i < 32; ++i) b[16 + i] |= uint8_t(q[g][i] >> 4 << g);
    }
  }
}

// Up to two blocks of q4_K or q5_K.
template <int64_t type>
void quantize_k(const float* x, int64_t blocks, uint8_t* b) {
  uint8_t q[kAtOnce][32];
  Scales scale, least;
  fit_groups<32>(x, int(8 * blocks), q, [&](int first, const FloatVec* values, FloatVec* quants) {
    FloatVec s, m;
    fit_scale_and_min<type == kQ4_K ? 15 : 31>(values, quants, &s, &m);
    scale.put(first, s);
    least.put(first, m);
  });
  for (int64_t i = 0; i < blocks; ++i) {
    put_k_block<type>(x + 256 * i, scale.values + 8 * i, least.values + 8 * i, q + 8 * i,
                      b + i * block_bytes(type));
  }
}

void quantize_q6_K(const float* x, uint8_t* b) {
  uint8_t q[kAtOnce][16];
  Scales scale;
  fit_groups<16>(x, kAtOnce, q, [&](int first, const FloatVec* values, FloatVec* quants) {
    scale.put(first, fit_scale(values, quants));
  });
  float most = 0, top = 0;
  for (int g = 0; g < kAtOnce; ++g) {
    if (std::fabs(scale.values[g]) > most) {
      top = scale.values[g];
      most = std::fabs(top);
    }
  }
  std::memset(b, 0, block_bytes(kQ6_K));
  if (most < kTiny) return;
  const float factor = -128.0f / top;
  put_half(b + 208, 1.0f / factor);
  const float d = half_at(b + 208);
  for (int g = 0; g < kAtOnce; ++g) {
    const float s = std::min(127.0f, nearest(factor * scale.values[g])), step = d * s;
    b[192 + g] = uint8_t(int8_t(s));
    if (step == 0) continue;
    for (int i = 0; i < 16; ++i) {
      q[g][i] = uint8_t(std::clamp(nearest(x[16 * g + i] / step), -32.0f, 31.0f) + 32);
    }
  }
  const uint8_t* flat = &q[0][0];
  for (int half = 0; half < 2; ++half, flat += 128) {
    uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
    for (int i = 0; i < 32; ++i) {
      const uint8_t* at = flat + i;
      low[i] = uint8_t((at[0] & 15) | (at[64] & 15) << 4);
      low[i + 32] = uint8_t((at[32] & 15) | (at[96] & 15) << 4);
      high[i] = uint8_t(at[0] >> 4 | at[32] >> 4 << 2 | at[64] >> 4 << 4 | at[96] >> 4 << 6);
    }
  }
}

// Up to sixteen blocks of iq4_nl.
void quantize_iq4_nl(const float* x, int64_t blocks, uint8_t* b) {
  uint8_t q[kAtOnce][32];
  Scales scale;
  fit_groups<32>(x, int(blocks), q, [&](int first, const FloatVec* values, FloatVec* quants) {
    scale.put(first, fit_table(values, quants));
  });
  for (int64_t i = 0; i < blocks; ++i) {
    put_half(b + 18 * i, scale.values[i]);
    put_quants(q[i], false, b + 18 * i + 2);
  }
}

// Blocks that are made together.
constexpr int64_t at_once(int64_t type) {
  return type == kQ4_K || type == kQ5_K ? 2 : type == kIQ4_NL ? kAtOnce : 1;
}

template <int64_t type>
void quantize_blocks(const float* x, int64_t blocks, uint8_t* b) {
  if constexpr (type == kQ4_0 || type == kQ5_0) {
    quantize_signed<type>(x, b);
  } else if constexpr (type == kQ4_1 || type == kQ5_1) {
    quantize_affine<type>(x, b);
  } else if constexpr (type == kQ8_0) {
    quantize_q8_0(x, b);
  } else if constexpr (type == kMXFP4) {
    quantize_mxfp4(x, b);
  } else if constexpr (type == kQ6_K) {
    quantize_q6_K(x, b);
  } else if constexpr (type == kIQ4_NL) {
    quantize_iq4_nl(x, blocks, b);
  } else {
    quantize_k<type>(x, blocks, b);
  }
}

Tensor quantize_ggml(const Tensor& weight_in, int64_t type) {
  const char* op = "quantize_ggml";
  expect_rows(op, weight_in);
  STD_TORCH_CHECK(block_bytes(type) > 0, op, ": no type of ggml has the number ", type);
  const int64_t n = block_values(type), K = weight_in.size(weight_in.dim() - 1);
  STD_TORCH_CHECK(K % n == 0, op, ": rows must be multiples of ", n, " values");
  const Tensor weight = dense(weight_in);
  const int64_t blocks = weight.numel() / n, together = at_once(type);
  Tensor made = empty_with_last(weight, K / n * block_bytes(type), ScalarType::Byte);
  metalcore_variant = "blocks";
  dispatch_type(op, type, [&](auto known) {
    dispatch_float(weight.scalar_type(), op, [&](auto element) {
      using T = decltype(element);
      constexpr int64_t kType = decltype(known)::value, kMany = at_once(kType);
      const T* from = data<T>(weight);
      uint8_t* to = mutable_bytes(made);
      const int64_t runs = (blocks + kMany - 1) / kMany;
      parallel_for(0, runs, grain_rows(n * together), [&](int64_t begin, int64_t end) {
        float x[kMany * block_values(kType)];
        for (int64_t run = begin; run < end; ++run) {
          const int64_t first = run * kMany, count = std::min(kMany, blocks - first);
          for (int64_t i = 0; i < count * n; ++i) x[i] = float(from[first * n + i]);
          quantize_blocks<kType>(x, count, to + first * block_bytes(kType));
        }
      });
    });
  });
  return made;
}

Tensor dequantize_ggml(const Tensor& blocks_in, int64_t type, ScalarType dtype) {
  const char* op = "dequantize_ggml";
  const Tensor blocks = expect_blocks(op, blocks_in, type);
  STD_TORCH_CHECK(is_float(dtype), op, ": the dtype must be floating");
  const int64_t n = block_values(type), size = block_bytes(type), count = blocks.numel() / size;
  Tensor y = empty_with_last(blocks, blocks.size(blocks.dim() - 1) / size * n, dtype);
  metalcore_variant = "blocks";
  dispatch_type(op, type, [&](auto known) {
    dispatch_float(dtype, op, [&](auto element) {
      using T = decltype(element);
      T* const to = mutable_data<T>(y);
      const uint8_t* from = bytes(blocks);
      parallel_for(0, count, grain_rows(n), [&](int64_t begin, int64_t end) {
        row_floats<decltype(known)::value>(from + begin * size, end - begin, to + begin * n);
      });
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("quantize_ggml", kernel<&quantize_ggml>);
  m.impl("dequantize_ggml", kernel<&dequantize_ggml>);
}

}  // namespace metalcore::cpu
