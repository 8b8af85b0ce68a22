"""Attention that no compiler can look into: a graph calls whatever function is there, by an operator of ours.

Core calls attention by a global of the model's module (`optimized_attention`), which is the function that a flag of the
command line asks for, and lets a per-call option take its place (`optimized_attention_override`). Where it is another
than torch's own attention, a graph has an operator that looks the global up in each call, and calls it with the options
of that call as core would. So a graph does not depend on which function it is.

Nodes such as IP-Adapter put a function of theirs in the place of a UNet block's attention (`patches_replace`). It takes
queries, keys and values, and gives what attention would; so graphs call it in the same way.
"""

from __future__ import annotations

import ast
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
from ...kernels.operators import define
from ...modules.code_owner import home_of, package_of
from ...modules.opaque_layers import OPTIONS, Options, others_code
from ...signature.tree_spec import STAND_INS, RunsOthersCode

OVERRIDE = "optimized_attention_override"
"""The per-call option."""

_CORE = "comfy.ldm.modules.attention"
"""The module that core's own attention functions are in."""

_NAMES = ("optimized_attention", "optimized_attention_masked")
_TRACED = ("attention_pytorch", "attention_basic")
"""Core's functions that are traced as they are."""

_CAPTURED = (*_TRACED, "attention_split", "attention_sub_quad")
"""Those that CUDA graphs may have in them. The latter two ask how much memory is free, which cannot be traced."""

REPLACED = ("attn1", "attn2")
"""Where the per-call option `patches_replace` has functions in the place of attention."""

_SIGNATURE = "(Tensor q, Tensor k, Tensor v, Tensor? mask, str place, str how) -> Tensor"
_SIGNATURE_OF_REPLACED = "(Tensor q, Tensor k, Tensor v, str name, str how) -> Tensor"
_MASK = "its mask"

_PREFERRED = "function"
"""What a checkpoint asks of a layer: an attribute of the module that its block gives as `preferred_attention`."""

_NOT_WRITTEN = ("transformer_options", "preferred_attention")
"""Arguments that the operator does not get: the options are those of each call, and no function is preferred."""

_call = threading.local()
"""options: the per-call dict of the block that this thread calls."""


_odd: weakref.WeakSet[Any] = weakref.WeakSet()
"""Overrides that give something else than attention does."""


class Override(RunsOthersCode, enum.Enum):
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


class Passed:
    """What a block gets in place of a function of core's that it is given to call, as text encoders' attention is.

    name: of the function. Plain, as `Replacement`.
    """

    is_constant_argument = True

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _by_operator(f"{_CORE}:{self.name}", q, k, v, args, kwargs)


_passed = functools.lru_cache(Passed)
"""One for each name: they are compared by identity."""


def _named(function: types.FunctionType) -> Passed | None:
    """For a function that core's module has under its name; None for another."""
    if vars(sys.modules[_CORE]).get(function.__name__) is not function:
        return None
    _define()
    return _passed(function.__name__)


STAND_INS[_CORE] = _named


def is_opaque(module: str | None, name: str) -> bool:
    """Whether the module has an attention function under the name that is not traced."""
    if name not in _NAMES:
        return False
    function = getattr(sys.modules.get(module or ""), name, None)
    return callable(function) and not _is_traced(function)


class Replacement(RunsOthersCode):
    """What a block gets in the place of a function that another node has put in that of its attention.

    name: of `REPLACED`. Plain, since torch's compiler calls no enum.
    """

    is_constant_argument = True

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"replaced {self.name}"

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        own = {name: item for name, item in options.items() if name not in _OF_BLOCK}
        return torch.ops.accel.replaced_attention(q, k, v, self.name, _written([], {}, own))


BLOCK = (0, 0)
"""Every block's name in simplified options."""

_SIMPLIFIED = ("block", "block_index", "patches_replace")
_OF_BLOCK = ("block", "block_index", OVERRIDE)
_REPLACEMENTS = {name: {BLOCK: Replacement(name)} for name in REPLACED}


def require_known(function: Any) -> None:
    """Raise RunEagerly for a function that is known to give something else than attention does."""
    if getattr(function, "__func__", function) in _odd:
        raise RunEagerly(Reason("attention_override"))


def replacement(name: str, options: dict[str, Any]) -> dict[tuple, Replacement]:
    """What a block that is called with these options gets for the functions under the name in `patches_replace`.

    Raises RunEagerly, as `require_known`.
    """
    require_known(_replacing(name, options))
    return _REPLACEMENTS[name]


def _replacing(name: str, options: dict[str, Any]) -> Callable:
    """The function for the block, as core finds it."""
    functions, block = options["patches_replace"][name], options["block"]
    of_part = (block[0], block[1], options.get("block_index", 0))
    return functions[of_part if of_part in functions else block]


class Ignored(frozenset):
    """(module, global) pairs, and those of functions that graphs look up in each call.

    reads: what stand-ins for such functions read of their arguments.
    """

    reads = frozenset({_PREFERRED, "peek", "take"})

    def __contains__(self, pair: object) -> bool:
        return super().__contains__(pair) or is_opaque(*pair)


class Asked(Ignored):
    """The same, for one reading of code. opaque: the module and name of such a function that this code calls."""

    opaque: object = None

    def __contains__(self, pair: object) -> bool:
        if is_opaque(*pair) and not _is_traced(getattr(sys.modules[pair[0]], pair[1]), _CAPTURED):
            self.opaque = pair
        return super().__contains__(pair)


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


def _is_traced(function: Callable, among: Sequence[str] = _TRACED) -> bool:
    core = vars(sys.modules[_CORE])
    function = getattr(function, "stands_for", function)  # another thread may be tracing
    return any(function is core.get(name) for name in among)


def _stand_in(place: str, function: Callable, is_opaque: bool) -> Callable:
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
        return _by_operator(place, q, k, v, args, kwargs)

    attention.stands_for = function
    return attention


def _by_operator(place: str, q: Any, k: Any, v: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Call the function at the place by the operator, in code that is traced. args: those after the tensors."""
    given, named = list(args), {name: item for name, item in kwargs.items() if name not in _NOT_WRITTEN}
    options = kwargs.get("transformer_options")
    mask = given[1] if len(given) > 1 else named.get("mask")
    if mask is not None:
        if len(given) > 1:
            given[1] = _MASK
        else:
            named["mask"] = _MASK
    if options is not None:  # of the call are others than those that stand for them here
        options = {name: item for name, item in options.items() if name not in _SIMPLIFIED}
    return torch.ops.accel.attention_of_the_host(q, k, v, mask, place, _written(given, named, options))


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
    if isinstance(value, Override):
        return True
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
    override = None
    if of_block is not None:
        kwargs["transformer_options"] = _of_call(of_block)
        override = kwargs["transformer_options"].get(OVERRIDE)
    module, _, name = place.partition(":")
    function = getattr(sys.modules[module], name)
    call = functools.partial(function, *_kept_apart(override or function, q, k, v), *args, **kwargs)
    return _checked(call(), q, _size_of(q, how), override, override or function, (q, k, v, mask))


def _of_call(of_block: dict[str, Any]) -> dict[str, Any]:
    """The options of this thread's call, as a block has them that was given these."""
    options, own = begun() or {}, dict(of_block)
    if not own.pop(OVERRIDE, False) and options.get(OVERRIDE) is not None:  # the block was given no options
        options = {name: item for name, item in options.items() if name != OVERRIDE}
    is_unchanged = all(name in options and options[name] == item for name, item in own.items())
    return options if is_unchanged else {**options, **own}


OPTIONS["transformer_options"] = Options(_SIMPLIFIED, _as_text, lambda text: _of_call(_value(text)))


def _run_replaced(q, k, v, name, how):
    options, own = begun(), _read(how)[2]
    function = _replacing(name, options)
    given = {key: item for key, item in options.items() if key not in ("patches", "patches_replace")} | own
    out = function(*_kept_apart(function, q, k, v), given)
    return _checked(out, q, q.shape, function, function, (q, k, v))


def _is_cores(function: Any) -> bool:
    return type(function) is types.FunctionType and package_of(home_of(function)) in ("comfy", "comfy_extras")


def _kept_apart(function: Any, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Copies for a function of another program: it may keep what it is given, and a graph uses that memory again."""
    return tensors if _is_cores(function) else [tensor.clone() for tensor in tensors]


def _checked(
    out: Any, q: torch.Tensor, size: Sequence[int], replaces: Any, function: Any, given: tuple
) -> torch.Tensor:
    """The result as graphs expect it, which may write to it.

    replaces: what is remembered where it is something else; None for core's own place. function: gave it, and may keep
        it where it is another program's.
    """
    if type(out) is not torch.Tensor or out.shape != size or out.dtype != q.dtype:
        if replaces is not None:
            _odd.add(getattr(replaces, "__func__", replaces))
        raise RunEagerly(Reason("attention_override"))
    storages = {tensor.untyped_storage().data_ptr() for tensor in given if tensor is not None}
    if not _is_cores(function) or out.untyped_storage().data_ptr() in storages:
        return out.clone(memory_format=torch.contiguous_format)
    return out.contiguous()


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
    """Register the operators."""
    define("attention_of_the_host", _SIGNATURE, others_code(_run), _fake)
    define("replaced_attention", _SIGNATURE_OF_REPLACED, others_code(_run_replaced), lambda q, *_: q.new_empty(q.shape))
