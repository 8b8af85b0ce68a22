"""Models whose weights accelerate or diffusers move to the device in their calls: when they are there, and when not.

Nothing is imported of either: they are known by what they leave on modules.
"""

from __future__ import annotations

from typing import Any

import torch

_ACCELERATE, _DIFFUSERS = "_hf_hook", "_diffusers_hook"


def load(model: torch.nn.Module) -> None:
    """Where the whole model is moved to its device in the call, have it moved now: its blocks are looked at there.

    As diffusers itself does in front of a method that is not the model's forward.
    """
    hook = model.__dict__.get(_ACCELERATE)
    if any(cls.__name__ == "CpuOffload" for one in getattr(hook, "hooks", (hook,)) for cls in type(one).__mro__):
        hook.pre_forward(model)


def moved_in_parts(model: torch.nn.Module) -> str | None:
    """Why the model runs uncompiled where its parts are moved one by one; None where they are not."""
    for path, part in model.named_modules():
        if path and _moves_weights(part.__dict__.get(_ACCELERATE)):
            return "its weights are moved to the device layer by layer (sequential CPU offload)"
        hooks = getattr(part.__dict__.get(_DIFFUSERS), "hooks", {})
        if any("group_offload" in name for name in hooks):
            return "its weights are moved to the device group by group (group offloading)"
    return None


def _moves_weights(hook: Any) -> bool:
    return any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))


def without_weights(model: torch.nn.Module) -> str | None:
    """The name of a weight that has no values, nor anybody who brings them; None where there is none."""
    if moved_in_parts(model) is not None:
        return None
    return next((name for name, weight in model.named_parameters() if weight.is_meta), None)
