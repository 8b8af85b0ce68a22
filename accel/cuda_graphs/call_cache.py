"""The key of a model call, found at once where a call like it has come before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from ..signature.argument_guard import ArgumentGuard, tensor_guard
from ..signature.tree_spec import Spec
from .capture_key import CaptureKey, buffer_specs

_MAX_KNOWN = 8
"""Calls that are recognised, the latest first; others are described anew."""

_MAX_KEYS = 64
"""Keys of one of them: they differ in what a call under DeepCache exchanges."""

Replace = Callable[[dict], Any]


class CallSort:
    """Calls that are made like one call, on plain tensors like its own.

    inputs: these, as `tree_spec.flatten` gave them. Neither the call's tensors nor the model are kept.
    device: of the first of the tensors that has elements; None where none has.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        spec: Spec,
        inputs: Sequence[torch.Tensor],
        replace: Replace,
    ):
        self._guard = ArgumentGuard(args, kwargs, spec, inputs, replace)
        given = self._guard.match(args, kwargs)
        self._check = None if given is None else tensor_guard(given)
        self._specs = buffer_specs(inputs)
        self.device = next((tensor.device for tensor in inputs if tensor.numel()), None)
        self._keys: dict[Hashable, CaptureKey] = {}

    def inputs(self, args: tuple, kwargs: dict[str, Any]) -> Sequence[torch.Tensor] | None:
        """The call's tensors; None where it is of another sort.

        Raises what `replace` and `tree_spec.flatten` do.
        """
        given = self._guard.match(args, kwargs)
        if given is None or self._check is None or not self._check(*given):
            return None
        return self._guard.with_numbers(given)

    def key(
        self,
        model: weakref.ref[torch.nn.Module],
        features: Mapping[Hashable, torch.Tensor],
        phase: Hashable,
        facts: Hashable,
    ) -> CaptureKey:
        """The key of one of them. model, facts: always the same ones."""
        exchanged = phase, buffer_specs(features.values()) if features else ()
        key = self._keys.get(exchanged)
        if key is None:
            if len(self._keys) >= _MAX_KEYS:
                self._keys.clear()
            key = CaptureKey(model, self._guard.spec, (*self._specs, *exchanged[1]), phase, facts)
            self._keys[exchanged] = key
        return key


class CallSorts:
    """The sorts of calls that came last."""

    def __init__(self, replace: Replace | None):
        self._replace = replace
        self._known: tuple[CallSort, ...] = ()

    def forget(self) -> None:
        """All that was found right."""
        self._known = ()

    def recognise(self, args: tuple, kwargs: dict[str, Any]) -> tuple[CallSort, Sequence[torch.Tensor]] | None:
        """The sort of a call, with its tensors; None where none like it came before.

        Raises what `replace` and `tree_spec.flatten` do.
        """
        for known in self._known:
            inputs = known.inputs(args, kwargs)
            if inputs is not None:
                return known, inputs
        return None

    def keep(self, args: tuple, kwargs: dict[str, Any], spec: Spec, inputs: Sequence[torch.Tensor]) -> CallSort:
        """The sort of a call that was described (`tree_spec.flatten`) and found right; it is recognised from now on."""
        sort = CallSort(args, kwargs, spec, inputs, self._replace)
        self._known = (sort, *self._known[: _MAX_KNOWN - 1])
        return sort
