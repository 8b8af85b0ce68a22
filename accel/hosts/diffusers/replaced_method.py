"""A method of one object replaced for the length of a context: a scheduler's step, or a pipeline's progress bar, which
is as long as its denoising loop."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any, SupportsIndex

from ...modules.substitution import rebound


@contextmanager
def replace_method(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Within the context, `owner.name(...)` is `call(own, ...)`, where `own` is the method as it was. The owner's
    copies, pickled or not, have their own method, and it is not kept alive."""
    before, reference = vars(owner).get(name), weakref.ref(owner)
    replacement = vars(owner)[name] = _Replacement(getattr(owner, name), before, call)
    del owner
    try:
        yield
    finally:
        replacement.is_over = True
        own = {} if reference() is None else vars(reference())
        # Contexts of other threads may have begun after this one, or ended before it.
        while isinstance(top := own.get(name), _Replacement) and top.is_over:
            del own[name]
            if top.before is not None:
                own[name] = top.before


class _Replacement:
    """Stands in a method's place. before: what the object itself had there."""

    def __init__(self, own: Callable[..., Any], before: Any, call: Callable[..., Any]):
        self._own: Callable[[], Any] = weakref.WeakMethod(own) if isinstance(own, MethodType) else lambda: own
        self.before, self._call = before, call
        self.is_over = False  # checked because other code may have wrapped this and still call it

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's own: pipelines ask for its parameters."""
        return inspect.signature(self._own())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own()
        return own(*args, **kwargs) if self.is_over else self._call(own, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        """The method as it was, bound to the object's copy; itself where only attributes are copied, to be put back."""
        own = self._own()
        while isinstance(own, _Replacement):  # of a context around this one
            own = own._own()
        return rebound(own, memo, self) if isinstance(own, MethodType) else copy.deepcopy(own, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """The method as it was: what is pickled is the object without this."""
        return _itself, (self._own(),)


def _itself(value: Any) -> Any:
    return value


def wrap_loops(pipe: Any, context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """A context within which each denoising loop of the pipeline runs in one made by `context`; nothing without a
    progress bar. Keeps no reference to the pipeline."""
    if not callable(getattr(pipe, "progress_bar", None)):
        return nullcontext()
    return replace_method(pipe, "progress_bar", lambda own, *args, **kwargs: _Loop(own(*args, **kwargs), context))


class _Loop:
    """A progress bar that, while entered or iterated over, is inside a context."""

    def __init__(self, bar: Any, context: Callable[[], AbstractContextManager[Any]]):
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
