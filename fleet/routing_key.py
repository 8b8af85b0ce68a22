"""What a prompt will run, read from it without running it: the model and the shape of the latent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODELS = ("ckpt_name", "unet_name")
"""Inputs of loaders, core's and others', that name the model which is sampled with."""

SIZES = ("width", "height", "length", "batch_size")
"""Inputs of nodes that begin with an empty latent: pixels, frames, images at once."""

LONGEST = 300


def routing_key(prompt: Any) -> str:
    """Equal for prompts that run the same graphs and captured calls, such as "sdxl.safetensors 1024x1024x1".

    Empty where the prompt does not say it: a size that another node works out, or an image to start from.

    prompt: in ComfyUI's API format; anything else gives an empty key too.
    """
    models, shapes = set(), set()
    for node in prompt.values() if isinstance(prompt, Mapping) else ():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        if not isinstance(inputs, Mapping):
            continue
        models.update(inputs[name] for name in MODELS if isinstance(inputs.get(name), str))
        if "batch_size" in inputs and "width" in inputs and "height" in inputs:
            given = [inputs[name] for name in SIZES if name in inputs]
            if not all(type(value) is int for value in given):
                return ""
            shapes.add("x".join(map(str, given)))
    if not models or not shapes:
        return ""
    key = " ".join([*sorted(models), *sorted(shapes)])[:LONGEST]
    return key.encode(errors="replace").decode()  # Serve sends it as UTF-8, and JSON may hold lone surrogates
