// SPDX-License-Identifier: MIT
// Samplers: how a texture is read between its texels and beyond its edges.
#pragma once

// A namespace of its own, which only sources with textures open: its names are common ones.
namespace metal::msl_image {
enum class access { sample, read, write, read_write };
enum class coord { normalized, pixel };
enum class address { clamp_to_zero, clamp_to_edge, repeat, mirrored_repeat, clamp_to_border };
enum class s_address { clamp_to_zero, clamp_to_edge, repeat, mirrored_repeat, clamp_to_border };
enum class t_address { clamp_to_zero, clamp_to_edge, repeat, mirrored_repeat, clamp_to_border };
enum class r_address { clamp_to_zero, clamp_to_edge, repeat, mirrored_repeat, clamp_to_border };
enum class filter { nearest, linear, bicubic };
enum class mag_filter { nearest, linear, bicubic };
enum class min_filter { nearest, linear, bicubic };
enum class mip_filter { none, nearest, linear };
enum class border_color { transparent_black, opaque_black, opaque_white };
enum class compare_func {
  none,
  less,
  less_equal,
  greater,
  greater_equal,
  equal,
  not_equal,
  always,
  never
};
enum class component { x, y, z, w };
struct max_anisotropy {
  int value;
  constexpr explicit max_anisotropy(int n) : value(n) {}
};
struct lod_clamp {
  float low, high;
  constexpr lod_clamp(float a, float b) : low(a), high(b) {}
};
// There is one level: what chooses among levels is taken and has no effect.
struct level {
  constexpr explicit level(float) {}
};
struct bias {
  constexpr explicit bias(float) {}
};
struct min_lod_clamp {
  constexpr explicit min_lod_clamp(float) {}
};
struct gradient2d {
  gradient2d(float2, float2) {}
};
struct gradient3d {
  gradient3d(float3, float3) {}
};
struct gradientcube {
  gradientcube(float3, float3) {}
};

struct sampler {
  int pixels = 0;
  int addresses[3] = {1, 1, 1};
  int is_linear = 0;
  int border = 0;
  int compare = 0;

  template <typename... O>
  constexpr sampler(O... options) {
    (set(options), ...);
  }
  constexpr void set(coord c) { pixels = c == coord::pixel; }
  constexpr void set(address a) { addresses[0] = addresses[1] = addresses[2] = int(a); }
  constexpr void set(s_address a) { addresses[0] = int(a); }
  constexpr void set(t_address a) { addresses[1] = int(a); }
  constexpr void set(r_address a) { addresses[2] = int(a); }
  constexpr void set(filter f) { is_linear = f != filter::nearest; }
  constexpr void set(mag_filter f) { is_linear = f != mag_filter::nearest; }
  constexpr void set(min_filter) {}
  constexpr void set(mip_filter) {}
  constexpr void set(border_color c) { border = int(c); }
  constexpr void set(compare_func f) { compare = int(f); }
  constexpr void set(max_anisotropy) {}
  constexpr void set(lod_clamp) {}

  // The texel that stands for texel `i` of `n` along an axis; -1 for the border.
  int wrapped(int i, int n, int axis) const {
    if (i >= 0 && i < n) return i;
    switch (addresses[axis]) {
      case 1:
        return i < 0 ? 0 : n - 1;
      case 2:
        return (i % n + n) % n;
      case 3: {
        const int k = (i % (2 * n) + 2 * n) % (2 * n);
        return k < n ? k : 2 * n - 1 - k;
      }
      default:
        return -1;
    }
  }
  bool holds(float reference, float value) const {
    switch (compare) {
      case 1:
        return reference < value;
      case 2:
        return reference <= value;
      case 3:
        return reference > value;
      case 4:
        return reference >= value;
      case 5:
        return reference == value;
      case 6:
        return reference != value;
      default:
        return compare == 7;
    }
  }
};
}  // namespace metal::msl_image
