"""Which graph runs a call of one block, remembered from earlier calls like it.

Most calls are like one of the latest few, in this run or an earlier one. These are matched by guards on the arguments,
in microseconds: how the call is made, what the host's options say, types, devices, sizes and strides of weights and
inputs, the mode torch is in, and whether a changed input shares its memory. Other calls are described first
(`tree_spec`) and looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from operator import getitem
from typing import Any

import torch

from ..cache.entry import Lease
from ..cache.graph_cache import GraphCache
from ..compile.lean_calls import Run, watched
from ..core.reasons import Reason, RunEagerly
from ..fingerprint.block_call import Call
from ..fingerprint.kinds import WeightSlots
from ..fingerprint.survey import Region
from ..modules.streamed_weights import WeightSource
from ..signature.argument_guard import CallGuard
from ..signature.tensors import extent, is_dense, overlap, pairs
from ..signature.tree_spec import UnsupportedArgument
from .resolver import ResolvedGraph

_MAX_CALLS = 128
"""Call shapes that are remembered; more than one model call ever has."""

_MAX_GUARDED = 8
"""Call shapes with guards; the latest are kept."""

_MAX_GUARDS_MADE = 8
"""Guards made for one call shape in a run: some never match, and some shapes take turns."""


def _key(call: Call, captured: bool) -> tuple:
    """What is known of a described call before its weights are taken."""
    return call.spec, _layouts(call.given), captured


def _layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


class KnownCalls:
    """What runs have found of one block's calls, for its next calls and runs.

    graphs: by call (`_key`), with the layouts of the weights. guarded: the latest first.

    It lasts as long as the block's survey (`Region.known`), and is cleared when a graph leaves the cache: it keeps none
    alive. Guards ask for all else that may have changed; what a run is refused is asked anew in each.
    """

    def __init__(self, cache: GraphCache):
        self.graphs: dict[tuple, tuple[tuple, ResolvedGraph]] = {}
        self.guarded: tuple[GuardedCall, ...] = ()
        cache.listeners[self] = None

    @classmethod
    def of(cls, region: Region, cache: GraphCache, *how: Hashable) -> KnownCalls:
        """Those of a block in runs over this cache. how: what else the graphs that run its calls depend on."""
        found = region.known.get((cache, *how))
        return found or region.known.setdefault((cache, *how), cls(cache))

    def clear(self) -> None:
        self.graphs.clear()
        self.guarded = ()


class InlineCache:
    """The graphs of one block by call in one run; None for a call that runs eagerly.

    cache: where the graphs are; once one leaves it, this run asks for each anew. weights: the block's.
    replace: as for `CallGuard`. known: of all runs. lease: of this one.
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
        self._usable: set[ResolvedGraph] = set()
        """The known calls that this run has asked for, and leased."""
        self._eager: dict[tuple, tuple] = {}
        """Calls that have no graph in this run, with the layouts of their weights."""
        self._guards_made: Counter[ResolvedGraph] = Counter()
        self._generation = cache.generation

    def match(
        self, args: tuple, kwargs: dict[str, Any], captured: bool
    ) -> tuple[GuardedCall, Sequence[torch.Tensor]] | None:
        """The guarded call that this one is like, and what its graph takes now; None where there is none.

        captured: as in `find`.
        """
        if self._generation != self._cache.generation:
            self._ask_anew()
        known = self._known.guarded
        for call in known:
            resolved = call.resolved
            if not resolved.serves(captured):
                continue
            try:
                tensors = call.take(args, kwargs, self._weights)
            except (RunEagerly, UnsupportedArgument):
                return None  # raised again when the call is described
            if tensors is None:
                continue
            if resolved not in self._usable:
                if resolved.verdict is not None or not self._may_use(resolved):
                    return None
                self._known.guarded = (call, *(other for other in known if other is not call))
            return call, tensors
        return None

    def verdict(self, call: Call, captured: bool) -> Reason | None:
        """Why calls like this one do without their graph, where that is known before the weights are taken.

        captured: as in `find`.
        """
        _, resolved = self._known.graphs.get(_key(call, captured), (None, None))
        return resolved.verdict if resolved in self._usable else None

    def find(self, call: Call, captured: bool = False) -> tuple[bool, ResolvedGraph | None]:
        """Whether something was added for calls like this one, and what; from then on guards match them.

        captured: the call is one of those that will be captured, for which other times count.
        """
        if self._generation != self._cache.generation:
            self._ask_anew()
        key, weights = _key(call, captured), _layouts(call.weights)
        if self._eager.get(key) == weights:
            return True, None
        layouts, resolved = self._known.graphs.get(key, (None, None))
        if resolved is None or layouts != weights or not self._may_use(resolved):
            return False, None
        is_run = resolved.verdict is None and not resolved.is_compared
        if is_run and self._guards_made[resolved] < _MAX_GUARDS_MADE:
            self._guards_made[resolved] += 1
            guarded = GuardedCall(call, self._weights, self._replace, resolved)
            self._known.guarded = (guarded, *self._known.guarded[: _MAX_GUARDED - 1])
        return True, resolved

    def add(self, call: Call, resolved: ResolvedGraph | None) -> None:
        """Run calls like this one with the graph from now on; None runs them eagerly."""
        if len(self._known.graphs) + len(self._eager) >= _MAX_CALLS:
            self.clear()
        weights = _layouts(call.weights)
        for captured in (False, True):
            if resolved is None:
                self._eager[_key(call, captured)] = weights
            elif resolved.serves(captured):
                self._known.graphs[_key(call, captured)] = weights, resolved
                self._usable.add(resolved)

    def clear(self) -> None:
        self._known.clear()
        self._ask_anew()

    def _ask_anew(self) -> None:
        self._generation = self._cache.generation
        self._usable.clear()
        self._eager.clear()

    def _may_use(self, resolved: ResolvedGraph) -> bool:
        """Whether this run may use what this or another has found, and would find now; its entry is then leased."""
        if resolved in self._usable:
            return True
        entry, lease = resolved.entry, self._lease
        is_there = entry.has(resolved.graph) and (
            (lease is not None and lease.has(entry)) or self._cache.get(entry.key, lease) is entry
        )
        if is_there:
            self._usable.add(resolved)
        return is_there


class GuardedCall(CallGuard):
    """Recognises later calls of a block like one whose weights and inputs (not yet dense) these were; keeps no tensor.

    resolved: the graph that runs them. copied: where its tensors are copies of inputs that it writes to; `given` has
    the inputs.
    """

    def __init__(
        self, call: Call, source: WeightSource, replace: Callable[[dict], Any] | None, resolved: ResolvedGraph
    ):
        inputs, weights = call.given, call.weights
        super().__init__(call.args, call.kwargs, call.spec, inputs, replace, weights)
        self.resolved, self.counter = resolved, resolved.counter
        # As WeightSlots.take reads them, but without a call and a list for it.
        is_direct = type(source) is WeightSlots and not source.forms
        self._holders, self._slots = (source.holders, source.names) if is_direct else (None, ())
        self._wants_gradients = any(tensor.requires_grad for tensor in (*weights, *inputs))
        self._weights = len(weights)
        self._strided = [at for at, tensor in enumerate(inputs, len(weights)) if not is_dense(tensor)]
        changed = resolved.graph.facts.changed
        self.copied = [at for at in self._strided if at - len(weights) in changed]
        # Computing extents costs more than the rest of a match, and the guards have found the sizes to be these.
        self._pairs = pairs(changed, [extent(tensor) for tensor in inputs]) if changed else []
        self._is_whole = not self._strided and not self.has_numbers
        self._is_plain = self._is_whole and not changed
        self.lean: Run | None = None if changed else self._watched
        """Runs the graph with what `take` gives, faster than `graph.run`; None where nothing does."""

    def _watched(self, tensors: Sequence[torch.Tensor]) -> Any:
        out, self.lean = watched(self.resolved.graph.run, tensors)
        return out

    def take(self, args: tuple, kwargs: dict[str, Any], source: WeightSource) -> Sequence[torch.Tensor] | None:
        """The tensors that the graph takes in this call; None where the call may need another graph.

        source: as it was, or another of the same class for the same block.
        Raises `RunEagerly` where the host's options say so or a weight is stored otherwise, and what
        `tree_spec.flatten` does.
        """
        given = self.arguments(args, kwargs)
        if given is None:
            return None
        holders = self._holders
        tensors = (*(source.take(given) if holders is None else map(getitem, holders, self._slots)), *given)
        if not self.check(*tensors) or (self._wants_gradients and torch.is_grad_enabled()):
            return None
        if self._is_plain:
            return tensors
        inputs = given if self._is_whole else self.with_numbers(given)
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
        inputs = self.with_numbers(self.arguments(args, kwargs))
        return [inputs[at - self._weights] for at in self.copied]
