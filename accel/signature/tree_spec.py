"""The structure of a call without its tensors: its constants, and the places of the tensors.

Whole numbers from 2 on (frames, text tokens, the height of a window) change between images as tensor sizes do, so each
is passed as the size of an empty tensor; in an object (LTX 2's time steps) 1 is, too. 0, 1 and negative numbers are
flags, empty counts and dimensions: constants. Larger numbers than any size, other numbers and strings are values, each
with its own graph: the cache key is the spec without them (`remove_values`). A function is its code and what it closes
over, since a model may make one for each block and call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .tensors import PLAIN_TENSORS

Spec = tuple
"""A nested, hashable tuple; the first item of each node is its tag."""

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)

_VALUES = (float, str, torch.Size)

STAND_INS: dict[str, Callable[[types.FunctionType], Any]] = {}
"""By module, gives the constant that a graph takes in place of a function among the arguments, or None."""


class UnsupportedArgument(TypeError):
    """An argument that a graph over tensors cannot take."""


@dataclasses.dataclass(frozen=True)
class Function:
    """What functions of the same code in the same module have in common.

    home: the id of their globals. make: makes one from its defaults and the contents of its cells.
    """

    code: types.CodeType
    home: int
    make: Callable[..., types.FunctionType] = dataclasses.field(compare=False)

    @property
    def module(self) -> str | None:
        """The module's name."""
        return self.make.__globals__.get("__name__")

    def __repr__(self) -> str:
        return f"{self.module}.{self.code.co_name}"

    def __reduce__(self) -> tuple:
        """By name alone, for saved graphs, which do not use it."""
        return str, (repr(self),)


@functools.lru_cache(maxsize=4096)
def size_tensor(size: int) -> torch.Tensor:
    """An empty tensor of this size, passed for a whole number."""
    with torch.inference_mode(False):
        return torch.empty(size, 0)


def flatten(
    value: Any, tensors: list[torch.Tensor], replace: Callable[[dict], Any] | None = None, functions: bool = False
) -> Spec:
    """The spec of `value`; its tensors are appended to `tensors`, each once and in order.

    replace: may return something simpler in place of a dict (a host's per-call options, say).
    functions: describe functions too, but for their code (`functions_in`), if they have only defaults and cells.
    Raises UnsupportedArgument: for anything but tensors, constants, and tuples, lists, dicts, dataclasses and objects
    with slots of these.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in PLAIN_TENSORS:  # a subclass decides what operators do
            raise UnsupportedArgument(f"a tensor of type {type(value).__module__}.{type(value).__qualname__}")
        for index, known in enumerate(tensors):
            if known is value:
                return ("same", index)
        tensors.append(value)
        return ("tensor",)
    cls: type = type(value)
    if cls is int and value > _LARGEST:
        return ("value", value, repr(value))
    if is_size(value):
        tensors.append(size_tensor(value))
        return ("size",)
    if cls in CONSTANTS or isinstance(value, enum.Enum) or getattr(cls, "is_constant_argument", False):
        # With the type, since True, 1 and 1.0 are equal; and -0.0 equals 0.0.
        return ("value", value, repr(value)) if cls in _VALUES else ("constant", value, cls)
    if cls is tuple or cls is list:
        return (cls.__name__, *[flatten(item, tensors, replace, functions) for item in value])
    if cls is dict:
        if replace is not None:
            value = replace(value)
        return ("dict", *[(key, flatten(item, tensors, replace, functions)) for key, item in value.items()])
    fields = _fields(cls)
    has_all = all(hasattr(value, name) for name in fields or ())
    if fields is not None and has_all and getattr(value, "__dict__", {}).keys() <= set(fields):
        return ("object", cls, *[(name, _flatten_field(getattr(value, name), tensors, replace)) for name in fields])
    if isinstance(value, types.FunctionType):
        stand_in = STAND_INS.get(value.__module__, lambda function: None)(value)
        if stand_in is not None:
            return flatten(stand_in, tensors)
        parts = _parts_of(value) if functions else None
        make = None if parts is None else _factory(value.__code__, len(value.__defaults__ or ()))
        if make is None:
            raise UnsupportedArgument("a function")
        function = Function(value.__code__, id(value.__globals__), types.FunctionType(make, value.__globals__))
        return ("function", function, *[_flatten_part(part, tensors, replace) for part in parts])
    raise UnsupportedArgument(f"an argument of type {cls.__module__}.{cls.__qualname__}")


def is_size(value: Any) -> bool:
    """Whether it is a whole number that is passed as a size."""
    return type(value) is int and 1 < value <= _LARGEST


class RunsOthersCode:
    """Base of constants that stand for another program's function, which may count its calls: never run it twice."""


def runs_others_code(spec: Spec) -> bool:
    """Whether there is a `RunsOthersCode` among the arguments."""
    if spec[:1] == ("constant",):
        return issubclass(spec[2], RunsOthersCode)
    return any(isinstance(part, tuple) and runs_others_code(part) for part in spec)


def _flatten_field(value: Any, tensors: list[torch.Tensor], replace: Callable[[dict], Any] | None) -> Spec:
    if type(value) is int and value == 1:
        tensors.append(size_tensor(1))
        return ("size",)
    return flatten(value, tensors, replace)


def _parts_of(function: types.FunctionType) -> list[Any] | None:
    """The function's defaults and what its cells hold; None if there is more to it."""
    if vars(function) or function.__kwdefaults__:
        return None
    try:
        return [*(function.__defaults__ or ()), *(cell.cell_contents for cell in function.__closure__ or ())]
    except ValueError:  # one that is not filled yet
        return None


@functools.lru_cache(maxsize=1024)
def _factory(code: types.CodeType, defaults: int) -> types.CodeType | None:
    """The code of a function that makes one of this code, from its defaults and the contents of its cells; compilers
    trace it, but not `types.FunctionType`. None if these names cannot be written."""
    default_names = [f"_default_{at}" for at in range(defaults)]
    parameters = ", ".join(f"{name}={name}" for name in default_names)
    inside = f"lambda {parameters}: ({', '.join((*code.co_freevars, ''))[:-1]})"
    try:
        module = compile(f"lambda {', '.join((*default_names, *code.co_freevars))}: {inside}", __file__, "eval")
    except SyntaxError:
        return None
    outer = next(item for item in module.co_consts if isinstance(item, types.CodeType))
    inner = next(item for item in outer.co_consts if isinstance(item, types.CodeType))
    if inner.co_freevars != code.co_freevars:
        return None
    return outer.replace(co_consts=tuple(code if item is inner else item for item in outer.co_consts))


def _flatten_part(value: Any, tensors: list[torch.Tensor], replace: Callable[[dict], Any] | None) -> Spec:
    """As `flatten`, with whole numbers from 0 on as sizes, since a block's index begins there."""
    if type(value) is int and 0 <= value <= _LARGEST:
        tensors.append(size_tensor(value + _ABOVE_ONE))
        return ("number",)
    return flatten(value, tensors, replace)


_ABOVE_ONE = 2
"""What is added to a number, since sizes of 0 and 1 are not like others to a compiler."""

_LARGEST = 2**31 - 1 - _ABOVE_ONE
"""A larger number, such as a seed, is no size."""


@functools.lru_cache(maxsize=1024)
def _fields(cls: type) -> tuple[str, ...] | None:
    """The fields that determine an instance, of a dataclass or a class with slots (LTX 2's CompressedTimestep); None
    where they do not."""
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        # An `__init__` that is written by hand may do more than set the fields.
        is_generated = getattr(getattr(cls.__init__, "__code__", None), "co_filename", None) == "<string>"
        if hasattr(cls, "__post_init__") or not all(field.init for field in fields) or not is_generated:
            return None
        return tuple(field.name for field in fields)
    slots = vars(cls).get("__slots__")
    if type(slots) is not tuple or cls.__mro__ != (cls, object) or not _CUSTOM.isdisjoint(vars(cls)):
        return None
    return slots


_CUSTOM = {"__new__", "__setattr__", "__getattribute__", "__getattr__", "__del__", "__dict__"}
"""What makes an object more than its slots."""


def _make_instance(cls: type, fields: dict[str, Any]) -> Any:
    """An instance with these fields. For a class with slots, `__init__`, which takes others, is not called."""
    if dataclasses.is_dataclass(cls):
        return cls(**fields)
    instance = object.__new__(cls)
    for name, value in fields.items():
        setattr(instance, name, value)
    return instance


def makers(spec: Spec) -> frozenset[types.CodeType]:
    """The code of dataclasses that `rebuild` runs, which is not the block's."""
    codes: frozenset[Any] = frozenset()
    if spec[:1] == ("object",) and dataclasses.is_dataclass(spec[1]):
        codes = frozenset([getattr(spec[1].__init__, "__code__", None)])  # type: ignore[misc]  # of its very class
    return codes.union(*(makers(part) for part in spec if isinstance(part, tuple)))


def rebuild(spec: Spec, tensors: Sequence[torch.Tensor], closed_over: list[Any] | None = None) -> Any:
    """The value that `flatten` described; simple enough for a compiler to trace. closed_over: filled for `is_unchanged`
    with what functions in it close over."""
    value, used = _rebuild(spec, tensors, 0, closed_over)
    assert used == len(tensors)
    return value


def _rebuild(
    spec: Spec, tensors: Sequence[torch.Tensor], at: int, closed_over: list[Any] | None = None
) -> tuple[Any, int]:
    tag = spec[0]
    if tag == "tensor":
        return tensors[at], at + 1
    if tag == "same":
        return tensors[spec[1]], at
    if tag == "size":
        return tensors[at].shape[0], at + 1
    if tag == "number":
        return tensors[at].shape[0] - _ABOVE_ONE, at + 1
    if tag == "constant" or tag == "value":
        return spec[1], at
    if tag == "dict" or tag == "object":
        mapping = {}
        for key, item in spec[1:] if tag == "dict" else spec[2:]:
            mapping[key], at = _rebuild(item, tensors, at, closed_over)
        return (mapping if tag == "dict" else _make_instance(spec[1], mapping)), at
    items, first = [], at
    for item in spec[2:] if tag == "function" else spec[1:]:
        value, at = _rebuild(item, tensors, at, closed_over)
        items.append(value)
    if tag == "function":
        if closed_over is not None:
            closed_over.append((("list", *spec[2:]), items, first))
        return spec[1].make(*items), at
    return (tuple(items) if tag == "tuple" else items), at


def remove_values(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """The spec with the types of its values alone, and the values as strings, in order."""
    values: list[str] = []
    return _remove_values(spec, values), tuple(values)


def _remove_values(spec: Spec, values: list[str]) -> Spec:
    tag = spec[0]
    if tag == "value":
        values.append(spec[2])
        return ("value", type(spec[1]))
    if tag == "tuple" or tag == "list":
        return (tag, *[_remove_values(item, values) for item in spec[1:]])
    if tag == "function":
        return (*spec[:2], *[_remove_values(item, values) for item in spec[2:]])
    if tag == "dict" or tag == "object":
        first = 1 if tag == "dict" else 2
        return (*spec[:first], *[(key, _remove_values(item, values)) for key, item in spec[first:]])
    return spec


def number_indices(spec: Spec) -> list[int]:
    """The indices of the tensors that stand for whole numbers."""
    return [at for at, tag in enumerate(tensor_tags(spec)) if tag != "tensor"]


def tensors_by_argument(spec: Spec) -> list[range]:
    """For each argument of a call, given the spec of (args, kwargs), the indices of its tensors."""
    _, of_args, of_kwargs = spec
    parts = (*of_args[1:], *(item for _, item in of_kwargs[1:]))
    ends = list(itertools.accumulate((len(list(tensor_tags(part))) for part in parts), initial=0))
    return list(map(range, ends, ends[1:]))


def tensor_tags(spec: Spec) -> Iterator[str]:
    """The tag of each of its tensors, and of each whole number that is passed as one."""
    tag = spec[0]
    if tag == "tensor" or tag == "size" or tag == "number":
        yield tag
    elif tag == "tuple" or tag == "list" or tag == "function":
        for item in spec[2 if tag == "function" else 1 :]:
            yield from tensor_tags(item)
    elif tag == "dict" or tag == "object":
        for _, item in spec[1 if tag == "dict" else 2 :]:
            yield from tensor_tags(item)


def is_unchanged(spec: Spec, value: Any, tensors: Sequence[torch.Tensor], closed_over: Sequence[Any] = ()) -> bool:
    """Whether a value that `rebuild` made still has the same tensors and constants; simple enough to trace."""
    for parts, items, at in ((spec, value, 0), *closed_over):
        if _end_of(parts, items, tensors, at) is None:
            return False
    return True


def _end_of(spec: Spec, value: Any, tensors: Sequence[torch.Tensor], at: int) -> int | None:
    """Where the tensors of an unchanged value end; None for one that was changed."""
    tag = spec[0]
    if tag in ("list", "tuple", "dict"):
        if type(value).__name__ != tag or len(value) != len(spec) - 1:
            return None
        if tag == "dict":
            if list(value) != [key for key, _ in spec[1:]]:
                return None
            items = [(item, value[key]) for key, item in spec[1:]]
        else:
            items = list(zip(spec[1:], value))  # noqa: B905 which a compiler traces
    elif tag == "object":
        items = [(item, getattr(value, name, None)) for name, item in spec[2:]]
    else:
        expected, after = _rebuild(spec, tensors, at)
        is_same = value is expected if tag in ("tensor", "same") else tag == "function" or value == expected
        is_same = is_same or (tag == "value" and value != value and expected != expected)
        return after if is_same and type(value) is type(expected) else None
    end: int | None = at
    for item, inner in items:
        if end is None:
            return None
        end = _end_of(item, inner, tensors, end)
    return end


def functions_in(spec: Spec) -> tuple[Function, ...]:
    """The functions in the spec, which does not describe their code."""
    outermost = spec[1:2] if spec[:1] == ("function",) else ()
    return outermost + tuple(inner for part in spec if isinstance(part, tuple) for inner in functions_in(part))
