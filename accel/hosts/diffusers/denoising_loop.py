"""Contexts around a pipeline's denoising loops: every pipeline of diffusers shows a progress bar for as long as one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any

_NAME = "progress_bar"

MakeContext = Callable[[], AbstractContextManager[Any]]


@contextmanager
def around_loops(pipe: Any, context: MakeContext) -> Iterator[None]:
    """While it lasts, each denoising loop of the pipeline runs in a context that `context` makes.

    However the loop ends, so does its context. Does nothing for something that shows no progress. The pipeline is not
    held: with the last reference to it its memory is free.
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
    """What a pipeline calls for its progress bar: its own way to make one, and a context beside it."""

    def __init__(self, own: Callable[..., Any], context: MakeContext):
        self._own = weakref.WeakMethod(own) if isinstance(own, MethodType) else lambda: own
        self._context = context
        self.is_over = False
        """Somebody who has put something of theirs in front may still hold this."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bar = self._own()(*args, **kwargs)
        return bar if self.is_over else _Loop(bar, self._context)

    def __deepcopy__(self, memo: dict) -> Any:
        """For a copy of the pipeline its own again: `memo` has the copy already."""
        own = self._own()
        if not isinstance(own, MethodType):
            return copy.deepcopy(own, memo)
        copied = memo.get(id(own.__self__))
        return own if copied is None else MethodType(own.__func__, copied)


class _Loop:
    """A progress bar, entered or iterated over, with a context for as long as that lasts."""

    def __init__(self, bar: Any, context: MakeContext):
        self._bar, self._context = bar, context
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        with ExitStack() as undo:
            bar = undo.enter_context(self._bar)  # with it those contexts that were there before this one
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
