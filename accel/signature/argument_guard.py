"""Is this call like an earlier one? Recognises one that `tree_spec` has described, without describing it again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import torch_internals
from . import tree_spec
from .tree_spec import Spec

_MOST_SIGNATURES = 8
"""Ways in which something is called, whatever the sizes; the latest are kept."""

Known = dict[tuple, Any]

Match = tuple[Any, Any, Sequence[torch.Tensor]]
"""What is known of a call, the guard that recognised it, and its tensors, as `flatten` orders them."""


class CallSignatures:
    """The ways in which something was called, and what is known of such calls: is this one like an earlier one?

    replace: as for `tree_spec.flatten`. It must decide by a dict's keys, and by which of its values are None, whether
        it returns the dict unchanged.
    """

    def __init__(self, replace: Callable[[dict], Any] | None = None):
        self._replace = replace
        self._signatures: tuple[CallSignature, ...] = ()

    def match(self, args: tuple, kwargs: dict[str, Any], captured: bool = False) -> Match | None:
        """What is known of such a call; None for one like no other. captured: as for `CallSignature.add`. Raises what
        `replace` and `flatten` do."""
        for signature in self._signatures:
            found = signature.match(args, kwargs, captured)
            if found is not None:
                return found
        return None

    def signature_of(
        self, args: tuple, kwargs: dict[str, Any], spec: Spec, tensors: Sequence[torch.Tensor], known: Known
    ) -> CallSignature:
        """The way in which this call is made; the arguments are as for `CallSignature`."""
        for signature in self._signatures:
            if signature.spec == spec:
                return signature
        signature = CallSignature(args, kwargs, spec, tensors, self._replace, known)
        self._signatures = (signature, *self._signatures[: _MOST_SIGNATURES - 1])
        return signature


class CallSignature:
    """One way of making a call: how it is made of tensors, and its constants. Keeps no tensor alive.

    args, kwargs: of a call. spec, tensors: the result of `tree_spec.flatten` with `replace`.
    known: what is known of calls that are made so, by `layouts_of` their tensors.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        spec: Spec,
        tensors: Sequence[torch.Tensor],
        replace: Callable[[dict], Any] | None,
        known: Known,
    ):
        self.spec, self._known = spec, known
        self._latest: dict[bool, tuple[Any, InputGuard]] = {}
        self._replace = replace
        self._count, self._names = len(args), tuple(kwargs)
        self._numbers = tree_spec.number_indices(spec)
        places = _places((*args, *kwargs.values()), spec) if replace is None or replace(kwargs) is kwargs else None
        self._is_flat = places is not None
        if places is not None:
            tensors_at, self._sizes, self._fixed, self._replaced = places
            self._get_tensors = items_at(tensors_at)

    def match(self, args: tuple, kwargs: dict[str, Any], captured: bool) -> Match | None:
        """As `CallSignatures.match`, of calls that are made so."""
        arguments = self._flatten(args, kwargs)
        if arguments is None:
            return None
        tensors, numbers = arguments
        all_tensors = tensors
        if numbers:
            all_tensors = list(tensors)
            for at, size in zip(self._numbers, numbers, strict=True):
                all_tensors.insert(at, tree_spec.size_tensor(size))
        latest = self._latest.get(captured)
        if latest is None or not latest[1].check(tensors, numbers):
            try:
                known = self._known.get((layouts_of(all_tensors), captured))
                guard = None if known is None else known.guards.get(_traits_of(all_tensors))
            except AttributeError:  # something else in a tensor's place
                return None
            if guard is None or not guard.check(tensors, numbers):
                return None
            latest = self._latest[captured] = known, guard
        return *latest, all_tensors

    def add(self, known: Any, guard: InputGuard, tensors: Sequence[torch.Tensor], captured: bool = False) -> None:
        """Match calls with such tensors with what is known from now on, by the guard, which goes to its `guards`.
        captured: the call is one of those that will be captured; others may be known otherwise."""
        known.guards[_traits_of(tensors)] = guard
        self._known[layouts_of(tensors), captured] = known
        self._latest[captured] = known, guard

    def _flatten(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Sequence[torch.Tensor], tuple[int, ...]] | None:
        """The tensors among the call's arguments and the sizes of those that stand for whole numbers, or None if it
        differs in structure or constants.

        Where the first call had a tensor there may be anything, or the same tensor twice: ask an `InputGuard`.
        """
        if not self._is_flat:
            tensors: list[torch.Tensor] = []
            if tree_spec.flatten((args, kwargs), tensors, self._replace, functions=True) != self.spec:
                return None
            return _split_numbers(tensors, self._numbers)
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


class InputGuard:
    """Recognises tensors and whole numbers like those of one call, whose `spec` and tensors these are."""

    def __init__(self, spec: Spec, tensors: Sequence[torch.Tensor]):
        plain, self._sizes = _split_numbers(tensors, tree_spec.number_indices(spec))
        self._check = tensor_guard(plain)

    def check(self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> bool:
        return sizes == self._sizes and self._check(*tensors)


def layouts_of(tensors: Sequence[torch.Tensor]) -> tuple:
    return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def _traits_of(tensors: Sequence[torch.Tensor]) -> tuple:
    """What else a guard asks of each tensor; what mode torch is in does not change from call to call."""
    return tuple([(type(t), t.is_inference(), t.requires_grad) for t in tensors])


def _split_numbers(
    tensors: Sequence[torch.Tensor], numbers: Sequence[int]
) -> tuple[list[torch.Tensor], tuple[int, ...]]:
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
        elif part[0] == "dict" and not any(tree_spec.tensor_tags(part)):
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
