"""Guards that recognise a call like one that was described before (`tree_spec`), without describing it again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import torch_internals
from . import tree_spec
from .tree_spec import Spec


class CallGuard:
    """Recognises later calls with the structure and constants of one call; `check` asks for tensors like those of it.

    args, kwargs: of the call.
    spec, tensors: the result of `tree_spec.flatten` with `replace`. `replace` must decide by a dict's keys, and by
        which of its values are None, whether it returns the dict unchanged.
    Keeps no tensor alive.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        spec: Spec,
        tensors: Sequence[torch.Tensor],
        replace: Callable[[dict], Any] | None = None,
    ):
        self.spec = spec
        self._replace = replace
        self._count, self._names = len(args), tuple(kwargs)
        self._numbers = tree_spec.number_indices(spec)
        places = _places((*args, *kwargs.values()), spec) if replace is None or replace(kwargs) is kwargs else None
        self._is_flat = places is not None
        if places is not None:
            tensors_at, self._sizes, self._fixed, self._replaced = places
            self._get_tensors = items_at(tensors_at)
        self._given = SizeGuard(tensors, self._numbers)

    def match(self, args: tuple, kwargs: dict[str, Any]) -> Sequence[torch.Tensor] | None:
        """The tensors of a call, as `flatten` orders them; None for a call that is not like the first.

        Raises what `replace` and `flatten` do.
        """
        given = self.arguments(args, kwargs)
        return None if given is None or not self._given.check(*given) else self.with_numbers(*given)

    def arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Sequence[torch.Tensor], tuple[int, ...]] | None:
        """The tensors among the call's arguments and the sizes of those that stand for whole numbers, or None if it
        differs in structure or constants.

        Where the first call had a tensor there may be anything, or the same tensor twice: ask a `SizeGuard`.
        Raises what `replace` and `flatten` do.
        """
        if not self._is_flat:
            return self._match_described(args, kwargs)
        if len(args) != self._count or tuple(kwargs) != self._names:
            return None
        values = args + tuple(kwargs.values())
        for at, known in self._fixed:
            now = values[at]
            # Other constants that are equal may differ: True and 1, 0.0 and -0.0.
            if now is not known and not (type(now) is type(known) is int and now == known):
                return None
        for at, known in self._replaced:
            now = values[at]
            if type(now) is not dict:
                return None
            if self._replace is not None:
                now = self._replace(now)
            if (now or known) and tree_spec.flatten(now, [])[1:] != known:
                return None
        numbers = tuple([values[at] for at in self._sizes]) if self._sizes else ()
        return (self._get_tensors(values), numbers) if all(map(tree_spec.is_size, numbers)) else None

    def with_numbers(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Sequence[torch.Tensor]:
        """What `arguments` gives in one, as `flatten` orders them."""
        if not numbers:
            return tensors
        tensors = list(tensors)
        for at, size in zip(self._numbers, numbers, strict=True):
            tensors.insert(at, tree_spec.size_tensor(size))
        return tensors

    def _match_described(self, args: tuple, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], tuple] | None:
        tensors: list[torch.Tensor] = []
        if tree_spec.flatten((args, kwargs), tensors, self._replace, functions=True) != self.spec:
            return None
        return _apart(tensors, self._numbers)


class SizeGuard:
    """Recognises tensors and whole numbers like those of one call, as `CallGuard.arguments` gives them.

    tensors: of the call, with those for numbers; numbers: where these are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]):
        plain, self._sizes = _apart(tensors, numbers)
        self._check = tensor_guard(plain)

    def check(self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> bool:
        return sizes == self._sizes and self._check(*tensors)


def _apart(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """The tensors without those that stand for numbers, and the sizes of these."""
    return [t for at, t in enumerate(tensors) if at not in numbers], tuple(tensors[at].shape[0] for at in numbers)


def _places(values: tuple, spec: Spec) -> tuple[list, list, list[tuple[int, Any]], list[tuple[int, tuple]]] | None:
    """The places of tensors, sizes, constants and replaced dicts (with their specs' items) among the values; None if
    there is anything else."""
    tensors, sizes, fixed, replaced = [], [], [], []
    _, of_args, of_kwargs = spec
    for at, (value, part) in enumerate(zip(values, [*of_args[1:], *(item for _, item in of_kwargs[1:])], strict=True)):
        if part == ("tensor",):
            tensors.append(at)
        elif part == ("size",):
            sizes.append(at)
        elif part[0] in ("constant", "value"):
            fixed.append((at, value))
        elif part[0] == "dict" and not tree_spec.has_tensors(part):
            replaced.append((at, part[1:]))
        else:
            return None
    return tensors, sizes, fixed, replaced


def items_at(places: list[int]) -> Callable[[tuple], tuple]:
    """A function that returns the items of a tuple at these places, always as a tuple."""
    if not places:
        return lambda values: ()
    if len(places) == 1:
        only = places[0]
        return lambda values: (values[only],)
    return operator.itemgetter(*places)


TensorGuard = Callable[..., bool]
"""Takes as many tensors as there were examples. True if each has the class, sizes, strides, dtype and device of its
example, none comes twice, and torch is in the same mode as then: autocast, inference mode, dispatch modes.
It does not check `torch.is_grad_enabled`. It is False for anything else in place of a tensor, and always if the
examples cannot be described, or this version of torch does not have what is asked."""


def tensor_guard(examples: Sequence[torch.Tensor]) -> TensorGuard:
    """A guard for tensors like these: the one with which dynamo guards compiled code; it keeps none of them alive."""
    if has_native_guard():
        try:
            return _guard(examples)
        except Exception:  # a layout without strides, say
            pass
    return lambda *tensors: False


def _guard(examples: Sequence[torch.Tensor]) -> TensorGuard:
    guards = torch_internals.TENSOR_GUARDS.get()
    return guards(*examples, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


@functools.cache
def has_native_guard() -> bool:
    """Whether torch's guard, which is private, notices all that it must notice here."""
    plain, other = torch.empty(2, 3), torch.empty(2, 3)
    unlike = (
        torch.empty(2, 3, dtype=torch.float16),
        torch.empty(2, 3, device="meta"),
        torch.empty(3, 2),
        torch.empty(3, 2).t(),
        torch.nn.Parameter(other, requires_grad=False),
        torch.empty(2, 3, requires_grad=True),
        None,
    )
    try:
        check = _guard((plain, other))
        if not check(other, plain) or check(plain, plain) or any(check(plain, odd) for odd in unlike):
            return False
        with torch.autocast("cpu", torch.bfloat16):
            if check(plain, other):
                return False
        with torch.inference_mode(not torch.is_inference_mode_enabled()):
            return not check(plain, other)
    except Exception:
        return False
