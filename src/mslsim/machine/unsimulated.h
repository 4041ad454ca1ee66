// SPDX-License-Identifier: MIT
// Names of what is not simulated: a source may have them, and its other kernels run.
#pragma once

// A namespace of its own, which only sources with these words open: its names are common ones.
namespace metal::msl_unsimulated {
#define MSL_WITHOUT(feature) __attribute__((unavailable("mslsim does not simulate " feature)))
#define MSL_RAYS MSL_WITHOUT("ray tracing")
namespace raytracing {
// What a struct or a parameter may hold.
struct instancing {};
struct triangle_data {};
struct curve_data {};
struct world_space_data {};
struct primitive_motion {};
struct instance_motion {};
struct extended_limits {};
template <int N>
struct max_levels {};
template <typename... T>
struct acceleration_structure {};
using primitive_acceleration_structure = acceleration_structure<>;
using instance_acceleration_structure = acceleration_structure<instancing>;
template <typename... T>
struct intersection_function_table {};
enum class intersection_type { none, triangle, bounding_box, curve };
enum class triangle_cull_mode { none, front, back };
enum class geometry_cull_mode { none, triangle, bounding_box, curve };
enum class opacity_cull_mode { none, opaque, non_opaque };
enum class forced_opacity { none, opaque, non_opaque };
enum class geometry_type { none = 0, triangle = 1, bounding_box = 2, curve = 4, all = 7 };
struct ray {
  float3 origin, direction;
  float min_distance, max_distance;
  ray(float3 o = float3(0.0f), float3 d = float3(0.0f), float least = 0, float most = INFINITY)
      : origin(o), direction(d), min_distance(least), max_distance(most) {}
};
// What computes.
template <typename... T>
struct MSL_RAYS intersector {
  struct result_type {};
};
template <typename... T>
struct MSL_RAYS intersection_query {};
template <typename... T>
struct MSL_RAYS intersection_result {};
}  // namespace raytracing
template <typename F>
struct visible_function_table {};

enum class topology { point, line, triangle };
struct mesh_grid_properties {};
template <typename V, typename P, uint MOST_VERTICES, uint MOST_PRIMITIVES, topology T>
struct mesh {};

struct imageblock_layout_implicit {};
struct imageblock_layout_explicit {};
template <typename T, typename L = imageblock_layout_explicit>
struct imageblock {};

struct command_buffer {};
struct MSL_WITHOUT("indirect commands") render_command {};
struct MSL_WITHOUT("indirect commands") compute_command {};
#undef MSL_RAYS
#undef MSL_WITHOUT
}  // namespace metal::msl_unsimulated
