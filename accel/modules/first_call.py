"""Layers that are made when a part of a model is first called, not before.

A host may load a model's weights inside the call that we speed up, so the devices and types of its blocks are
known only once the first of its parts is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .blocks import blocks
from .substitution import Layer, Order, substituted

MakeLayers = Callable[[torch.nn.Module], Mapping[torch.nn.Module, Layer]]
"""Takes the part that is being called and returns the layers for it and for the modules in it."""


@contextmanager
def at_first_call(model: torch.nn.Module, make_layers: MakeLayers) -> Iterator[None]:
    """A context in which each part of the model that contains blocks gets its layers when it is first called.

    A part is a module around blocks (an encoder, a decoder); if parts are nested, the outermost one called counts.
    The layers stay in place until the context ends.
    """
    ready: set[torch.nn.Module] = set()
    with ExitStack() as stack:

        def gate(part: torch.nn.Module) -> Layer:
            def layer(inner: Callable, *args: Any, **kwargs: Any) -> Any:
                if part in ready:
                    return inner(*args, **kwargs)
                ready.update(part.modules())
                layers = make_layers(part)
                stack.enter_context(substituted(layers, Order.COMPILED))
                # This call has already passed the place where the part's own layer is now.
                own = layers.get(part)
                return inner(*args, **kwargs) if own is None else own(inner, *args, **kwargs)

            return layer

        stack.enter_context(substituted({part: gate(part) for part in parts(model)}, Order.CACHED))
        yield


def parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules around the model's blocks, from the model itself inwards; empty if it has no blocks."""
    paths = dict.fromkeys(
        path[:end]
        for path, _ in blocks(model)
        for end in (0, *(index for index, letter in enumerate(path) if letter == "."))
    )
    return [model.get_submodule(path) for path in paths]


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model or a part of it is already compiled: torch would then trace into stand-ins and fail.

    Truthiness matters: what our hosts put where torch keeps a module's compiled call is false.
    """
    return any("_orig_mod" in part._modules or part._compiled_call_impl for part in model.modules())
