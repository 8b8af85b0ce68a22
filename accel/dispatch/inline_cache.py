"""Which graph runs a call of one block, remembered from earlier calls like it.

Most calls are like one that a block of the kind had, in this run or an earlier one. These are matched by guards on the
arguments, in microseconds: how the call is made, what the host's options say, types, devices, sizes and strides of
weights and inputs, the mode torch is in, and whether a changed input shares its memory. Other calls are described first
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
from ..signature import tree_spec
from ..signature.argument_guard import CallGuard, SizeGuard, tensor_guard
from ..signature.tensors import extent, is_dense, overlap, pairs
from ..signature.tree_spec import UnsupportedArgument
from .resolver import ResolvedGraph

_MAX_CALLS = 1024
"""Call shapes of one kind that are remembered; more than the sizes and prompts that people take turns between."""

_MAX_WAYS = 8
"""Ways in which a block is called, whatever the sizes; the latest are kept."""

_MAX_GUARDS_MADE = 8
"""Guards made for one call shape in a run: some never match."""


def _key(call: Call, captured: bool) -> tuple:
    """What is known of a described call before its weights are taken."""
    return call.spec, _layouts(call.given), captured


def _layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def _like(tensors: Sequence[torch.Tensor], numbers: tuple[int, ...], captured: bool) -> tuple:
    """What guards are kept by: what else they ask for, such as autocast, does not change from call to call."""
    return _layouts(tensors), *[(type(t), t.is_inference(), t.requires_grad) for t in tensors], numbers, captured


def _weight_layouts(call: Call) -> tuple:
    return _layouts(call.weights), tuple([weight.storage_offset() for weight in call.weights])


class KnownCalls:
    """What runs have found of the calls of one kind's blocks, for their next calls and runs.

    graphs: by call (`_key`) and the layouts of the weights. guards: by the way of the call and these layouts, and then
    by the layouts of its inputs. of_blocks: by path.

    It lasts as long as the survey (`SurveyContext.calls`), and is cleared when a graph leaves the cache: it keeps none
    alive. Guards ask for all else that may have changed; what a run is refused is asked anew in each.
    """

    def __init__(self, cache: GraphCache):
        self.graphs: dict[tuple, ResolvedGraph] = {}
        self.guards: dict[tuple, dict[tuple, GuardedCall]] = {}
        self.of_blocks: dict[str, OfBlock] = {}
        cache.listeners[self] = None

    @classmethod
    def of(cls, region: Region, cache: GraphCache, *how: Hashable) -> KnownCalls:
        """Those of a block's kind in runs over this cache. how: what else the graphs that run its calls depend on."""
        alone = region.path if region.calls_layers else None  # what runs in there may be others' code in this block
        key = (cache, region.kind.digest, alone, *how)
        return region.context.calls.get(key) or region.context.calls.setdefault(key, cls(cache))

    def clear(self) -> None:
        self.graphs.clear()
        self.guards.clear()
        self.of_blocks.clear()


class GuardedCall(SizeGuard):
    """Recognises the inputs (not yet dense) of later calls like one, of any block of the kind; keeps no tensor.

    resolved: the graph that runs them. copied: where the inputs of it are copies of those that it writes to.
    """

    def __init__(self, call: Call, resolved: ResolvedGraph):
        given = call.given
        super().__init__(given, tree_spec.number_indices(call.spec))
        self.resolved, self.counter = resolved, resolved.counter
        self.wants_gradients = any(tensor.requires_grad for tensor in given)
        self._strided = [at for at, tensor in enumerate(given) if not is_dense(tensor)]
        changed = resolved.graph.facts.changed
        self.copied = [at for at in self._strided if at in changed]
        # Computing extents costs more than the rest of a match, and the guards have found the sizes to be these.
        self._pairs = pairs(changed, [extent(tensor) for tensor in given]) if changed else []
        self.lean: Run | None = self._watched
        """Runs the graph with what it takes, faster than `graph.run`; None where nothing does."""

    def _watched(self, tensors: Sequence[torch.Tensor]) -> Any:
        facts = self.resolved.graph.facts
        changed = [facts.weights + at for at in facts.changed]
        out, self.lean = watched(self.resolved.graph.run, tensors, changed)
        return out

    def inputs(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """What the graph takes for the inputs of such a call; None where the call may need another graph."""
        if self._pairs and overlap(given, self._pairs):
            return None
        if not self._strided:
            return given
        inputs = list(given)
        for at in self._strided:
            inputs[at] = inputs[at].contiguous()
        return inputs


class OfBlock:
    """What recognises the calls of one block: its weights, the layouts that these have, and the ways it is called."""

    def __init__(self, weights: Sequence[torch.Tensor], layouts: tuple):
        self.check, self.layouts = tensor_guard(weights), layouts
        self.wants_gradients = any(weight.requires_grad for weight in weights)
        self.ways: tuple[Way, ...] = ()


class Way(CallGuard):
    """One way of calling a block. by_layouts: the guards of such calls. latest: that of the latest one."""

    def __init__(self, call: Call, replace: Callable[[dict], Any] | None, by_layouts: dict[tuple, GuardedCall]):
        super().__init__(call.args, call.kwargs, call.spec, call.given, replace)
        self.by_layouts, self.latest = by_layouts, None

    def find(self, tensors: Sequence[torch.Tensor], numbers: tuple[int, ...], captured: bool) -> GuardedCall | None:
        """The guard that knows a call with these arguments."""
        latest = self.latest
        if latest is not None and latest.resolved.serves(captured) and latest.check(tensors, numbers):
            return latest
        try:
            found = self.by_layouts.get(_like(tensors, numbers, captured))
        except AttributeError:  # something else in a tensor's place
            return None
        if found is None or not found.check(tensors, numbers):
            return None
        self.latest = found
        return found

    def add(self, call: Call, resolved: ResolvedGraph) -> None:
        """The graph runs calls like this one, which is made in this way."""
        guard = self.latest = GuardedCall(call, resolved)
        arguments = self.arguments(call.args, call.kwargs)
        for captured in (False, True) if arguments is not None else ():
            if resolved.serves(captured):
                self.by_layouts[_like(*arguments, captured)] = guard


class InlineCache:
    """The graphs of one block by call in one run; None for a call that runs eagerly.

    path: the block's. cache: where the graphs are; once one leaves it, this run asks for each anew. weights: the
        block's. replace: as for `CallGuard`. known: of all runs. lease: of this one.
    """

    def __init__(
        self,
        path: str,
        cache: GraphCache,
        weights: WeightSource,
        replace: Callable[[dict], Any] | None,
        known: KnownCalls,
        lease: Lease | None = None,
    ):
        self._path, self._cache = path, cache
        self._weights = weights
        # As WeightSlots.take reads them, but without a call and a list for it.
        is_direct = type(weights) is WeightSlots and not weights.forms
        self._slots = (weights.holders, weights.names) if is_direct else None
        self._replace = replace
        self._known, self._lease = known, lease
        self._usable: set[ResolvedGraph] = set()
        """The known calls that this run has asked for, and leased."""
        self._found: dict[tuple, tuple[tuple, ResolvedGraph | None]] = {}
        """What this run has found of the block's calls, with the layouts of its weights in them."""
        self._guards_made: Counter[ResolvedGraph] = Counter()
        self._generation = cache.generation

    def match(
        self, args: tuple, kwargs: dict[str, Any], captured: bool
    ) -> tuple[GuardedCall, Sequence[torch.Tensor], Sequence[torch.Tensor]] | None:
        """The guarded call that this one is like, what its graph takes now, and the inputs as they were given; None
        where there is none.

        captured: as in `find`.
        """
        if self._generation != self._cache.generation:
            self._ask_anew()
        own = self._known.of_blocks.get(self._path)
        for way in () if own is None else own.ways:
            try:
                arguments = way.arguments(args, kwargs)
                call = None if arguments is None else way.find(*arguments, captured)
                if call is None:
                    continue
                slots = self._slots
                weights = self._weights.take(arguments[0]) if slots is None else tuple(map(getitem, *slots))
            except (RunEagerly, UnsupportedArgument):
                return None  # raised again when the call is described
            if not own.check(*weights):
                return None
            if (own.wants_gradients or call.wants_gradients) and torch.is_grad_enabled():
                return None
            resolved = call.resolved
            if resolved not in self._usable and (resolved.verdict is not None or not self._may_use(resolved)):
                return None
            given = way.with_numbers(*arguments)
            inputs = call.inputs(given)
            return None if inputs is None else (call, (*weights, *inputs), given)
        return None

    def verdict(self, call: Call, captured: bool) -> Reason | None:
        """Why calls like this one do without their graph, where that is known before the weights are taken.

        captured: as in `find`.
        """
        _, resolved = self._found.get(_key(call, captured), (None, None))
        return resolved.verdict if resolved in self._usable else None

    def find(self, call: Call, captured: bool = False) -> tuple[bool, ResolvedGraph | None]:
        """Whether something was added for calls like this one, and what; from then on guards match them.

        captured: the call is one of those that will be captured, for which other times count.
        """
        if self._generation != self._cache.generation:
            self._ask_anew()
        key, weights = _key(call, captured), _weight_layouts(call)
        if self._found.get(key) == (weights, None):
            return True, None
        resolved = self._known.graphs.get((*key, weights))
        if resolved is None or not self._may_use(resolved):
            return False, None
        self._found[key] = weights, resolved
        is_run = resolved.verdict is None and not resolved.is_compared
        if is_run and self._guards_made[resolved] < _MAX_GUARDS_MADE:
            self._guards_made[resolved] += 1
            self._guard(call, resolved, weights)
        return True, resolved

    def _guard(self, call: Call, resolved: ResolvedGraph, weights: tuple) -> None:
        """Have guards match calls like this one, of this block, and of those whose weights are laid out alike."""
        known, path = self._known, self._path
        own = known.of_blocks.get(path)
        if own is None or own.layouts != weights or not own.check(*call.weights):
            own = known.of_blocks[path] = OfBlock(call.weights, weights)
        way = next((way for way in own.ways if way.spec == call.spec), None)
        if way is None:
            way = Way(call, self._replace, known.guards.setdefault((call.spec, weights), {}))
            own.ways = (way, *own.ways[: _MAX_WAYS - 1])
        way.add(call, resolved)

    def add(self, call: Call, resolved: ResolvedGraph | None) -> None:
        """Run calls like this one with the graph from now on; None runs them eagerly."""
        if len(self._known.graphs) + len(self._found) >= _MAX_CALLS:
            self.clear()
        weights = _weight_layouts(call)
        for captured in (False, True):
            if resolved is None or resolved.serves(captured):
                key = _key(call, captured)
                self._found[key] = weights, resolved
                if resolved is not None:
                    self._known.graphs[(*key, weights)] = resolved
                    self._usable.add(resolved)

    def clear(self) -> None:
        self._known.clear()
        self._ask_anew()

    def _ask_anew(self) -> None:
        self._generation = self._cache.generation
        self._usable.clear()
        self._found.clear()

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
