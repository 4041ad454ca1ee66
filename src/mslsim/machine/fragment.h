// SPDX-License-Identifier: MIT
// What fragment functions have and kernels do not. A quad of lanes is a square of 2 x 2 pixels: a
// picture is run in groups that are two pixels wide.
#pragma once

namespace metal {
MSL_LANE_VALUE inline T dfdx(T v) {
  const ushort left = msl_lane() & 2;
  return quad_shuffle(v, left + 1) - quad_shuffle(v, left);
}
MSL_LANE_VALUE inline T dfdy(T v) {
  const ushort upper = msl_lane() & 1;
  return quad_shuffle(v, upper + 2) - quad_shuffle(v, upper);
}
MSL_LANE_VALUE inline T fwidth(T v) { return abs(dfdx(v)) + abs(dfdy(v)); }

// The thread goes on, as a helper does, but writes nothing.
inline void discard_fragment() { msl_discard(); }
inline bool msl_is_discarded() { return msl_discarded(); }

// A result as the four channels of a target.
template <typename C, typename T>
inline vec<C, 4> msl_channels(T v) {
  return vec<C, 4>(C(v), C(0), C(0), C(1));
}
template <typename C, typename T, int N>
inline vec<C, 4> msl_channels(vec<T, N> v) {
  vec<C, 4> r(C(0), C(0), C(0), C(1));
  for (int i = 0; i < N; ++i) r.set(i, C(v.get(i)));
  return r;
}
// Between the values at the corners: upper left and right, lower left and right.
inline float4 msl_between(const float4* corners, float2 at) {
  return mix(mix(corners[0], corners[1], at.x), mix(corners[2], corners[3], at.x), at.y);
}
}  // namespace metal
