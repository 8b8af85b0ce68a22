"""The stand-in for a block whose forward other programs have wrapped: their wrapper, around the compiled function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from ..core.reasons import Reason
from ..core.torch_internals import allow_inlining
from ..fingerprint.survey import Region
from ..modules.substitution import foreign_forward, forward_of
from ..modules.wrapped_forward import WrappedForward
from .block_runner import BlockRunner, compiler_around


class _Inside(functools.partial):
    """The block's own forward, called from inside the wrapper."""


class WrappedRunner(BlockRunner):
    """Runs the wrapper as it is, and in it the graph where the wrapper calls the block's own forward."""

    def __init__(self, region: Region, *args: Any, **kwargs: Any):
        super().__init__(region, *args, **kwargs)
        self._own, self.for_own_alone = region.wrapped.own, region.wrapped.is_on_class
        self._wrap(region.wrapped)  # type: ignore[arg-type]  # made where there is one alone

    @allow_inlining
    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        # What another survey had in place may be inside already.
        if is_dynamo_compiling() or compiler_around() is not None or type(inner) is _Inside:
            return super().__call__(inner, *args, **kwargs)
        block = self._region.block
        if not self._wrapped.stands(block, inner):
            now = WrappedForward.find(block)  # one like it, made anew as for each call
            if now is not None and now.own is self._own and now.is_on_class == self.for_own_alone:
                self._wrap(now)
            elif now is None and forward_of(type(block))[1] is self._own and foreign_forward(block) is None:
                return super().__call__(inner, *args, **kwargs)
            else:
                return self._run_eagerly(self._describe(inner, args, kwargs), Reason("forward_replaced"))
        return self._wrapper(*args, **kwargs)

    def _wrap(self, wrapped: WrappedForward) -> None:
        block, own = self._region.block, self._own
        inside, run = _Inside(own, block), super().__call__

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return run(inside, *args, **kwargs) if module is block else own(module, *args, **kwargs)

        self._wrapped, self._wrapper = wrapped, wrapped.wrap(forward, block)
