"""Views of objects that core runs by their methods (a VAE, a CLIP): certain calls of a view are made in a context.

The view of a VAE is never compiled. A VAE runs once per image, so compiling it pays back only over many images, and
whoever compiles it for one size waits for the compiler again at the next.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Around = Callable[[Any], AbstractContextManager]  # makes the context for one call of a view
_VAE_CALLS = ("decode", "encode")  # prefixes of the methods that run a VAE (such as decode_tiled_1d)


def make_uncompiled_vae(vae: Any) -> Any:
    """A VAE with the same weights that runs uncompiled, whatever else compiles it; the given VAE is unchanged."""
    set_stance = getattr(torch.compiler, "set_stance", nullcontext)  # came in torch 2.6
    return make_view(copy.copy(vae), _VAE_CALLS, lambda view: set_stance("force_eager"))


def make_view(copied: Any, prefixes: tuple[str, ...], around: Around) -> Any:
    """The object, a copy of another, as a view: methods whose names begin so run in the contexts. It stays an instance
    of its class. A view of a view replaces it; a view's clones are views."""
    base: type = getattr(type(copied), "_accel_base", type(copied))
    copied.__class__ = _view_class(base, prefixes)
    copied._accel = around
    return copied


@functools.lru_cache(maxsize=16)
def _view_class(base: type, prefixes: tuple[str, ...]) -> type:
    """A subclass of the class. Nested calls of one view (a VAE falls back to tiles by itself) stay under the outer."""

    def enter_contexts(method: Callable) -> Callable:
        # The caller may be compiled; this must not become part of its graph.
        @torch.compiler.disable
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            if self.__dict__.get("_accel_active"):
                return method(self, *args, **kwargs)
            self._accel_active = True
            try:
                with self._accel(self):
                    return method(self, *args, **kwargs)
            finally:
                self.__dict__.pop("_accel_active", None)  # pop: another thread may have made a call too

        return call

    def clone(self, *args, **kwargs):
        return make_view(base.clone(self, *args, **kwargs), prefixes, self._accel)

    names = [name for name in dir(base) if name.startswith(prefixes) and callable(getattr(base, name))]
    calls = {name: enter_contexts(getattr(base, name)) for name in names}
    if hasattr(base, "clone"):
        calls["clone"] = functools.wraps(base.clone)(clone)
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {"_accel_base": base, **named, **calls})
