"""Attention that no compiler can look into: a graph calls whatever function is there, by an operator of ours.

Core calls attention by a global of the model's module (`optimized_attention`), which is the function that a flag of the
command line asks for, and lets a per-call option take its place (`optimized_attention_override`). Where it is another
than torch's own attention, a graph has an operator (`host_calls`) that looks the global up in each call, and calls it
with the options of that call as core would. So a graph does not depend on which function it is.

Nodes such as IP-Adapter put a function of theirs in the place of a UNet block's attention (`patches_replace`). It takes
queries, keys and values, and gives what attention would; so graphs call it in the same way.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...core import torch_internals
from ...core.reasons import Reason, RunEagerly
from ...modules.code_owner import home_of, package_of
from ...modules.host_calls import FINDERS, OPTIONS, Callee, Options, call_host, define_operator
from ...signature.tree_spec import STAND_INS, RunsOthersCode

OVERRIDE = "optimized_attention_override"  # the per-call option
_CORE = "comfy.ldm.modules.attention"  # the module that core's own attention functions are in
_NAMES = ("optimized_attention", "optimized_attention_masked")
_TRACED = ("attention_pytorch", "attention_basic")  # Core's functions that are traced as they are
_CAPTURED = (*_TRACED, "attention_split", "attention_sub_quad")
"""Those that CUDA graphs may have in them. The latter two ask how much memory is free, which cannot be traced."""

REPLACED = ("attn1", "attn2")  # where the per-call option `patches_replace` has functions in the place of attention
_PREFERRED = "function"
"""What a checkpoint asks of a layer: an attribute of the module that its block gives as `preferred_attention`."""

_call = threading.local()  # options: the per-call dict of the block that this thread calls
_odd: weakref.WeakSet[Any] = weakref.WeakSet()  # overrides that give something else than attention does
overrides: set[str] = set()  # the names of those that blocks were called with


class Override(RunsOthersCode, enum.Enum):
    """What a block gets in place of an override: a constant, whichever that is."""

    OF_THE_CALL = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the override of this thread's call, where a block runs uncompiled with simplified options."""
        options: Any = get_call_options()
        return options[OVERRIDE](*args, **{**kwargs, "transformer_options": options})


def begin(options: dict[str, Any] | None) -> None:
    """Note the options that a block is called with in this thread."""
    _call.options = options


def get_call_options() -> dict[str, Any] | None:
    """The options that this thread's last block was called with."""
    return getattr(_call, "options", None)


class _Named:
    """Base of what a block gets in place of a function, by whose name it is known. No enum: torch calls none."""

    is_constant_argument = True

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.name}"


class Passed(_Named):
    """In place of a function of core's that a block is given to call, as text encoders' attention is."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _call_operator(f"{_CORE}:{self.name}", q, k, v, args, kwargs)


_passed = functools.lru_cache(Passed)  # one for each name: they are compared by identity


def _find_passed_function(function: types.FunctionType) -> Passed | None:
    """For a function that core's module has under its name; None for another."""
    if vars(sys.modules[_CORE]).get(function.__name__) is not function:
        return None
    define_operator()
    return _passed(function.__name__)


STAND_INS[_CORE] = _find_passed_function


def is_opaque(module: str | None, name: str) -> bool:
    """Whether the module has an attention function under the name that is not traced."""
    if name not in _NAMES:
        return False
    function = getattr(sys.modules.get(module or ""), name, None)
    return callable(function) and not _is_traced(function)


class Replacement(_Named, RunsOthersCode):
    """In place of a function, of a name in `REPLACED`, that another node has put in that of a block's attention."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        own = {name: item for name, item in options.items() if name not in _OF_BLOCK}
        return call_host("replaced attention", self.name, (q, k, v, own), {}, [q])[0]


BLOCK = (0, 0)  # every block's name in simplified options
_SIMPLIFIED = ("block", "block_index", "patches_replace")
_OF_BLOCK = ("block", "block_index", OVERRIDE)
_REPLACEMENTS = {name: {BLOCK: Replacement(name)} for name in REPLACED}


def require_known(function: Any) -> None:
    """Raise RunEagerly for a function that is known to give something else than attention does."""
    if getattr(function, "__func__", function) in _odd:
        raise RunEagerly(Reason("attention_replaced", patch=OVERRIDE))


def replacement(name: str, options: dict[str, Any]) -> dict[tuple, Replacement]:
    """The stand-ins that a block called with these options gets for `name` in `patches_replace`. Raises RunEagerly."""
    require_known(_find_replacement(name, options))
    return _REPLACEMENTS[name]


def _find_replacement(name: str, options: dict[str, Any]) -> Callable:
    """The function for the block, as core finds it."""
    functions, block = options["patches_replace"][name], options["block"]
    of_part = (block[0], block[1], options.get("block_index", 0))
    return functions[of_part if of_part in functions else block]


class Ignored(frozenset):
    """(module, global) pairs, and those of functions that graphs look up. reads: what their stand-ins read."""

    reads = frozenset({_PREFERRED, "peek", "take"})

    def __contains__(self, pair: Any) -> bool:
        return super().__contains__(pair) or is_opaque(*pair)


class Asked(Ignored):
    """`Ignored` for one reading of code. opaque: (module, name) of an uncapturable function that it calls."""

    opaque: tuple[str, str] | None = None

    def __contains__(self, pair: Any) -> bool:
        if is_opaque(*pair) and not _is_traced(getattr(sys.modules[pair[0]], pair[1]), _CAPTURED):
            self.opaque = pair
        return super().__contains__(pair)


def stand_ins() -> Iterator[tuple[Any, str, Callable]]:
    """(module, name, function) of attention that this thread's call must not trace: an operator where it is traced or
    called without values, what was there elsewhere."""
    define_operator()
    is_overridden = (get_call_options() or {}).get(OVERRIDE) is not None
    for module, name, function in _places():
        is_traced = _is_traced(function)
        if is_overridden or not is_traced:
            yield module, name, _make_stand_in(f"{module.__name__}:{name}", function, not is_traced)


def _places() -> Iterator[tuple[Any, str, Callable]]:
    for module in list(sys.modules.values()):
        for name in _NAMES:
            function = getattr(module, "__dict__", {}).get(name)
            if callable(function):
                yield module, name, function


def _is_traced(function: Callable, among: Sequence[str] = _TRACED) -> bool:
    core = vars(sys.modules[_CORE])
    function = getattr(function, "stands_for", function)  # another thread may be tracing
    return any(function is core.get(name) for name in among)


def _make_stand_in(place: str, function: Callable, is_opaque: bool) -> Callable:
    def attention(q, k, v, *args, **kwargs):
        options = kwargs.get("transformer_options")
        is_overridden = options is not None and options.get(OVERRIDE) is not None
        if not is_overridden and not is_opaque:
            return function(q, k, v, *args, **kwargs)
        if not torch.compiler.is_dynamo_compiling() and not _has_no_values(q):
            return function(q, k, v, *args, **kwargs)
        preferred = getattr(kwargs.get("preferred_attention"), _PREFERRED, None)
        if not is_overridden and preferred is not None:  # as core calls it, past a function that is not traced
            given = {name: item for name, item in kwargs.items() if name != "preferred_attention"}
            return preferred(q, k, v, *args, _inside_attn_wrapper=True, **given)
        if hasattr(q, "peek"):  # core's containers of tensors that may be freed early
            q, k, v = q.take(), k.take(), v.take()
        return _call_operator(place, q, k, v, args, kwargs)

    attention.stands_for = function  # type: ignore[attr-defined]  # of functions of core alone
    return attention


def _call_operator(place: str, q: Any, k: Any, v: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Call the function at the place by the operator, in code that is traced. args: those after the tensors."""
    named = {name: item for name, item in kwargs.items() if name != "preferred_attention"}
    if named.get("transformer_options", named) is None:
        del named["transformer_options"]
    return call_host("attention", place, (q, k, v, *args), named, [q], _compute_size(q, *args, **named))[0]


def _compute_size(
    q: torch.Tensor, heads: int, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **_: Any
) -> tuple[int, ...]:
    """The size of the result, as core's functions have it."""
    if skip_reshape:
        batch, _, rows, width = q.shape
    else:
        batch, rows, width = q.shape[0], q.shape[1], q.shape[2] // heads
    return (batch, heads, rows, width) if skip_output_reshape else (batch, rows, heads * width)


def _has_no_values(tensor: Any) -> bool:
    tensor = tensor.peek() if hasattr(tensor, "peek") else tensor
    return tensor.is_meta or type(tensor) is torch_internals.FAKE_TENSOR.get(None)


def _find_attention(place: str) -> Callee:
    """The function at a place, MODULE:NAME, which calls the override of this thread's call itself."""
    module, _, name = place.partition(":")
    function, override = getattr(sys.modules[module], name), (get_call_options() or {}).get(OVERRIDE)
    return Callee(function, not _is_cores(override or function), functools.partial(_note_odd_result, override))


def _find_replaced_attention(name: str) -> Callee:
    """The function that is in the place of the attention of this thread's block."""
    options: Any = get_call_options()
    function = _find_replacement(name, options)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: dict[str, Any]) -> Any:
        given = {key: item for key, item in options.items() if key not in ("patches", "patches_replace")}
        return function(q, k, v, given | own)

    return Callee(call, not _is_cores(function), functools.partial(_note_odd_result, function))


FINDERS.update({"attention": _find_attention, "replaced attention": _find_replaced_attention})


def _options_of_call(of_block: dict[str, Any]) -> dict[str, Any]:
    """The options of this thread's call, as a block has them that was given these."""
    options, own = get_call_options() or {}, dict(of_block)
    if not own.pop(OVERRIDE, False) and options.get(OVERRIDE) is not None:  # the block was given no options
        options = {name: item for name, item in options.items() if name != OVERRIDE}
    is_unchanged = all(name in options and options[name] == item for name, item in own.items())
    return options if is_unchanged else {**options, **own}


OPTIONS["transformer_options"] = Options(_SIMPLIFIED, _options_of_call)


def _is_cores(function: Any) -> bool:
    return type(function) is types.FunctionType and package_of(home_of(function)) in ("comfy", "comfy_extras")


def _note_odd_result(function: Any, _what: str) -> RunEagerly:
    """The exception for what the function gave; it is remembered. None for core's own place."""
    if function is not None:
        _odd.add(getattr(function, "__func__", function))
    return RunEagerly(Reason("attention_replaced", patch=OVERRIDE))
