"""A view of a block without the wrappers that change what its layers compute.

A LoRA around a linear layer adds a product of two small matrices to the output, which equals adding it to the weight.
So a block is surveyed, copied and compiled without its wrappers, and one graph serves it bare and wrapped, at any
strength; what the wrappers add goes into the weights of each call (`dispatch/lora.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from .opaque_layers import OpaqueLayer, OpaqueLayers, runs_others_code


class LowRank(NamedTuple):
    """A change to a layer: `scale * up @ down` is added to its weight, `scale * bias` to its bias.

    up: [O, R], for a convolution [O, R, 1...]. down: [R, I], for a convolution [R, I, K...]. bias: [O] or None.
    scale: a number, or a tensor with one element.
    """

    up: torch.Tensor
    down: torch.Tensor
    scale: float | torch.Tensor
    bias: torch.Tensor | None


_others = OpaqueLayers()

Reader = Callable[[], Sequence[LowRank]]
"""Returns what a wrapper adds to its layer now, nothing if the layer computes unchanged. It is called in every call
of a block, so it must be quick. Raises `RunEagerly` with the reason if the wrapper does anything else."""


class Wraps(Protocol):
    """A host's knowledge of the wrappers that its programs put around layers, and add to their weights."""

    def base(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """The layer inside a wrapper; None if the module is not a wrapper."""

    def reader(self, wrapper: torch.nn.Module, base: torch.nn.Module) -> Reader:
        """A reader for the wrapper; one is made for each, and again when the block's wrappers have changed."""


def unwrap(module: torch.nn.Module, wraps: Wraps | None = None) -> torch.nn.Module:
    """The layer inside a wrapper, or the module itself."""
    base = None if wraps is None else wraps.base(module)
    return module if base is None else base


def find_shown_part(part: torch.nn.Module, wraps: Wraps | None = None) -> torch.nn.Module:
    """What stands in a block for one of its parts: the layer inside a wrapper, or what calls the part as it is."""
    layer = unwrap(part, wraps)
    if isinstance(layer, OpaqueLayer) or not runs_others_code(part) or hasattr(part, "out_channels"):
        return layer
    return _others.any(part, getattr(part, "out_features", None), is_others=True)


def children(module: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[str, torch.nn.Module]]:
    """Like `Module.named_children`, with the layers in place of their wrappers."""
    for name, child in module.named_children():
        yield name, unwrap(child, wraps)


def modules(module: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[str, torch.nn.Module]]:
    """Like `Module.named_modules` of a block with its parts by `find_shown_part`: no wrapper is in modules or paths."""
    return _modules(unwrap(module, wraps), "", wraps, set())


def _modules(
    module: torch.nn.Module, path: str, wraps: Wraps | None, seen: set[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(find_shown_part(child, wraps), f"{path}.{name}" if path else name, wraps, seen)


def find_wrapped(
    module: torch.nn.Module, wraps: Wraps | None = None
) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """The (part, what is shown for it) pairs in a block, where these differ."""
    for _, part in modules(module, wraps):
        for child in part._modules.values():
            layer = child if child is None else find_shown_part(child, wraps)
            if layer is not child:
                yield child, layer


def weights(module: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Like `Module.named_parameters` followed by `named_buffers`, without those of wrappers."""
    for kept in ("_parameters", "_buffers"):
        seen: set[torch.Tensor] = set()
        for path, part in modules(module, wraps):
            for name, tensor in getattr(part, kept).items():
                if tensor is not None and tensor not in seen:
                    seen.add(tensor)
                    yield f"{path}.{name}" if path else name, tensor
