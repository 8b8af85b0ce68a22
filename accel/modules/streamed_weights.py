"""Weights that are on the device during a block's call only: a host streams them from the CPU's memory.

The engine knows of it no more than this: the block is surveyed and copied as it would be with its weights in place
(`Plain`), so its kind and its graphs are the same; and each call of its graph takes the weights first (`WeightSource`)
and releases them at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Plain = Callable[[torch.nn.Module], torch.nn.Module]
"""Gives a module as it would be with its weights in place: itself, or a copy without what the host keeps on it for
streaming. The copy shares everything else; streamed weights are tensors without values on "meta".

Raises fingerprint.plain_values.Indescribable: the host streams them in a way that it does not know how to follow."""


class WeightSource(Protocol):
    """Where one block's weights come from at each call."""

    def take(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The weights, in the order in which the block's graphs take them; valid until `release`.

        inputs: tensors of the call, on the device where the weights are needed. Taken already, they are the same.

        Raises RunEagerly: they cannot be taken now, and nothing is held.
        """

    def release(self) -> None:
        """Give the weights back; without effect where none are taken. The device may still be reading them."""


@contextmanager
def weights_taken(source: WeightSource, inner: Callable) -> Iterator[Callable]:
    """A context for one call of a block, which releases its weights at the end. It gives the block's own forward, which
    releases them first: run eagerly, the block brings them layer by layer."""

    def call_and_release(*args: Any, **kwargs: Any) -> Any:
        source.release()
        return inner(*args, **kwargs)

    try:
        yield call_and_release
    finally:
        source.release()


def keep_in_place(module: torch.nn.Module) -> torch.nn.Module:
    """The `Plain` of a host that streams nothing."""
    return module
