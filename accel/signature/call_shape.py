"""Calls that are made like one that was described before (`tree_spec`): recognised without describing them anew."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import tree_spec
from .tree_spec import Spec

_EMPTY = ("dict",)


class CallShape:
    """How one call was made of tensors, to be compared with later ones.

    args, kwargs: of the call. spec, tensors: what `tree_spec.flatten` said of them, given `replace`, which must tell by
        its keys, and by what is None among its values, whether it leaves a dict as it is. No tensor is kept, but for
        the empty ones that stand for whole numbers.
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
        self._sizes = [(at, tensors[at]) for at in tree_spec.sizes_in(spec)]
        places = _places((*args, *kwargs.values()), spec) if replace is None or replace(kwargs) is kwargs else None
        self._is_flat = places is not None
        if places is not None:
            of_tensors, fixed, self._replaced = places
            self._tensors_of, self._fixed_of = _getter(of_tensors), _getter([at for at, _ in fixed])
            self._fixed = tuple(value for _, value in fixed)

    def tensors(self, args: tuple, kwargs: dict[str, Any]) -> Sequence[torch.Tensor] | None:
        """The tensors among the call's arguments; None where it is made in another way.

        What stands where a tensor stood may be anything, or come twice: that is for `tensor_check` to tell.
        Raises what `replace` and `flatten` do.
        """
        if not self._is_flat:
            return self._by_describing(args, kwargs)
        if len(args) != self._count or tuple(kwargs) != self._names:
            return None
        values = (*args, *kwargs.values())
        if self._fixed:
            for now, known in zip(self._fixed_of(values), self._fixed, strict=True):
                # Other constants that are equal may differ: True and 1, 0.0 and -0.0.
                if now is not known and (type(now) is not int or type(known) is not int or now != known):
                    return None
        for at, known in self._replaced:
            now = values[at]
            if type(now) is not dict:
                return None
            if self._replace is not None:
                now = self._replace(now)
            if (now or known != _EMPTY) and tree_spec.flatten(now, []) != known:
                return None
        return self._tensors_of(values)

    def with_sizes(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """These tensors of a call, and those that stand for its whole numbers, as `flatten` has them."""
        if not self._sizes:
            return tensors
        tensors = list(tensors)
        for at, tensor in self._sizes:
            tensors.insert(at, tensor)
        return tensors

    def _by_describing(self, args: tuple, kwargs: dict[str, Any]) -> Sequence[torch.Tensor] | None:
        tensors: list[torch.Tensor] = []
        if tree_spec.flatten((args, kwargs), tensors, self._replace) != self.spec:
            return None
        for at, known in reversed(self._sizes):
            if tensors.pop(at) is not known:
                return None
        return tensors


def _places(values: tuple, spec: Spec) -> tuple[list[int], list[tuple[int, Any]], list[tuple[int, Spec]]] | None:
    """Where tensors, constants and replaced dicts are among the values; None for a call with anything else."""
    of_tensors, fixed, replaced = [], [], []
    _, of_args, of_kwargs = spec
    for at, (value, part) in enumerate(zip(values, [*of_args[1:], *(item for _, item in of_kwargs[1:])], strict=True)):
        if part == ("tensor",):
            of_tensors.append(at)
        elif part[0] in ("size", "constant", "value"):
            fixed.append((at, value))
        elif part[0] == "dict" and not tree_spec.has_tensors(part):
            replaced.append((at, part))
        else:
            return None
    return of_tensors, fixed, replaced


def _getter(places: list[int]) -> Callable[[tuple], tuple]:
    """Of a tuple the items at these places, as a tuple."""
    if not places:
        return lambda values: ()
    if len(places) == 1:
        only = places[0]
        return lambda values: (values[only],)
    return operator.itemgetter(*places)
