"""Which graph runs a call of one block, remembered from earlier calls like it.

Most calls in a run are like the one before. The latest few are matched by guards on the arguments, in microseconds:
how the call is made, what the host's options say, types, devices, sizes and strides of weights and inputs, the mode
torch is in, and whether a changed input shares its memory. Other calls are described first (`tree_spec`) and looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import getitem, is_
from typing import Any

import torch

from ..cache.entry import Lease
from ..cache.graph_cache import GraphCache
from ..core.reasons import Reason, RunEagerly
from ..fingerprint.block_call import Call
from ..fingerprint.kinds import WeightSlots
from ..fingerprint.survey import Region
from ..modules.streamed_weights import WeightSource
from ..signature.argument_guard import ArgumentGuard, tensor_guard
from ..signature.tensors import extent, is_dense, overlap, pairs
from ..signature.tree_spec import UnsupportedArgument
from .resolver import ResolvedGraph

_MAX_ENTRIES = 64
"""Call shapes; more than one model call ever has."""

_MAX_GUARDED = 4
"""Call shapes with guards; the latest are kept."""

_MISSING: Any = object()
_MAX_GUARDS_MADE = 8
"""Guards made for one call shape in a run: some never match, and some shapes take turns."""

_MOST_ASLEEP = 8
"""Guards kept from one run to the next."""


def _key(call: Call) -> tuple:
    """What decides which graph runs a described call."""
    dense = tuple(map(is_, call.inputs, call.given))
    return call.spec, _layouts(call.weights), _layouts(call.inputs), dense


def _serving(entries: dict[tuple, Any], key: tuple, captured: bool) -> Any:
    """What calls of a key run, `_MISSING` where that is not known: found by these, or by others that run the same."""
    other = entries.get((key, not captured))
    is_same = other is not None and other.serves(captured)
    return entries.get((key, captured), other if is_same else _MISSING)


def _verdict_key(call: Call) -> tuple:
    """What decides it before the weights are taken."""
    return call.spec, _layouts(call.given)


def _layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


class KnownCalls:
    """What runs have found of one block's calls, for its next runs: they are then guarded from the first one on.

    It lasts as long as the block's survey (`Region.known`), and is cleared when a graph leaves the cache: it keeps none
    alive. Guards ask for all else that may have changed; what a run is refused is asked anew in each.
    """

    def __init__(self, cache: GraphCache):
        self.entries: dict[tuple, ResolvedGraph] = {}
        self.guarded: tuple[GuardedCall, ...] = ()
        cache.keepers[self] = None

    @classmethod
    def of(cls, region: Region, cache: GraphCache, *how: Hashable) -> KnownCalls:
        """Those of a block in runs over this cache. how: what else the graphs that run its calls depend on."""
        found = region.known.get((cache, *how))
        return found or region.known.setdefault((cache, *how), cls(cache))

    def clear(self) -> None:
        self.entries.clear()
        self.guarded = ()


class InlineCache:
    """The graphs of one block by call in one run; None for a call that runs eagerly.

    cache: where the graphs are; this cache is void once a graph leaves it. weights: the block's.
    replace: as for `ArgumentGuard`. known: of earlier runs. lease: of this one.
    """

    def __init__(
        self,
        cache: GraphCache,
        weights: WeightSource,
        replace: Callable[[dict], Any] | None,
        known: KnownCalls,
        lease: Lease | None = None,
    ):
        self._cache = cache
        self._weights = weights
        self._replace = replace
        self._known, self._lease = known, lease
        self._entries: dict[tuple, ResolvedGraph | None] = {}
        self._verdicts: dict[tuple, Reason] = {}
        self._guarded: tuple[GuardedCall, ...] = ()
        self._guards_made: dict[ResolvedGraph, int] = {}
        self._generation = cache.generation

    def match(
        self, args: tuple, kwargs: dict[str, Any], captured: bool
    ) -> tuple[GuardedCall, Sequence[torch.Tensor]] | None:
        """The guarded call that this one is like, and what its graph takes now; None where there is none.

        captured: as in `find`.
        """
        return (
            None if self._generation != self._cache.generation else self._first(self._guarded, args, kwargs, captured)
        )

    def wake(
        self, args: tuple, kwargs: dict[str, Any], captured: bool
    ) -> tuple[GuardedCall, Sequence[torch.Tensor]] | None:
        """A call like this one that earlier runs have guarded, and what its graph takes now; None where there is none.

        From then on `match` finds it in this run too. captured: as in `find`.
        """
        if not self._known.guarded or self._generation != self._cache.generation:
            return None
        asleep = [call for call in self._known.guarded if call not in self._guarded]
        hit = self._first(asleep, args, kwargs, captured)
        if hit is None or not self._may_use(hit[0].resolved):
            return None
        self._guarded = (hit[0], *self._guarded[: _MAX_GUARDED - 1])
        return hit

    def _first(
        self, guarded: Sequence[GuardedCall], args: tuple, kwargs: dict[str, Any], captured: bool
    ) -> tuple[GuardedCall, Sequence[torch.Tensor]] | None:
        for call in guarded:
            if not call.resolved.serves(captured):
                continue
            try:
                tensors = call.match(args, kwargs, self._weights)
            except (RunEagerly, UnsupportedArgument):
                return None  # raised again when the call is described
            if tensors is not None:
                return call, tensors
        return None

    def _may_use(self, resolved: ResolvedGraph) -> bool:
        """Whether this run may use what another has found, and would find now; its entry is then leased."""
        entry, lease = resolved.entry, self._lease
        if not entry.has(resolved.graph):
            return False
        return (lease is not None and lease.has(entry)) or self._cache.get(entry.key, lease) is entry

    def verdict(self, call: Call, captured: bool) -> Reason | None:
        """Why calls like this one do without their graph, where that is known before the weights are taken.

        captured: as in `find`.
        """
        if not self._verdicts or self._generation != self._cache.generation:
            return None
        return self._verdicts.get((_verdict_key(call), captured))

    def find(self, call: Call, expires: bool, captured: bool = False) -> tuple[bool, ResolvedGraph | None]:
        """Whether something was added for calls like this one, and what; from then on guards match them.

        expires: after a graph has left the graph cache, nothing is found. captured: the call is one of those that will
            be captured, for which other times count.
        """
        if expires and self._generation != self._cache.generation:
            self._forget()
            self._generation = self._cache.generation
        key = _key(call)
        resolved = _serving(self._entries, key, captured)  # another thread may clear them meanwhile
        if resolved is _MISSING:
            resolved = _serving(self._known.entries, key, captured)
            if resolved is _MISSING or not self._may_use(resolved):
                return False, None
            self._entries[key, captured] = resolved
        if resolved is not None:
            if resolved.verdict is not None:
                self._verdicts[_verdict_key(call), captured] = resolved.verdict
            elif not resolved.is_compared and (made := self._guards_made.get(resolved, 0)) < _MAX_GUARDS_MADE:
                self._guards_made[resolved] = made + 1
                guarded = GuardedCall(call, self._weights, self._replace, resolved)
                self._guarded = (guarded, *self._guarded[: _MAX_GUARDED - 1])
                if self._generation == self._cache.generation:
                    self._known.guarded = (guarded, *self._known.guarded[: _MOST_ASLEEP - 1])
        return True, resolved

    def add(self, call: Call, resolved: ResolvedGraph | None, captured: bool = False) -> None:
        """Run calls like this one with the graph from now on; None runs them eagerly. captured: as in `find`."""
        if len(self._entries) >= _MAX_ENTRIES:
            self.clear()
        key = _key(call), captured
        self._entries[key] = resolved
        if resolved is not None:
            self._generation = self._cache.generation  # making room for it may have dropped others
            if len(self._known.entries) < _MAX_ENTRIES:
                self._known.entries[key] = resolved
            if resolved.verdict is not None:
                self._verdicts[_verdict_key(call), captured] = resolved.verdict

    def clear(self) -> None:
        self._forget()
        self._known.clear()

    def _forget(self) -> None:
        self._entries.clear()
        self._verdicts.clear()
        self._guarded = ()


class GuardedCall:
    """Matches later calls of a block like one whose weights and inputs (not yet dense) these were; keeps no tensor.

    resolved: the graph that runs them. counter: counts them. copied: where its tensors are copies of inputs that it
    writes to; `given` has the inputs.
    """

    def __init__(
        self, call: Call, source: WeightSource, replace: Callable[[dict], Any] | None, resolved: ResolvedGraph
    ):
        args, kwargs, inputs = call.args, call.kwargs, call.given
        self.resolved, self.counter = resolved, resolved.counter
        self._arguments = ArgumentGuard(args, kwargs, call.spec, inputs, replace)
        # As WeightSlots.take reads them, but without a call and a list for it.
        is_direct = type(source) is WeightSlots and not source.forms
        self._holders, self._names = (source.holders, source.names) if is_direct else (None, ())
        weights, given = call.weights, self._arguments.match(args, kwargs) or ()
        self._check = tensor_guard((*weights, *given))
        self._wants_gradients = any(tensor.requires_grad for tensor in (*weights, *given))
        self._weights = len(weights)
        self._strided = [at for at, tensor in enumerate(inputs, len(weights)) if not is_dense(tensor)]
        self._changed = resolved.graph.facts.changed
        self.copied = [at for at in self._strided if at - len(weights) in self._changed]
        # Computing extents costs more than the rest of a match, and the guards have found the sizes to be these.
        self._pairs = pairs(self._changed, [extent(tensor) for tensor in inputs]) if self._changed else []
        self._is_whole = not self._strided and len(given) == len(inputs)
        self._is_plain = self._is_whole and not self._changed

    def match(self, args: tuple, kwargs: dict[str, Any], source: WeightSource) -> Sequence[torch.Tensor] | None:
        """The tensors that the graph takes in this call; None where the call may need another graph.

        source: as it was, or another of the same class for the same block.
        Raises `RunEagerly` where the host's options say so or a weight is stored otherwise, and what
        `tree_spec.flatten` does.
        """
        given = self._arguments.match(args, kwargs)
        if given is None:
            return None
        holders = self._holders
        tensors = (*(source.take(given) if holders is None else map(getitem, holders, self._names)), *given)
        if not self._check(*tensors) or (self._wants_gradients and torch.is_grad_enabled()):
            return None
        if self._is_plain:
            return tensors
        inputs = given if self._is_whole else self._arguments.with_numbers(given)
        if self._pairs and overlap(inputs, self._pairs):
            return None
        if self._is_whole:
            return tensors
        tensors = [*tensors[: self._weights], *inputs]
        for at in self._strided:
            tensors[at] = tensors[at].contiguous()
        return tensors

    def given(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The inputs in a call that matched, at the places of `copied`."""
        inputs = self._arguments.with_numbers(self._arguments.match(args, kwargs))
        return [inputs[at - self._weights] for at in self.copied]
