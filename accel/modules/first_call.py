"""Stand-ins that are made when a part of a model is first called, not before.

A host may load a model's weights inside of the call that we are asked to speed up, so what blocks it has, on which
device and in which type, can be told only once the first of its parts is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..fingerprint import regions
from .substitution import Layer, Order, substituted
from .wrapped_layers import Wraps

MakeLayers = Callable[[torch.nn.Module], Mapping[torch.nn.Module, Layer]]
"""From the part that is being called to the layers for it and for the modules in it."""


@contextmanager
def at_first_call(model: torch.nn.Module, make_layers: MakeLayers, wraps: Wraps | None = None) -> Iterator[None]:
    """While it lasts, each part of the model that holds blocks gets its layers when it is first called.

    A part is a module around blocks (an encoder, a decoder); of nested ones the outermost that is called counts.
    The layers stay in place to the end, for later calls too. wraps: as for `regions.survey`.
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
                # This call is already past the place where the part's own layer now stands.
                own = layers.get(part)
                return inner(*args, **kwargs) if own is None else own(inner, *args, **kwargs)

            return layer

        stack.enter_context(substituted({part: gate(part) for part in parts(model, wraps)}, Order.CACHED))
        yield


def parts(model: torch.nn.Module, wraps: Wraps | None = None) -> list[torch.nn.Module]:
    """The modules around the model's blocks, itself among them, from the outermost inwards; none without blocks."""
    paths = dict.fromkeys(
        path[:end]
        for path, _ in regions.blocks(model, wraps)
        for end in (0, *(index for index, letter in enumerate(path) if letter == "."))
    )
    return [model.get_submodule(path) for path in paths]


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether somebody has compiled it or a part of it as a whole: torch would trace stand-ins in it, and fail.

    What a host of ours puts where torch keeps a module's compiled call is false.
    """
    return any("_orig_mod" in part._modules or part._compiled_call_impl for part in model.modules())
