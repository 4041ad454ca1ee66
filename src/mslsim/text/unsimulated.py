# SPDX-License-Identifier: MIT
"""What Metal has and no simulator of kernels runs: by the words that tell."""

from __future__ import annotations

import re

TEXTURE = re.compile(r"(?:texture|depth)(?:1d|2d|3d|cube|_buffer)(?:_array|_ms)?$")
# What a parameter may be of, or a source speak of, that no simulator of kernels has.
_FEATURES = {
    "acceleration_structure": "ray tracing",
    "primitive_acceleration_structure": "ray tracing",
    "instance_acceleration_structure": "ray tracing",
    "intersection_function_table": "ray tracing",
    "visible_function_table": "tables of functions",
    "imageblock": "imageblocks",
    "stage_in": "stage_in",
    "texture2d_ms_array": "arrays of multisampled textures",
    "depth2d_ms_array": "arrays of multisampled textures",
}
NOT_SIMULATED = "mslsim does not simulate"
UNSIMULATED = frozenset({
    *_FEATURES, "raytracing", "mesh_grid_properties", "object_data", "topology",
    "imageblock_layout_implicit", "render_command", "compute_command",
})  # fmt: skip


def is_image(word: str) -> bool:
    """Whether it is the type of a texture, or of a sampler."""
    return word == "sampler" or TEXTURE.match(word) is not None


def unsimulated_feature(declared: str) -> str:
    """What a parameter, by its text, is of that is not simulated; empty for nothing."""
    words = set(re.findall(r"\w+", declared))
    features = {feature for word, feature in _FEATURES.items() if word in words}
    if "array" in words and any(map(is_image, words)):
        features.add("parameters that are arrays of textures")
    return min(features, default="")
