"""Layers that somebody has wrapped to change what they compute: a block is seen as if they stood there bare.

A LoRA put around a linear layer adds a product of two small matrices to what the layer computes, which is
as good as added to its weight. So a block is surveyed, copied and compiled without its wrappers, and one
graph serves it bare and wrapped, at any strength; what they add goes into the weights of each call
(`added_weights`). Without a `Wraps`, modules are seen as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch


class LowRank(NamedTuple):
    """What is added to a layer now: `scale * up @ down` to its weight, `scale * bias` to its bias.

    up: [O, R], of a convolution [O, R, 1...]. down: [R, I], of a convolution [R, I, K...]. bias: [O] or None.
    scale: a number, or a tensor of one.
    """

    up: torch.Tensor
    down: torch.Tensor
    scale: float | torch.Tensor
    bias: torch.Tensor | None


Reader = Callable[[], Sequence[LowRank]]
"""What a wrapper adds to its layer now, nothing where the layer computes as it is; asked at every call of a
block, so it is quick. Raises `RunEagerly` where the wrapper does anything else, with the reason."""


class Wraps(Protocol):
    """What a host knows of the wrappers that are put around layers there."""

    def base(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """The layer that it is around; None of a module that is no wrapper."""

    def reader(self, wrapper: torch.nn.Module, base: torch.nn.Module) -> Reader:
        """Of a wrapper; one is made for each, and again when the block has other wrappers than before."""


def bare(module: torch.nn.Module, wraps: Wraps | None = None) -> torch.nn.Module:
    """The module, or the layer that it is around."""
    base = None if wraps is None else wraps.base(module)
    return module if base is None else base


def children(module: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[str, torch.nn.Module]]:
    """As `Module.named_children`."""
    for name, child in module.named_children():
        yield name, bare(child, wraps)


def modules(module: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[str, torch.nn.Module]]:
    """As `Module.named_modules`: each once, with its path, which has nothing of the wrappers in it."""
    return module.named_modules() if wraps is None else _modules(bare(module, wraps), "", wraps, set())


def _modules(
    module: torch.nn.Module, path: str, wraps: Wraps, seen: set[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for name, child in children(module, wraps):
        yield from _modules(child, f"{path}.{name}" if path else name, wraps, seen)


def wrapped(module: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """(wrapper, layer) of those in the module."""
    for _, part in modules(module, wraps) if wraps is not None else ():
        for child in part._modules.values():
            layer = None if child is None else wraps.base(child)
            if layer is not None:
                yield child, layer


def weights(module: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """As `Module.named_parameters` and then `named_buffers`, without those of wrappers."""
    if wraps is None:
        yield from module.named_parameters()
        yield from module.named_buffers()
        return
    for kept in ("_parameters", "_buffers"):
        seen: set[torch.Tensor] = set()
        for path, part in modules(module, wraps):
            for name, tensor in getattr(part, kept).items():
                if tensor is not None and tensor not in seen:
                    seen.add(tensor)
                    yield f"{path}.{name}" if path else name, tensor
