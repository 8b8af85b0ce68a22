"""Sizes as numbers of 32 bits in generated GPU kernels, where guards prove that these are enough.

Inductor passes every size that a kernel computes with as 64 bits, since a product of two might not fit 32. Then each
division of an index by a size is one of 64 bits, in software: most of the kernel's instructions.
"""

from __future__ import annotations

import ast
import importlib
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core import torch_internals

_PREFIX = "ks"
"""Inductor's names for sizes begin so."""


@contextmanager
def narrow_sizes() -> Iterator[None]:
    """While it lasts, inductor's kernels take sizes of 32 bits where their indices are of 32 bits.

    Inductor itself guards that all indices of such a kernel fit, and each size is guarded here. Products of sizes in an
    address may overflow on the way: sums and products are right modulo 2**32, and the address fits. A kernel that does
    anything else with a product (divides by it, compares it) keeps sizes of 64 bits. Where this torch lacks what that
    takes, nothing changes.
    """
    if torch_internals.lacking(torch_internals.NARROW_SIZES) is not None:
        yield
        return
    name = torch_internals.KERNEL_SIGNATURE
    module, original = importlib.import_module(name.module), name.get()

    def narrowed(signature: Sequence[Any], *args: Any, **kwargs: Any) -> dict[str, str]:
        types = original(signature, *args, **kwargs)
        return _narrowed(types, signature) if kwargs.get("size_dtype") == "tl.int32" else types

    setattr(module, name.name, narrowed)
    try:
        yield
    finally:
        setattr(module, name.name, original)


def _narrowed(types: dict[str, str], signature: Sequence[Any]) -> dict[str, str]:
    """The types of a kernel's arguments, with 32 bits for the sizes that fit; called while its code is finished."""
    compiling, size_argument = torch_internals.COMPILING.get(), torch_internals.SIZE_ARGUMENT.get()
    sizes = {
        argument.name: argument.expr
        for argument in signature
        if isinstance(argument, size_argument) and types.get(argument.name) == "i64"
    }
    if (
        not sizes
        or not all(name.startswith(_PREFIX) for name in sizes)
        or multiplies_sizes(compiling.kernel.body.getvalue())
    ):
        return types
    if not all(map(torch_internals.FITS_32_BITS.get(), sizes.values())):
        return types
    for expression in sizes.values():
        compiling.graph.sizevars.check_leq(expression, 2**31 - 1)
    return {name: "i32" if name in sizes else of for name, of in types.items()}


def multiplies_sizes(body: str) -> bool:
    """Whether a kernel's code multiplies a size elsewhere than in an address, where a product that overflows does harm.

    body: statements in Triton's language, of which sizes are the names that begin with "ks".
    """
    return _multiplies(ast.parse(textwrap.dedent(body)), in_address=False)


def _multiplies(node: ast.AST, in_address: bool) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="load" | "store"), args=[address, *rest], keywords=keywords):
            return _multiplies(address, True) or any(_multiplies(part, False) for part in (*rest, *keywords))
        case ast.BinOp(op=ast.Mult() | ast.Pow()) if not in_address and _has_size(node):
            return True
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
            return _multiplies(node.left, in_address) or _multiplies(node.right, in_address)
        case _:
            return any(_multiplies(part, False) for part in ast.iter_child_nodes(node))


def _has_size(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id.startswith(_PREFIX) for part in ast.walk(node))
