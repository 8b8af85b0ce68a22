"""The blocks of a model: what is worth compiling of it, found by structure alone. No model family is named here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from . import wrapped_layers
from .opaque_layers import OpaqueLayer
from .wrapped_layers import Wraps

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
_CONTAINERS = (*_LISTS, torch.nn.Sequential)


def blocks(model: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[str, torch.nn.Module]]:
    """The model's blocks with their paths, in the order of the module tree.

    A block is an element of a list, or any other module of the same class (a VAE's middle block). Where no list has any
    (TAESD, Wan's VAE), it is an element of a `Sequential`, of a class that occurs there at least twice.
    """
    classes = frozenset(type(block) for _, block in _blocks(model, "", False, frozenset(), _LISTS, wraps))
    if classes:
        yield from _blocks(model, "", False, classes, _LISTS, wraps)
        return
    found = list(_blocks(model, "", False, frozenset(), _CONTAINERS, wraps))
    count = Counter(type(block) for _, block in found)
    yield from ((path, block) for path, block in found if count[type(block)] > 1)


def _blocks(
    module: torch.nn.Module,
    path: str,
    in_list: bool,
    classes: frozenset[type],
    lists: tuple[type, ...],
    wraps: Wraps | None,
) -> Iterator[tuple[str, torch.nn.Module]]:
    is_container = isinstance(module, _CONTAINERS)
    may_be_block = (in_list or type(module) in classes) and not is_container
    if may_be_block and _is_composite(module, wraps) and not _contains_blocks(module, lists, wraps):
        yield path, module
        return
    # A module next to a list of blocks inside a block (the attention next to a mixture of experts) is a block too.
    in_list = isinstance(module, lists) or (in_list and (is_container or _contains_blocks(module, lists, wraps)))
    for name, child in wrapped_layers.children(module, wraps):
        yield from _blocks(child, f"{path}.{name}" if path else name, in_list, classes, lists, wraps)


def _is_composite(module: torch.nn.Module, wraps: Wraps | None) -> bool:
    """Whether it has at least two layers with weights: around a single one there is nothing to fuse."""
    parts = (part for _, part in wrapped_layers.modules(module, wraps) if part is not module)
    layers = (part for part in parts if part._parameters or isinstance(part, OpaqueLayer))
    return next(layers, None) is not None and next(layers, None) is not None


def _contains_blocks(module: torch.nn.Module, lists: tuple[type, ...], wraps: Wraps | None) -> bool:
    """Whether a list further inside has composite elements: then those are the blocks."""
    return any(
        _is_composite(element, wraps)
        for _, inner in wrapped_layers.modules(module, wraps)
        if inner is not module and isinstance(inner, lists) and not isinstance(inner, torch.nn.ModuleDict)
        for _, element in wrapped_layers.children(inner, wraps)
    )


def unwrap_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` was given, where this is what it returned."""
    return getattr(model, "_orig_mod", model)


def is_compiled_itself(module: torch.nn.Module) -> bool:
    """Whether somebody else has compiled the module as a whole. What our hosts put where torch keeps a module's
    compiled call is false."""
    return bool("_orig_mod" in module._modules or module._compiled_call_impl)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model or a part of it is already compiled: torch would then trace into stand-ins and fail."""
    return any(map(is_compiled_itself, model.modules()))
