"""The models of a diffusers pipeline that can be accelerated, by the names that people give them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

_NEVER = frozenset({"safety_checker", "watermark"})
"""They judge or mark images, once each, and are no part of making them."""


def components(pipe: Any) -> dict[str, torch.nn.Module]:
    """The models by name: "unet", "transformer", "controlnet", "vae.decoder", "vae.encoder", "text_encoder", ...

    Of a model that is called by its methods, as a VAE is, these are its encoder and its decoder. A model around
    several of one sort (MultiControlNetModel) is listed as each of them, "controlnet.0" and so on.

    Raises:
        TypeError: it is no pipeline.
    """
    return {name: module for part, model in _models(pipe) for name, module in _parts(part, model)}


def chosen(pipe: Any, ignores: Collection[str]) -> dict[str, torch.nn.Module]:
    """The models but for those that `ignores` names; "vae" stands for all that begins with "vae.".

    Raises:
        ValueError: a name that the pipeline does not have, with those that it has.
    """
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


def _models(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    parts = getattr(pipe, "components", None)
    if not isinstance(parts, dict):
        raise TypeError(f"a diffusers pipeline is wanted, and this is a {type(pipe).__name__}")
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module) and name not in _NEVER:
            yield name, part


def _parts(name: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    coders = [part for part in ("decoder", "encoder") if isinstance(getattr(model, part, None), torch.nn.Module)]
    nets = getattr(model, "nets", None)
    if callable(getattr(model, "decode", None)) and coders:
        yield from ((f"{name}.{part}", getattr(model, part)) for part in coders)
    elif isinstance(nets, torch.nn.ModuleList):
        yield from ((f"{name}.{index}", net) for index, net in enumerate(nets))
    else:
        yield name, model
