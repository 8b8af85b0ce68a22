"""What one trace of a block tells: the sizes that it fixed, what it asked of the others, and what the block writes to.

A graph is meant to serve any size. Code that loops over the batch, or compares a size with a number, is traced for that
size, and torch leaves it to its guards on tensors, which a graph of ours has not: they ask for much that is in its key.
Tracing runs nothing of the block, so all that is asked of its code is asked there.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..core import torch_internals
from ..fingerprint.kept_state import KeepsState, name_of
from ..kernels.sizes import fix_sizes
from ..signature.tensors import storage_of, tensors_in

_PLAIN = (bool, float, str, type(None), torch.dtype)
_TENSOR = re.compile(r"L\['tensors'\]\[(\d+)\]")
_NUMBER = re.compile(_TENSOR.pattern + r"\.(size|stride)\(\)\[(\d+)\]")
_LONGEST = 1 << 12  # characters in what is asked, of which 653 were seen: of 30000, Python's parser may crash

_DOES: dict[Any, Callable[..., Any]] = {
    **{getattr(ast, name): getattr(operator, name.lower()) for name in ("Add", "Sub", "FloorDiv", "Mod")},
    **{ast.Mult: operator.mul, ast.Div: operator.truediv, ast.USub: operator.neg, ast.Not: operator.not_},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt},
    **{ast.GtE: operator.ge, ast.And: lambda *values: all(values), ast.Or: lambda *values: any(values)},
    **{"max": max, "min": min, "abs": abs, "torch.sym_float": float, "math.sqrt": math.sqrt},
    **{"math.floor": math.floor, "math.ceil": math.ceil, "math.trunc": math.trunc},
}
"""What torch asks in. Not powers, which may be huge: it writes products."""


class Trace:
    """What torch knows of one function over `tensors` while it traces it; filled by `begin` and `end`.

    codes: all code that it traced; empty where this torch does not say. changed: indices of the tensors that the
    function writes to. calls: every function of torch that it calls for tensors, with its plain arguments except whole
    numbers, which may be sizes. asked: what is asked of the sizes, a Python expression of `L["tensors"]`. is_whole: the
    trace came to the end of the function.
    """

    def __init__(self) -> None:
        self._shape_env: Any = None
        self._shapes: list[Sequence[Any]] = []
        self._symbols: dict[Any, tuple[int, int]] = {}
        self.codes: Sequence[types.CodeType] = ()
        self.changed: tuple[int, ...] = ()
        self.calls: list[tuple] = []
        self.asked = ""
        self.is_whole = False

    def begin(self) -> None:
        """Take note of what torch traces; called first within the trace. A second trace replaces the first."""
        Trace.__init__(self)
        context = torch_internals.TRACING_CONTEXT.get().try_get()
        self._shape_env = None if context is None else context.fake_mode.shape_env
        self.codes = getattr(context, "traced_code", ())  # a list that torch goes on filling

    def end(self, asks: bool) -> None:
        """Fill the fields; called last within the trace. asks: fill `asked` too, which takes a while."""
        self.is_whole = True
        current = torch_internals.CURRENT_TRACE.get()()
        if current is None:
            return
        graph = current.output.graph
        tensor_nodes = {}
        for node in graph.find_nodes(op="placeholder"):
            found = _TENSOR.fullmatch(name_of(getattr(node.meta.get("grapharg"), "source", None)))
            if found is not None:
                tensor_nodes[int(found[1])] = node
        values = [node.meta["example_value"] for node in tensor_nodes.values()]
        nodes = list(itertools.chain.from_iterable(map(_find_written_tensors, graph.nodes)))
        storages = {storage_of(node.meta["example_value"]) for node in nodes if _is_tensor(node)}
        changed = {
            node
            for node in filter(_is_tensor, graph.find_nodes(op="placeholder"))
            if (value := node.meta["example_value"])._version or node in nodes or storage_of(value) in storages
        }
        self.changed = tuple(at for at, node in tensor_nodes.items() if node in changed)
        for node in changed.difference(tensor_nodes.values()):
            raise KeepsState(str(node))
        for node in graph.nodes:
            if node.op.startswith("call_"):
                name = getattr(node.target, "__name__", str(node.target))
                self._note(name, node.args, node.kwargs, node.meta.get("example_value"))
        self._shapes = [tuple(map(_expression, shape)) for shape in self._shapes]  # a size keeps all of its trace
        for at, value in zip(tensor_nodes, values, strict=True):
            self._symbols |= {_expression(size): (at, d) for d, size in enumerate(value.shape) if type(size) is not int}
        if self._shape_env is None:
            return
        if not asks:
            fix_sizes(self._shape_env, [size for value in values for size in value.shape])
        else:
            sources = [node.meta["grapharg"].source for node in tensor_nodes.values()]
            self.asked = " and ".join(self._shape_env.produce_guards(values, sources, ignore_static=True))

    def recorder(self) -> TorchFunctionMode:
        """A mode that notes calls while it lasts, for code that torch runs while it traces."""
        return _Recorder(self._note)

    def _note(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        shapes = [tensor.shape for tensor in tensors_in(out)]
        if shapes:
            plain = (repr(item) for item in (*args, *sorted(kwargs.items(), key=str)) if type(item) in _PLAIN)
            self.calls.append((name, len(shapes), *plain))
            self._shapes.extend(shapes)

    def does_as(self, other: Trace, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the function makes the same calls as in another trace of it, and gets tensors of the same shapes from
        them where its own have these sizes."""
        if self.calls != other.calls:
            return False
        for one, two in zip(self._shapes_at(tensors), other._shapes_at(tensors), strict=True):
            if len(one) != len(two) or any(a != b and None not in (a, b) for a, b in zip(one, two, strict=True)):
                return False
        return True

    def _shapes_at(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[int | None]]:
        """The shapes of what the calls return; None for a size that code has as it runs, whatever it is."""
        sizes = {symbol: tensors[at].shape[dimension] for symbol, (at, dimension) in self._symbols.items()}
        for shape in self._shapes:
            found = (size if isinstance(size, int) else size.subs(sizes) for size in shape)
            yield [int(size) if isinstance(size, int) or size.is_number else None for size in found]

    def find_fixed_sizes(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
        """(tensor, dimension, size) of the sizes that torch fixed, given the function's examples. To be asked once."""
        shape_env, self._shape_env = self._shape_env, None  # it is large
        if shape_env is None:
            return ()
        return tuple(
            (index, dimension, size)
            for index, tensor in enumerate(tensors)
            for dimension, size in enumerate(tensor.shape)
            if (symbol := shape_env.source_to_var.get(f"L['tensors'][{index}].size()[{dimension}]")) is not None
            and shape_env.replace(symbol).is_number
        )


def holds(asked: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the sizes of these tensors are as `Trace.asked` says; not for a stranger's text, as a store may have."""
    try:
        text = _NUMBER.sub(lambda found: str(getattr(tensors[int(found[1])], found[2])()[int(found[3])]), asked)
        return not text or len(text) <= _LONGEST and bool(_value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError):
        return False


def _value(node: ast.AST) -> Any:
    """What an expression of numbers gives; TypeError or KeyError for any other. No number is longer than its text."""
    if isinstance(node, ast.Constant):
        return node.value + 0  # type: ignore[operator]  # TypeError of what is no number
    if isinstance(node, ast.Call):
        return _DOES[ast.unparse(node.func)](*map(_value, (*node.args, *node.keywords)))
    values = [_value(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    if isinstance(node, ast.Compare):
        return all(_DOES[type(op)](*pair) for op, pair in zip(node.ops, itertools.pairwise(values), strict=True))
    return _DOES[type(getattr(node, "op", node))](*values)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _find_written_tensors(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The tensors that a call in a graph writes to without torch counting it there."""
    target, name = node.target, getattr(node.target, "__name__", str(node.target))
    if name == "_get_data_attr" and node.meta["example_value"]._version:  # `.data` counts its own changes
        yield node
    elif name == "set_" or name.startswith("_foreach_") and name.endswith("_"):  # `x.data = ...` is a `set_`
        yield from _nodes_in(node.args[:1])
    elif name == "batch_norm" and True in (*node.args, *node.kwargs.values()):  # training
        yield from _nodes_in((node.args[1:], node.kwargs))
    elif name.startswith("triton_kernel_wrapper"):
        yield from _nodes_in(node.kwargs)
    elif isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        is_one = isinstance(target, torch._ops.OpOverload)
        for overload in [target] if is_one else [getattr(target, each) for each in target.overloads()]:
            for at, argument in enumerate(overload._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    yield from _nodes_in(node.args[at : at + 1] or node.kwargs.get(argument.name))


def _nodes_in(value: Any) -> list[torch.fx.Node]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.fx.Node)]


def _expression(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


class _Recorder(TorchFunctionMode):
    def __init__(self, note: Callable[[str, Sequence[Any], dict[str, Any], Any], None]):
        super().__init__()
        self._note, self._inside = note, False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if self._inside:  # of what an operator calls, some depends on what torch has kept of earlier calls
            return function(*args, **(kwargs or {}))
        self._inside = True
        try:
            out = function(*args, **(kwargs or {}))
        finally:
            self._inside = False
        if isinstance(function, torch._ops.OpOverload):  # of what no mode sees, as to take a tensor for a subclass's
            return out
        self._note(getattr(function, "__name__", repr(function)), args, kwargs or {}, out)
        return out
