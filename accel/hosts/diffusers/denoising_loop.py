"""Contexts around a pipeline's denoising loops, which are as long as its progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from .replaced_method import replaced_method

MakeContext = Callable[[], AbstractContextManager[Any]]


def around_loops(pipe: Any, context: MakeContext) -> AbstractContextManager[None]:
    """Within what it returns, each denoising loop of the pipeline runs in a context made by `context`.

    Does nothing for a pipeline without a progress bar. Keeps no reference to the pipeline.
    """
    if not callable(getattr(pipe, "progress_bar", None)):
        return nullcontext()
    return replaced_method(pipe, "progress_bar", lambda own, *args, **kwargs: _Loop(own(*args, **kwargs), context))


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
