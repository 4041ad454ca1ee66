# SPDX-License-Identifier: MIT
"""A node for ComfyUI that switches metalcore on and off: put this file into custom_nodes/."""

import metalcore


class MetalcoreSwitch:
    """Passes a model on, with metalcore's functions in place of torch's or without."""

    CATEGORY = "metalcore"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "switch"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802  (ComfyUI's name)
        return {"required": {"model": ("MODEL",), "on": ("BOOLEAN", {"default": True})}}

    def switch(self, model: object, on: bool) -> tuple[object]:
        if on:
            metalcore.enable_pytorch_overrides()
        else:
            metalcore.disable_pytorch_overrides()
        return (model,)


NODE_CLASS_MAPPINGS = {"MetalcoreSwitch": MetalcoreSwitch}
NODE_DISPLAY_NAME_MAPPINGS = {"MetalcoreSwitch": "metalcore on or off"}
