"""The stand-in for a block whose forward other programs have wrapped: their wrapper, around the compiled function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..core.reasons import Reason
from ..fingerprint.survey import Region
from .block_runner import BlockRunner


class _Inside(functools.partial):
    """The block's own forward, called from inside the wrapper."""


class WrappedRunner(BlockRunner):
    """Runs the wrapper as it is, and in it the graph where the wrapper calls the block's own forward."""

    def __init__(self, region: Region, *args: Any, **kwargs: Any):
        super().__init__(region, *args, **kwargs)
        block, self._wrapped = region.block, region.wrapped
        own, self.for_own_alone = self._wrapped.own, self._wrapped.is_on_class
        inside, run = _Inside(own, block), super().__call__

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return run(inside, *args, **kwargs) if module is block else own(module, *args, **kwargs)

        self._wrapper = self._wrapped.around(forward, block)

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        if type(inner) is not _Inside:  # what another survey had in place may be inside already
            if self._wrapped.stands(self._region.block, inner):
                return self._wrapper(*args, **kwargs)
            if not self.for_own_alone:
                return self._eagerly(self._described(inner, args, kwargs), Reason("forward_replaced"))
        return super().__call__(inner, *args, **kwargs)
