"""Sizes as numbers of 32 bits in generated GPU kernels, where guards prove that these are enough, and quick divisions.

Inductor passes every size that a kernel computes with as 64 bits, since a product of two might not fit 32. Then each
division of an index by a size is one of 64 bits, in software: most of the kernel's instructions. One of 32 bits takes
some twenty; by a number that the host computed from the size, three.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ..core import torch_internals

_PREFIX = "ks"
"""Inductor's names for sizes begin so."""

_INDEX = re.compile(r"[xyzr]\d*_?\d*|[xyzr]\d*_?index")
"""Inductor's names for indices, which count from 0."""

DIVIDED = """
@triton.jit
def {name}(index, step: tl.constexpr, inverse):
    # index // (step * size). inverse: 2**62 / size, rounded up, which adds less than index / 2**62 to the quotient:
    # less than what that lacks to the next whole number, as index and size are below 2**31.
    index = (index // step).to(tl.uint32).to(tl.uint64)
    low, high = (inverse & 0xFFFFFFFF).to(tl.uint64), (inverse >> 32).to(tl.uint64)
    return (index * high + (index * low >> 32) >> 30).to(tl.int32)
"""
"""Triton source for the code of a kernel."""


@contextmanager
def narrow_sizes() -> Iterator[None]:
    """A context in which inductor's kernels take sizes of 32 bits where their indices are of 32 bits.

    Inductor itself guards that all indices of such a kernel fit, and each size is guarded here. Products of sizes in an
    address may overflow on the way: sums and products are right modulo 2**32, and the address fits. A kernel that does
    anything else with a product (divides by it, compares it) keeps sizes of 64 bits. Where this torch lacks what that
    takes, nothing changes.
    """
    if torch_internals.find_missing(torch_internals.NARROW_SIZES) is not None:
        yield
        return
    kernel = torch_internals.TRITON_KERNEL.get()
    finish = kernel.codegen_kernel

    def finish_narrowed(self: Any, name: str | None = None) -> str:
        narrow, original = _narrow(self), torch_internals.KERNEL_SIGNATURE.get()

        def narrow_types(*args: Any, **kwargs: Any) -> dict[str, str]:
            types = original(*args, **kwargs)
            return {name: "i32" if name in narrow and of == "i64" else of for name, of in types.items()}

        with torch_internals.KERNEL_SIGNATURE.replace(narrow_types):
            return finish(self, name)

    with patch.object(kernel, "codegen_kernel", finish_narrowed):
        yield


def _narrow(kernel: Any) -> frozenset[str]:
    """The arguments of 32 bits of a kernel that is about to be finished; its divisions by these become products."""
    if kernel.index_dtype != "tl.int32" or getattr(kernel, "prologue", None):
        return frozenset()
    kernel.codegen_body()  # into one place, and nothing is left for when the kernel is finished
    sizes = {name: size for size, name in kernel.args.sizevars.items() if name.startswith(_PREFIX)}
    body = kernel.body.getvalue()
    if not sizes or multiplies_sizes(body):
        return frozenset()
    known = torch_internals.COMPILING.get().graph.sizevars
    sizes = {name: known.inv_precomputed_replacements.get(size, size) for name, size in sizes.items()}
    if not all(map(torch_internals.FITS_32_BITS.get(), sizes.values())):
        return frozenset()
    for size in sizes.values():
        known.check_leq(size, 2**31 - 1)
    divisions = _Divisions(kernel, known, sizes)
    tree = divisions.visit(ast.parse(body))
    if divisions.divides:
        kernel.body.clear()
        kernel.body.splice(ast.unparse(tree))
    return frozenset(sizes)


class _Divisions(ast.NodeTransformer):
    """Replaces divisions of an index by a size. A constant factor of the size is divided by as before: from that the
    compiler learns which neighbours share the quotient, and so reads 128 bits at a time."""

    def __init__(self, kernel: Any, known: Any, sizes: Mapping[str, Any]) -> None:
        self.kernel, self.known, self.sizes, self.divides = kernel, known, sizes, False

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        is_index = _is_index(node.left) and not isinstance(node.left, ast.Constant)  # Triton would refuse the kernel
        self.generic_visit(node)
        match node:
            case ast.BinOp(index, ast.FloorDiv() | ast.Mod(), ast.Name(size)) if is_index and size in self.sizes:
                self.divides = True
                code = quotient = self._quotient(index, size)
                if isinstance(node.op, ast.Mod):
                    code = f"({ast.unparse(index)}) - {quotient} * {size}"
                return ast.parse(code, mode="eval").body
        return node

    def _quotient(self, index: ast.AST, size: str) -> str:
        from sympy import Max

        step, rest = self.sizes[size].as_content_primitive()
        # A call without elements launches nothing, but its sizes are computed. Sympy takes none of them for 0.
        floor_division, hidden = torch_internals.FLOOR_DIVISION.get(), torch_internals.HIDDEN.get()
        inverse = self.known.lookup_precomputed_size(1 + floor_division(2**62 - 1, Max(1, hidden(rest))))
        divided = self.kernel.helper_functions.add(DIVIDED, base_name="divided")
        return f"{divided}({ast.unparse(index)}, {step}, {self.kernel.args.size(inverse)})"


def _is_index(node: ast.AST) -> bool:
    """Whether it is computed from indices and constants, all at least 0, or what a size leaves of such an index."""
    match node:
        case ast.BinOp(left, ast.FloorDiv() | ast.Mod(), ast.Name(name)) if name.startswith(_PREFIX):
            return _is_index(left)
        case ast.BinOp(left, ast.Add() | ast.Mult() | ast.FloorDiv() | ast.Mod(), right):
            return _is_index(left) and _is_index(right)
        case ast.Constant(value):
            return isinstance(value, int) and value >= 0
        case ast.Name(name):
            return _INDEX.fullmatch(name) is not None
        case _:
            return False


def fix_sizes(shape_env: Any, sizes: Iterable[Any]) -> None:
    """Fix those of a trace's sizes that its guards equate with a number, or have divide one, as heads divide channels:
    images come in any size, so these are the model's. Torch fixes few of them, and kernels divide by the others."""
    modulo, division = torch_internals.MODULO.get(()), torch_internals.FLOOR_DIVISION.get(())
    open_ones = {size.node.expr: size for size in sizes if not isinstance(size, int)}
    for guard in list(shape_env.guards):
        equation = shape_env.replace(guard.expr)
        if not equation.is_Equality:
            continue
        one, other = equation.args
        if isinstance(one, modulo) and other == 0:
            ratios: tuple[Any, ...] = (one.args[1] / one.args[0],)  # of what divides to what it divides, not turned
        elif isinstance(one, division) and other.is_number and one.args[1].is_number and one.args[1] < other:
            ratios = (one.args[0],)  # but for the few sizes above it that torch would take too
        else:
            ratios = (one / other, other / one)
        for ratio in ratios:
            int(open_ones.get(ratio.as_coeff_Mul()[1], 0))  # torch fixes a size that is asked for its number


def multiplies_sizes(body: str) -> bool:
    """Whether a kernel's code (`body`, in Triton's language) multiplies a size, whose name begins with "ks", elsewhere
    than in an address, where a product that overflows does harm."""
    return _multiplies(ast.parse(textwrap.dedent(body)), in_address=False)


def _multiplies(node: ast.AST, in_address: bool) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="load" | "store"), args=[address, *rest], keywords=keywords):
            return _multiplies(address, True) or any(_multiplies(part, False) for part in (*rest, *keywords))
        case ast.BinOp(op=ast.Mult() | ast.Pow()) if not in_address and any(
            isinstance(part, ast.Name) and part.id.startswith(_PREFIX) for part in ast.walk(node)
        ):
            return True
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
            return _multiplies(node.left, in_address) or _multiplies(node.right, in_address)
        case _:
            return any(_multiplies(part, False) for part in ast.iter_child_nodes(node))
