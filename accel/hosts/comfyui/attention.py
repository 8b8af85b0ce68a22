"""Attention that no compiler can look into: a graph calls whatever function is there, by an operator of ours.

Core calls attention by a global of the model's module (`optimized_attention`), which is the function that a flag of the
command line asks for, and lets a per-call option take its place (`optimized_attention_override`). Where it is another
than torch's own attention, a graph has an operator that looks the global up in each call, and calls it with the options
of that call as core would. So a graph does not depend on which function it is.
"""

from __future__ import annotations

import ast
import enum
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...core import torch_internals
from ...core.reasons import Reason, RunEagerly

OVERRIDE = "optimized_attention_override"
"""The per-call option."""

_NAMES = ("optimized_attention", "optimized_attention_masked")
_TRACED = ("attention_pytorch", "attention_basic")
"""Core's functions that are traced as they are."""

_NAME = "attention_of_the_host"
_SCHEMA = f"{_NAME}(Tensor q, Tensor k, Tensor v, Tensor? mask, str place, str how) -> Tensor"
_MASK = "its mask"

_libraries: list[torch.library.Library] = []
_defining = threading.Lock()
_call = threading.local()
"""options: the per-call dict of the block that this thread calls."""


_odd: weakref.WeakSet[Any] = weakref.WeakSet()
"""Overrides that give something else than attention does."""


class Override(enum.Enum):
    """What a block gets in place of an override: a constant, whichever that is."""

    OF_THE_CALL = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the override of this thread's call, where a block runs uncompiled with simplified options."""
        options = begun()
        return options[OVERRIDE](*args, **{**kwargs, "transformer_options": options})


def begin(options: dict[str, Any] | None) -> None:
    """A block is called with these options in this thread."""
    _call.options = options


def begun() -> dict[str, Any] | None:
    """The options of the last such call."""
    return getattr(_call, "options", None)


def is_opaque(module: str | None, name: str) -> bool:
    """Whether the module has an attention function under the name that is not traced."""
    if name not in _NAMES:
        return False
    function = getattr(sys.modules.get(module or ""), name, None)
    return callable(function) and not _is_traced(function)


def in_place_of(override: Any) -> Override:
    """What a block gets for it. Raises RunEagerly: it is known to give something else than attention does."""
    if getattr(override, "__func__", override) in _odd:
        raise RunEagerly(Reason("attention_override"))
    return Override.OF_THE_CALL


class Ignored(frozenset):
    """(module, global) pairs, and those of functions that graphs look up in each call."""

    def __contains__(self, pair: object) -> bool:
        return super().__contains__(pair) or is_opaque(*pair)


def any_opaque() -> str | None:
    """The name of an attention function of the host's that is not traced; None without one."""
    return next((function.__name__ for *_, function in _places() if not _is_traced(function)), None)


def stand_ins() -> Iterator[tuple[Any, str, Callable]]:
    """(module, name, function) of the attention that this thread's call must not trace.

    The function has the operator where it is traced or called without values; elsewhere it calls what was there.
    """
    _define()
    is_overridden = (begun() or {}).get(OVERRIDE) is not None
    for module, name, function in _places():
        is_traced = _is_traced(function)
        if is_overridden or not is_traced:
            yield module, name, _stand_in(f"{module.__name__}:{name}", function, not is_traced)


def _places() -> Iterator[tuple[Any, str, Callable]]:
    for module in list(sys.modules.values()):
        for name in _NAMES:
            function = getattr(module, "__dict__", {}).get(name)
            if callable(function):
                yield module, name, function


def _is_traced(function: Callable) -> bool:
    core = vars(sys.modules["comfy.ldm.modules.attention"])
    function = getattr(function, "stands_for", function)  # another thread may be tracing
    return any(function is core.get(name) for name in _TRACED)


def _stand_in(place: str, function: Callable, is_opaque: bool) -> Callable:
    def attention(q, k, v, *args, **kwargs):
        options = kwargs.get("transformer_options")
        if not is_opaque and (options is None or options.get(OVERRIDE) is None):
            return function(q, k, v, *args, **kwargs)
        if not torch.compiler.is_dynamo_compiling() and not _has_no_values(q):
            return function(q, k, v, *args, **kwargs)
        if hasattr(q, "peek"):  # core's containers of tensors that may be freed early
            q, k, v = q.take(), k.take(), v.take()
        given, named = list(args), {name: item for name, item in kwargs.items() if name != "transformer_options"}
        mask = given[1] if len(given) > 1 else named.get("mask")
        if mask is not None:
            if len(given) > 1:
                given[1] = _MASK
            else:
                named["mask"] = _MASK
        if options is not None:
            options = {name: item for name, item in options.items() if name != OVERRIDE}
        return torch.ops.accel.attention_of_the_host(q, k, v, mask, place, _written(given, named, options))

    attention.__name__, attention.stands_for = function.__name__, function
    return attention


def _has_no_values(tensor: Any) -> bool:
    tensor = tensor.peek() if hasattr(tensor, "peek") else tensor
    return tensor.is_meta or type(tensor) is torch_internals.FAKE_TENSOR.get(None)


@torch.compiler.assume_constant_result
def _written(args: list, kwargs: dict[str, Any], options: dict[str, Any] | None) -> str:
    """A call without its tensors as text. options: those that the block has; None for a call without any."""
    return repr(_as_text((args, kwargs, options)))


def _as_text(value: Any) -> Any:
    if type(value) in (list, tuple):
        return tuple(map(_as_text, value))
    if type(value) is dict:
        return {name: _as_text(item) for name, item in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"attention is called with a {type(value).__name__}")


@functools.lru_cache(maxsize=1024)
def _read(how: str) -> tuple[tuple, dict[str, Any], dict[str, Any] | None]:
    return _value(ast.literal_eval(how))


def _value(text: Any) -> Any:
    if type(text) is tuple:
        return tuple(map(_value, text))
    if type(text) is dict:
        return {name: _value(item) for name, item in text.items()}
    is_type = isinstance(text, str) and text.startswith("torch.")
    return getattr(torch, text.removeprefix("torch.")) if is_type else text


def _run(q, k, v, mask, place, how):
    args, kwargs, of_block = _read(how)
    args = tuple(mask if item == _MASK else item for item in args)
    kwargs = {name: mask if item == _MASK else item for name, item in kwargs.items()}
    if of_block is not None:
        options = begun() or {}
        is_unchanged = all(name in options and options[name] == item for name, item in of_block.items())
        kwargs["transformer_options"] = options if is_unchanged else {**options, **of_block}
    module, _, name = place.partition(":")
    function = getattr(sys.modules[module], name)
    out = function(q, k, v, *args, **kwargs)
    expected = _size_of(q, how)
    if type(out) is not torch.Tensor or out.shape != expected or out.dtype != q.dtype:
        override = (begun() or {}).get(OVERRIDE)
        if override is not None:
            _odd.add(getattr(override, "__func__", override))
        raise RunEagerly(Reason("attention_override"))
    out = out.contiguous()
    given = {tensor.untyped_storage().data_ptr() for tensor in (q, k, v, mask) if tensor is not None}
    return out.clone() if out.untyped_storage().data_ptr() in given else out


def _fake(q, k, v, mask, place, how):
    return q.new_empty(_size_of(q, how))


def _size_of(q: torch.Tensor, how: str) -> tuple[int, ...]:
    """The size of the result, as core's functions have it."""
    args, kwargs, _ = _read(how)
    parameters = ("heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")
    given = dict(zip(parameters, args, strict=False)) | kwargs
    heads = given["heads"]
    if given.get("skip_reshape"):
        batch, _, rows, width = q.shape
    else:
        batch, rows, width = q.shape[0], q.shape[1], q.shape[2] // heads
    return (batch, heads, rows, width) if given.get("skip_output_reshape") else (batch, rows, heads * width)


def _define() -> None:
    """Register the operator, once in the process."""
    with _defining:
        if hasattr(torch.ops.accel, _NAME):
            return
        library = torch.library.Library("accel", "FRAGMENT")
        library.define(_SCHEMA)
        library.impl(_NAME, _run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"accel::{_NAME}", _fake, lib=library)
        _libraries.append(library)
