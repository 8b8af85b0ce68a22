"""Contexts around a pipeline's denoising loops, which are as long as its progress bars."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any

from ...modules.substitution import rebound

_NAME = "progress_bar"

MakeContext = Callable[[], AbstractContextManager[Any]]


@contextmanager
def around_loops(pipe: Any, context: MakeContext) -> Iterator[None]:
    """Run each denoising loop of the pipeline in a context made by `context`, which ends with the loop.

    Does nothing for a pipeline without a progress bar. Keeps no reference to the pipeline.
    """
    if not callable(getattr(pipe, _NAME, None)):
        del pipe
        yield
        return
    before, reference = vars(pipe).get(_NAME), weakref.ref(pipe)
    bar = vars(pipe)[_NAME] = _ProgressBar(getattr(pipe, _NAME), context)
    del pipe
    try:
        yield
    finally:
        bar.is_over = True
        own = {} if reference() is None else vars(reference())
        if own.get(_NAME) is bar:
            del own[_NAME]
            if before is not None:
                own[_NAME] = before


class _ProgressBar:
    """Replaces a pipeline's `progress_bar`: its own progress bar, and a context with it."""

    def __init__(self, own: Callable[..., Any], context: MakeContext):
        self._own = weakref.WeakMethod(own) if isinstance(own, MethodType) else lambda: own
        self._context = context
        self.is_over = False
        """Checked because other code may have wrapped this and still call it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bar = self._own()(*args, **kwargs)
        return bar if self.is_over else _Loop(bar, self._context)

    def __deepcopy__(self, memo: dict) -> Any:
        """The pipeline's own method, bound to the copy of the pipeline, which `memo` already has."""
        own = self._own()
        return rebound(own, memo, own) if isinstance(own, MethodType) else copy.deepcopy(own, memo)

    def __reduce_ex__(self, protocol: int) -> tuple:
        """The pipeline's own method: what is pickled is the pipeline as it was before."""
        return _itself, (self._own(),)


def _itself(value: Any) -> Any:
    return value


class _Loop:
    """A progress bar that, while entered or iterated over, is inside a context."""

    def __init__(self, bar: Any, context: MakeContext):
        self._bar, self._context = bar, context
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        with ExitStack() as undo:
            bar = undo.enter_context(self._bar)  # enters the contexts placed before this one
            undo.enter_context(self._context())
            self._stack = undo.pop_all()
        return bar

    def __exit__(self, *error: Any) -> Any:
        return self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        bar = iter(self._bar)
        for first in bar:
            with self._context():
                yield first
                yield from bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
