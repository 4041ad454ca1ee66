// SPDX-License-Identifier: MIT
// Products with rows of packed weights, which are read where they are: W is one of packed_rows.h.
#pragma once

#include "matrix_tiles.h"
#include "packed_rows.h"

// Rows of W that a simdgroup multiplies with so many rows of x.
template <int COLUMNS>
struct few {
  enum { ROWS = COLUMNS > 4 ? 1 : COLUMNS > 2 ? 2 : 4 };
};

// Values 16 at .. of a row of x, and their sum.
template <bool IS_WHOLE, typename T>
inline float read_piece(device const T* x, uint at, uint K, thread float* v) {
  float total = 0.0f;
#pragma unroll
  for (uint j = 0; j < PIECE; j += 4) {
    float4 four;
    if (IS_WHOLE) {
      four = float4(*(device const vec<T, 4>*)(x + PIECE * at + j));
    } else {
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        const uint k = PIECE * at + j + i;
        four[i] = k < K ? float(x[k]) : 0.0f;
      }
    }
    v[j] = four.x;
    v[j + 1] = four.y;
    v[j + 2] = four.z;
    v[j + 3] = four.w;
    total += (four.x + four.y) + (four.z + four.w);
  }
  return total;
}

template <bool HAS_LEAST>
inline float multiply_piece(thread const piece& p, thread const float* v, float total, float sum) {
  float dot = 0.0f;
#pragma unroll
  for (uint j = 0; j < PIECE; ++j) {
    dot = fma(p.q[j], v[j], dot);
  }
  sum = fma(p.scale, dot, sum);
  return HAS_LEAST ? fma(p.least, total, sum) : sum;
}

// y [M, N] = x W^T for M up to COLUMNS: a simdgroup has ROWS rows of W, and a lane every 32nd of
// their pieces, or pairs of them. What is held meanwhile is the smaller of x and W.
template <int COLUMNS, typename T, typename W>
inline void multiply_few(
    device const T* x, W w, device T* y, uint M, uint N, uint K, uint first, uint lane) {
  constexpr uint ROWS = few<COLUMNS>::ROWS;
  float sums[ROWS * COLUMNS];
#pragma unroll
  for (uint i = 0; i < ROWS * COLUMNS; ++i) {
    sums[i] = 0.0f;
  }
  const uint pieces = (K + PIECE - 1) / PIECE;
  for (uint at = W::AT_ONCE * lane; at < pieces; at += W::AT_ONCE * 32) {
#pragma unroll
    for (uint h = 0; h < W::AT_ONCE; ++h) {
      // rows past the end repeat the last one
      if (COLUMNS == 1) {
        float v[PIECE];
        const float total = read_piece<W::IS_WHOLE>(x, at + h, K, v);
#pragma unroll
        for (uint r = 0; r < ROWS; ++r) {
          const piece p = w.read(min(first + r, N - 1), at + h);
          sums[r] = multiply_piece<W::HAS_LEAST>(p, v, total, sums[r]);
        }
      } else {
        piece p[ROWS];
#pragma unroll
        for (uint r = 0; r < ROWS; ++r) {
          p[r] = w.read(min(first + r, N - 1), at + h);
        }
#pragma unroll
        for (uint m = 0; m < COLUMNS; ++m) {
          float v[PIECE];
          device const T* row = x + ulong(min(m, M - 1)) * K;
          const float total = read_piece<W::IS_WHOLE>(row, at + h, K, v);
#pragma unroll
          for (uint r = 0; r < ROWS; ++r) {
            const uint i = r * COLUMNS + m;
            sums[i] = multiply_piece<W::HAS_LEAST>(p[r], v, total, sums[i]);
          }
        }
      }
    }
  }
#pragma unroll
  for (uint m = 0; m < COLUMNS; ++m) {
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const float sum = simd_sum(sums[r * COLUMNS + m]);
      if (lane == 0 && m < M && first + r < N) {
        y[ulong(m) * N + first + r] = T(sum);
      }
    }
  }
}

constant uint TILE_COLUMNS = 64;
constant uint TILE_DEPTH = 32;
// Rows of a staged tile are some values apart from a power of two.
constant uint PITCH = TILE_DEPTH + 4;
constant uint WIDE_PITCH = TILE_COLUMNS + 4;
constant uint STAGED = TILE_COLUMNS * PITCH;

// A tile of ROWS x 64 of y [M, N] = x W^T, or of y [M, K] = x W (TURNED), by 4 simdgroups of 32
// rows each. Weights of a tile are unpacked once, in the dtype of x.
template <int ROWS, bool TURNED, typename T, typename W>
inline void multiply_tiles(
    threadgroup T* left,
    threadgroup T* right,
    device const T* x,
    W w,
    device T* y,
    uint M,
    uint N,
    uint K,
    uint2 tile,
    uint thread_at,
    uint simdgroup,
    uint lane) {
  constexpr uint ACROSS = 4 / (ROWS / 32), COLUMNS = 8 / ACROSS, SHARE = ROWS / 4;
  const uint depth = TURNED ? N : K, width = TURNED ? K : N;
  const uint2 place = place_in_tile(lane);
  const uint top = simdgroup / ACROSS * 32, from = simdgroup % ACROSS * (8 * COLUMNS);
  simdgroup_float8x8 sums[4 * COLUMNS];
#pragma unroll
  for (uint i = 0; i < 4 * COLUMNS; ++i) {
    sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (uint d = 0; d < depth; d += TILE_DEPTH) {
    const uint row = thread_at / (TILE_DEPTH / SHARE);
    const uint first = thread_at % (TILE_DEPTH / SHARE) * SHARE;
    const uint m = tile.y * ROWS + row;
#pragma unroll
    for (uint j = 0; j < SHARE; ++j) {
      const uint at = d + first + j;
      left[row * PITCH + first + j] = m < M && at < depth ? x[ulong(m) * depth + at] : T(0.0f);
    }
    const uint in_row = (TURNED ? TILE_COLUMNS : TILE_DEPTH) / PIECE;
    const uint n = thread_at / in_row, part = thread_at % in_row;
    const uint weight_row = (TURNED ? d : tile.x * TILE_COLUMNS) + n;
    const uint at = (TURNED ? tile.x * TILE_COLUMNS : d) / PIECE + part;
    threadgroup T* to = right + n * (TURNED ? WIDE_PITCH : PITCH) + part * PIECE;
    const bool is_there = weight_row < N && at * PIECE < K;
    const piece p = w.read(is_there ? weight_row : 0, is_there ? at : 0);
#pragma unroll
    for (uint j = 0; j < PIECE; ++j) {
      to[j] = T(is_there ? fma(p.scale, p.q[j], p.least) : 0.0f);
    }
    // the tiles are read by all simdgroups
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint i = 0; i < TILE_DEPTH; i += 8) {
      simdgroup_float8x8 b[COLUMNS];
#pragma unroll
      for (uint c = 0; c < COLUMNS; ++c) {
        b[c] = TURNED ? tile_at(right + i * WIDE_PITCH + from + 8 * c, WIDE_PITCH, place)
                      : turned_tile_at(right + (from + 8 * c) * PITCH + i, PITCH, place);
      }
#pragma unroll
      for (uint r = 0; r < 4; ++r) {
        const simdgroup_float8x8 a = tile_at(left + (top + 8 * r) * PITCH + i, PITCH, place);
#pragma unroll
        for (uint c = 0; c < COLUMNS; ++c) {
          const uint s = r * COLUMNS + c;
          simdgroup_multiply_accumulate(sums[s], a, b[c], sums[s]);
        }
      }
    }
    // and written again
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
    const uint m = tile.y * ROWS + top + 8 * r + place.y;
#pragma unroll
    for (uint c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (uint e = 0; e < 2; ++e) {
        const uint column = tile.x * TILE_COLUMNS + from + 8 * c + place.x + e;
        if (m < M && column < width) {
          y[ulong(m) * width + column] = T(sums[r * COLUMNS + c].thread_elements()[e]);
        }
      }
    }
  }
}
