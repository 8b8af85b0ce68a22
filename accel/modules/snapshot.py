"""Snapshots of modules, which tell at every call whether a model has changed since."""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, cycle, repeat
from typing import Any

import torch

from ..core.reasons import Reason, Refusal, RunEagerly
from ..signature.argument_guard import tensor_guard
from ..signature.tensors import PLAIN_TENSORS
from . import stored_form
from .substitution import foreign_forward

_SAMPLED = 47
"""Weights that `WeightSnapshot.seems_current` checks, spread over the model: enough to notice large parts that moved.
A prime, so that of equal blocks it does not check the same weight in each."""

_ABSENT = object()

_address = torch.Tensor.data_ptr
_dtype_and_shape = operator.attrgetter("dtype", "shape")
_NAMED = "_modules", "_parameters", "_buffers"


def are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same objects, in order."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def _plain(value: Any) -> Any:
    """The value, or the first plain tensor in a tensor subclass: torch moves no subclass that has weak references."""
    try:
        while hasattr(type(value), "__tensor_flatten__"):
            value = getattr(value, value.__tensor_flatten__()[0][0])
    except Exception:  # of another program's class, whose block is then left eager alone
        pass
    return value


class LayoutSnapshot:
    """The modules that a model is made of, and how the weights of its blocks are stored; neither values nor devices.

    blocks: each with the module that shows it with its weights in place: itself, or a copy (`streamed_weights.Plain`)
        made by what the host keeps on the block, which is compared by identity.
    eager: blocks whose weights may be stored in any way; their tensors are compared by identity.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        blocks: Sequence[tuple[torch.nn.Module, torch.nn.Module]],
        eager: Sequence[torch.nn.Module] = (),
    ):
        self._model = weakref.ref(model)  # which owns this snapshot, and would keep itself alive
        self._class = type(model)
        self.parts = [part for part in _changeable(model) if part is not model]
        self._states = [state for state in map(vars, self.parts) if all(name in state for name in _NAMED)]
        self._named = self._read_members()
        self._sizes = list(map(len, self._named))
        self._children = [named for named in self._named[:: len(_NAMED)] if named]
        self._blocks = [*(block for block, _ in blocks), *eager]
        inside = [part for block, _ in blocks for part in _changeable(block)]
        holders = [holder for part in inside for holder in (part._parameters, part._buffers)]
        self._holders = [holder for holder in holders for _ in holder]
        self._names = [name for holder in holders for name in holder]
        inside = [part for block in eager for part in _changeable(block)]
        holders = [holder for part in inside for holder in (part._parameters, part._buffers, part.__dict__)]
        places = [(holder, *item) for holder in holders for item in holder.items()]
        self._stored = [(*at, weakref.ref(_plain(value))) for *at, value in places if isinstance(value, torch.Tensor)]
        weights = self._read_weights()
        self._are_none = [weight is None for weight in weights]
        forms = [None if weight is None else stored_form.form_or_none(weight) for weight in weights]
        self._forms = [(at, form) for at, form in enumerate(forms) if form is not None]
        self._hosts = [
            (vars(part), [name for name in vars(as_shown) if name in vars(part) and name != "forward"])
            for block, shown in blocks
            if shown is not block
            for part, as_shown in zip(block.modules(), shown.modules(), strict=True)
        ]
        self._kept, self._state = self._read_objects(), self._describe_state()
        tensors = self._read_tensors(weights)
        self._described_as, self._guard = _describe_storage(weights, tensors), tensor_guard(tensors)

    def changed_part(self, model: torch.nn.Module) -> str | None:
        """The part of the model that has changed, for logs; None if none has. About 1 µs for each module."""
        if model is not self._model() or type(model) is not self._class:
            return "the model"
        try:
            if not are_same(self._read_members(), self._named) or list(map(len, self._named)) != self._sizes:
                return "which modules and weights it has"
            if not are_same(self._read_objects(), self._kept):
                return "a module or forward"
            if not all(stored() is _plain(holder[name]) is not None for holder, name, stored in self._stored):
                return "a weight of an uncompiled block"
            if self._describe_state() != self._state:
                return "training mode, or what the host keeps"
            return None if self._are_stored_as_before() else "how weights are stored"
        except (AttributeError, KeyError, RunEagerly):
            return "something that is gone, or stored in another form"

    def _read_weights(self) -> list[torch.Tensor | None]:
        return list(map(operator.getitem, self._holders, self._names))

    def _read_tensors(self, weights: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The weights, and the tensors in those of tensor subclasses."""
        inner = [stored_form.plain([weights[at]], [form], with_factors=False) for at, form in self._forms]
        return [weight for weight in (*weights, *chain.from_iterable(inner)) if weight is not None]

    def _are_stored_as_before(self) -> bool:
        weights = self._read_weights()
        if list(map(operator.is_, weights, repeat(None))) != self._are_none:
            return False
        tensors = self._read_tensors(weights)
        if not self._guard(*tensors):  # they may still be the same on another device
            if _describe_storage(weights, tensors) != self._described_as:
                return False
            if not any(self._described_as[-1]):  # a guard matches no tensor twice
                self._guard = tensor_guard(tensors)
        return True

    def _read_members(self) -> list[dict[str, Any]]:
        """The children, the parameters and the buffers of each module, by name; the model's own last."""
        model = self._model()
        named = map(operator.getitem, chain.from_iterable(map(repeat, self._states, repeat(3))), cycle(_NAMED))
        return [*named, *(getattr(model, name) for name in _NAMED)]

    def _read_objects(self) -> list[Any]:
        """What is compared by identity."""
        kept = [attributes[name] for attributes, names in self._hosts for name in names]
        inside = chain.from_iterable(value for value in kept if type(value) is list)
        children = chain.from_iterable(map(dict.values, self._children))
        return [*children, *map(type, self.parts), *map(foreign_forward, self._blocks), *kept, *inside]

    def _describe_state(self) -> tuple[list, list]:
        """What is compared by value."""
        hosts = [[name for name in attributes if name != "forward"] for attributes, _ in self._hosts]
        return list(map(dict.get, self._states, repeat("training"))), hosts  # type: ignore[arg-type]  # of objects


def _describe_storage(weights: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]) -> tuple[list, ...]:
    """How the weights, and the tensors in them, are stored."""
    ids, first = list(map(id, tensors)), {}
    return (
        list(map(type, weights)),
        list(map(_dtype_and_shape, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        # Which of them are one tensor
        [first.setdefault(one, at) for at, one in enumerate(ids)] if len(set(ids)) < len(ids) else [],
    )


def _changeable(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model's modules but for those compiled by TorchScript, which nobody changes."""
    return (part for part in model.modules() if isinstance(part._modules, dict))


class UnsupportedWeights(Refusal):
    """No snapshot can be taken of these weights."""


class WeightSnapshot:
    """The address of every weight, buffer and other tensor that the model's modules hold, and of the tensors in these.

    streamed: gives the names of a module's parameters that the host streams, to a fixed address that it keeps on the
        module. Its other parameters and buffers are new tensors at each load: their addresses are no part of the
        digest, and a captured call has copies of them (`replace_tensors`).
    unread: attributes that the model's code sets and never reads: left out, and restored after a captured call, whose
        memory others overwrite.
    digest: of the address, shape, strides and type of each, and of its `stored_form`. devices: one at most.
    Raises UnsupportedWeights: some have no plain address, or they are on several devices.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        streamed: Callable[[torch.nn.Module], Collection[str]] | None = None,
        unread: frozenset[str] = frozenset(),
    ):
        modules = list(model.modules())
        self._unread = unread
        places, contexts = [], []
        self._loaded: list[tuple[dict[str, Any], str]] = []
        for module in modules:
            elsewhere = () if streamed is None else streamed(module)
            for holder in (module._parameters, module._buffers, module.__dict__):
                is_loaded = streamed is not None and holder is not module.__dict__
                for name, value in list(holder.items()):  # copied: another thread may put a stand-in there
                    left_out = elsewhere if is_loaded else unread if holder is module.__dict__ else ()
                    if not isinstance(value, torch.Tensor) or name in left_out:
                        continue
                    form = stored_form.form_or_none(value)
                    # What is added to a weight is computed in each call, and has no address.
                    if not (type(value) in PLAIN_TENSORS if form is None else not form.factors):
                        raise UnsupportedWeights(Reason("weights_type", type=type(value).__name__))
                    if form is None:
                        places.append((holder, name))
                        if is_loaded:
                            self._loaded.append((holder, name))
                        continue
                    contexts.append(form.context)
                    parts = _Parts(holder, name)
                    places += [(parts, path) for path in form.names]
        self._holders, self._names = [holder for holder, _ in places], [name for _, name in places]
        # A forward or a hook that is put on a module changes the length of one of these dicts.
        self._attributes, self._classes = [m.__dict__ for m in modules], list(map(type, modules))
        self._children = [m._modules for m in modules if m._modules]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        tensors = self.tensors()
        self.devices = {tensor.device for tensor in tensors if tensor.numel()}
        if len(self.devices) > 1:
            devices = ", ".join(sorted(map(str, self.devices)))
            raise UnsupportedWeights(Reason("tensors_on_devices", devices=devices))
        self._addresses = list(map(_address, tensors))
        count = min(len(places), _SAMPLED)
        sampled = [index * len(places) // count for index in range(count)]
        columns = self._holders, self._names, self._addresses
        self._sample = tuple([column[index] for index in sampled] for column in columns)
        loaded = {(id(holder), name) for holder, name in self._loaded}
        layout = [
            (None if (id(holder), name) in loaded else t.data_ptr(), tuple(t.shape), t.stride(), str(t.dtype))
            for (holder, name), t in zip(places, tensors, strict=True)
        ]
        self.digest = hashlib.sha256(repr((layout, contexts)).encode()).hexdigest()

    def tensors(self) -> list[torch.Tensor]:
        """The weights, buffers and other tensors in these places now."""
        return list(map(operator.getitem, self._holders, self._names))

    def find_loaded_tensors(self) -> list[torch.Tensor]:
        """The tensors that each load replaces."""
        return [holder[name] for holder, name in self._loaded]

    @contextmanager
    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, these tensors replace those of the load; afterwards, unread attributes are restored as well."""
        saved = [(holder, name, holder[name]) for holder, name in self._loaded]
        unread = [(holder, name, holder.get(name, _ABSENT)) for holder in self._attributes for name in self._unread]
        try:
            for (holder, name, value), tensor in zip(saved, tensors, strict=True):
                is_parameter = isinstance(value, torch.nn.Parameter)
                holder[name] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            yield
        finally:
            for holder, name, value in (*saved, *unread):
                if value is _ABSENT:
                    holder.pop(name, None)
                else:
                    holder[name] = value

    def state(self) -> list[Any]:
        """What the modules and their classes hold and may read, to be compared with `are_same`; a few milliseconds."""
        classes = dict.fromkeys(cls for cls in self._classes if not cls.__module__.startswith("torch."))
        holders = (*self._attributes, *map(vars, classes))
        held = [value for holder in holders for name, value in list(holder.items()) if name not in self._unread]
        inside = (value.values() if type(value) is dict else value for value in held if type(value) in (dict, list))
        return [*held, *chain.from_iterable(inside)]

    def seems_current(self) -> bool:
        """Whether a sample of the weights is where it was; a few microseconds."""
        return _are_at(*self._sample)

    def is_current(self) -> bool:
        """Whether every weight is where it was; about 0.1 µs each."""
        return _are_at(self._holders, self._names, self._addresses)

    def outline(self) -> int:
        """A hash of how many attributes and hooks each module has now, and of which modules it is made."""
        hooks = map(len, self._hooks) if any(self._hooks) else ()
        children = map(id, chain.from_iterable(map(dict.values, self._children)))
        return hash((*map(len, self._attributes), *hooks, *children))


class _Parts:
    """The tensors in a weight of a tensor subclass, by their paths in it."""

    def __init__(self, holder: dict[str, Any], name: str):
        self._holder, self._name = holder, name

    def __getitem__(self, path: str) -> torch.Tensor:
        return operator.attrgetter(path)(self._holder[self._name])


def _are_at(holders: Sequence[dict[str, Any]], names: Sequence[str], addresses: list[int]) -> bool:
    try:
        return list(map(_address, map(operator.getitem, holders, names))) == addresses
    except (AttributeError, KeyError, TypeError):  # one was removed, or is no tensor any more
        return False
