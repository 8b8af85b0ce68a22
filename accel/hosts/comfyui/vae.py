"""VAE Skip Compile's work: a view of a VAE whose calls are never compiled, or whose decoder is, by our cache."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...block_runner import CompileSettings
from ...graph_cache import GraphCache, shared
from ...substitution import Order, substituted
from . import graph_store
from .accelerate import block_layers

_CALLS = ("decode", "decode_tiled", "encode", "encode_tiled")


def skip_compile(vae: Any) -> Any:
    """A VAE over the same weights in whose calls nothing is compiled, whoever asked for it."""
    return _view(vae, lambda view: _nothing_compiled())


def compile_decoder(vae: Any, settings: CompileSettings, cache: GraphCache = shared) -> Any:
    """A VAE over the same weights whose decoder's blocks run compiled, one graph a kind for all sizes and tiles."""

    graph_store.attach(cache)

    def around(view: Any) -> AbstractContextManager:
        decoder = getattr(view.first_stage_model, "decoder", None)
        if not isinstance(decoder, torch.nn.Module):
            return nullcontext()
        return _with_layers(decoder, settings, cache)

    return _view(vae, around)


@contextmanager
def _with_layers(decoder: torch.nn.Module, settings: CompileSettings, cache: GraphCache) -> Iterator[None]:
    with cache.claim() as claim, substituted(block_layers(decoder, settings, cache, claim), Order.COMPILED):
        yield


def _nothing_compiled() -> AbstractContextManager:
    """While it lasts, functions wrapped in torch.compile run as they were written (torch 2.6 and later)."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if set_stance is None else set_stance("force_eager")


def _view(vae: Any, around) -> Any:
    """A shallow copy of the VAE whose public calls run inside `around(copy)`; the VAE given is unchanged.

    The calls of one view do not stack: an inner call (core falls back to tiles by itself) keeps the outer's.
    """
    view = copy.copy(vae)
    original = type(vae)
    active = []

    def bind(name: str):
        method = getattr(original, name)

        @functools.wraps(method)
        def call(*args, **kwargs):
            if active:
                return method(view, *args, **kwargs)
            active.append(name)
            try:
                with around(view):
                    return method(view, *args, **kwargs)
            finally:
                active.clear()

        return call

    for name in _CALLS:
        if hasattr(original, name):
            setattr(view, name, bind(name))
    return view
