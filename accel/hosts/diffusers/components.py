"""The models of a diffusers pipeline that can be accelerated, by name, and whether their weights are in place.

Neither accelerate nor diffusers is imported: offloading is recognised by the hooks that they leave on modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...core.reasons import Reason

_NEVER = frozenset({"safety_checker", "watermark"})  # run once per image, on the finished image

_ACCELERATE_HOOK, _DIFFUSERS_HOOK = "_hf_hook", "_diffusers_hook"
_CAPTURING = "transformers.utils.output_capturing"
"""The module whose hooks note a part's output. Once somebody asks a text encoder for hidden states, as SDXL does, they
stay on its attention layers too, where they do nothing unless attention weights are asked for."""


def components(pipe: Any) -> dict[str, torch.nn.Module]:
    """The models by name: "unet", "transformer", "controlnet", "vae.decoder", "vae.encoder", "text_encoder", ...

    A model that is called through methods, such as a VAE, is listed as its encoder and its decoder. A container of
    several models (MultiControlNetModel) is listed as each of them: "controlnet.0" and so on.

    Raises TypeError: `pipe` is not a pipeline.
    """
    parts = getattr(pipe, "components", None)
    if not isinstance(parts, dict):
        raise TypeError(f"expected a diffusers pipeline, not a {type(pipe).__name__}")
    models = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module) and name not in _NEVER}
    return {name: module for part, model in models.items() for name, module in _list_models(part, model)}


def choose_models(pipe: Any, ignores: Collection[str]) -> dict[str, torch.nn.Module]:
    """The models except those named in `ignores`; "vae" covers everything that begins with "vae.". Raises ValueError
    for a name that the pipeline does not have."""
    found = components(pipe)
    groups = {name.partition(".")[0] for name in found}
    known = {*found, *groups, *pipe.components}
    absent = {name for name, part in pipe.components.items() if part is None}
    for name in ignores:
        if name not in known and name.partition(".")[0] not in absent:
            there = ", ".join(dict.fromkeys([*sorted(groups - set(found)), *found]))
            raise ValueError(f"{type(pipe).__name__} has no component {name!r} to ignore; it has {there}.")
    left_out = set(ignores)
    return {name: part for name, part in found.items() if not left_out & {name, name.partition(".")[0]}}


def load(model: torch.nn.Module) -> None:
    """Move the model to its device now, where its blocks are inspected, if offloading would do so in its call; as
    diffusers does before it calls a method other than the forward."""
    hook = model.__dict__.get(_ACCELERATE_HOOK)
    if any(cls.__name__ == "CpuOffload" for one in getattr(hook, "hooks", (hook,)) for cls in type(one).__mro__):
        hook.pre_forward(model)


def find_part_hooks(model: torch.nn.Module) -> Reason | None:
    """Why the model runs eagerly because its parts are moved to the device one by one; None if they are not."""
    for path, part in model.named_modules():
        hook = part.__dict__.get(_ACCELERATE_HOOK)
        if path and any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,))):
            return Reason("layers_offloaded")
        hooks = getattr(part.__dict__.get(_DIFFUSERS_HOOK), "hooks", {})
        if any("group_offload" in name for name in hooks):
            return Reason("layers_offloaded")
    return None


def asks_for_attentions(model: torch.nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether this call of a text encoder is to return attention weights. given: the call's named arguments."""
    return bool(given.get("output_attentions", getattr(getattr(model, "config", None), "output_attentions", False)))


@contextmanager
def disable_idle_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Turn off hooks that collect attention weights, during a call that does not return them."""
    taken = []
    for part in model.modules():
        hooks = part.__dict__.get("_forward_hooks") or {}
        taken.append((hooks, {key: hooks.pop(key) for key in [key for key, hook in hooks.items() if _is_idle(hook)]}))
    try:
        yield
    finally:
        for hooks, idle in taken:
            others = dict(hooks)
            hooks.clear()
            hooks.update(idle | others)  # they note what layers give, not what others' hooks make of it


def _is_idle(hook: Any) -> bool:
    if getattr(hook, "__module__", None) != _CAPTURING:
        return False
    values = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return "key" in values and "attentions" in str(values["key"].cell_contents)


def find_missing_weight(model: torch.nn.Module) -> str | None:
    """The name of a weight that has no values and no hook to load them; None if there is none."""
    if find_part_hooks(model) is not None:
        return None
    return next((name for name, weight in model.named_parameters() if weight.is_meta), None)


def _list_models(name: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    coders = [part for part in ("decoder", "encoder") if isinstance(getattr(model, part, None), torch.nn.Module)]
    nets = getattr(model, "nets", None)
    if callable(getattr(model, "decode", None)) and coders:
        yield from ((f"{name}.{part}", getattr(model, part)) for part in coders)
    elif isinstance(nets, torch.nn.ModuleList):
        yield from ((f"{name}.{index}", net) for index, net in enumerate(nets))
    else:
        yield name, model
