"""Which graph runs a call of one block, remembered from earlier calls like it.

Most calls are like an earlier one of the block's kind. Guards match these in microseconds, by arguments, host options,
layouts of weights and inputs, torch's mode, and whether a changed input shares its memory. Other calls are described
first (`tree_spec`) and looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from operator import getitem
from typing import Any

import torch

from ..cache.entry import Lease
from ..cache.graph_cache import GraphCache
from ..compile.lean_calls import Run, run_watched
from ..core.reasons import Reason, RunEagerly
from ..fingerprint.block_call import Call
from ..fingerprint.kinds import WeightSlots
from ..fingerprint.survey import Region
from ..modules.streamed_weights import WeightSource
from ..signature.argument_guard import CallSignatures, InputGuard, layouts_of, tensor_guard
from ..signature.tensors import extent, is_dense, overlap, pairs
from ..signature.tree_spec import UnsupportedArgument
from .resolver import ResolvedGraph

_MAX_CALLS = 1024
"""Sizes remembered for each signature of a kind; nobody takes turns between more."""

_MAX_GUARDS_MADE = 8
"""Guards made for one graph in a run: some never match."""


def _weight_layouts(call: Call) -> tuple:
    return layouts_of(call.weights), tuple([weight.storage_offset() for weight in call.weights])


class KnownCalls:
    """The graphs that earlier calls of one kind's blocks had, and the guards that recognise such calls.

    graphs: by call structure and weight layouts, then as for `CallSignature`. blocks: guards by the block's path.

    It lasts as long as the survey (`SurveyContext.calls`), and is cleared when a graph leaves the cache. Guards check
    all else that may have changed; refusals last for one run.
    """

    def __init__(self, cache: GraphCache):
        self.graphs: dict[tuple, dict[tuple, ResolvedGraph]] = {}
        self.blocks: dict[str, BlockGuard] = {}
        cache.listeners[self] = None

    @classmethod
    def get_or_create(cls, region: Region, cache: GraphCache, *conditions: Hashable) -> KnownCalls:
        """The known calls of a block's kind over this cache. conditions: what else their graphs depend on."""
        own_path = region.path if region.calls_layers else None  # other programs' code may run in this block's layers
        key = (cache, region.kind.digest, own_path, *conditions)
        return region.context.calls.get(key) or region.context.calls.setdefault(key, cls(cache))

    def clear(self) -> None:
        self.graphs.clear()
        self.blocks.clear()


class GraphGuard(InputGuard):
    """Recognises the inputs (not yet dense) of calls that a graph runs, of any block of the kind.

    counter: counts these calls. copied: indices of the inputs that the graph writes to as copies.
    """

    def __init__(self, call: Call, resolved: ResolvedGraph):
        given, changed = call.given, resolved.graph.facts.changed
        super().__init__(call.spec, given)
        self.counter = resolved.counter
        self.wants_gradients = any(tensor.requires_grad for tensor in given)
        self._strided = [at for at, tensor in enumerate(given) if not is_dense(tensor)]
        self.copied = [at for at in self._strided if at in changed]
        # Computing extents costs more than the rest of a match, and the guards have found the sizes to be these.
        self._pairs = pairs(changed, [extent(tensor) for tensor in given]) if changed else []
        self._graph = resolved.graph
        self.fast_run: Run | None = self._run_watched
        """Runs the graph faster than `graph.run`; None where nothing does."""

    def _run_watched(self, tensors: Sequence[torch.Tensor]) -> Any:
        facts = self._graph.facts
        changed = [facts.weights + at for at in facts.changed]
        out, self.fast_run = run_watched(self._graph.run, tensors, changed)
        return out

    def prepare_inputs(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """The graph's inputs, made dense; None where the call may need another graph."""
        if self._pairs and overlap(given, self._pairs):
            return None
        if not self._strided:
            return given
        inputs = list(given)
        for at in self._strided:
            inputs[at] = inputs[at].contiguous()
        return inputs


class BlockGuard(CallSignatures):
    """Recognises the calls of one block, by its weights and signatures. layouts: of the weights."""

    def __init__(self, weights: Sequence[torch.Tensor], layouts: tuple, replace: Callable[[dict], Any] | None):
        super().__init__(replace)
        self.check_weights, self.layouts = tensor_guard(weights), layouts
        self.wants_gradients = any(weight.requires_grad for weight in weights)


class InlineCache:
    """The graphs of one block by call in one run; None for a call that runs eagerly.

    captured, in its methods: the call may be captured later, and other timings decide.

    path, weights: the block's. cache: holds the graphs; once one leaves it, this run looks up each again.
    replace: as for `CallSignatures`. known: from all runs. lease: this run's.
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
        self._path, self._cache, self._weights, self._replace = path, cache, weights, replace
        # As WeightSlots.take reads them, but without a call and a list for it.
        self._slots = (weights.holders, weights.names) if type(weights) is WeightSlots and not weights.forms else None
        self._known, self._lease = known, lease
        self._usable: set[ResolvedGraph] = set()
        """Known graphs that are leased to this run."""
        self._eager: dict[tuple, Reason | None] = {}
        """Calls that run eagerly: by call and weights without a graph, by call alone where its verdict says so."""
        self._guards_made: Counter[ResolvedGraph] = Counter()
        self._generation = cache.generation

    def match(
        self, args: tuple, kwargs: dict[str, Any], captured: bool
    ) -> tuple[ResolvedGraph, GraphGuard, Sequence[torch.Tensor], Sequence[torch.Tensor]] | None:
        """A known graph for the call, its guard, the tensors it takes, and the inputs as given; None without one."""
        if self._generation != self._cache.generation:  # asked here too, since a call costs more
            self._drop_outdated()
        block_guard = self._known.blocks.get(self._path)
        try:
            match = None if block_guard is None else block_guard.match(args, kwargs, captured)
            if match is None:
                return None
            resolved, guard, given = match
            slots = self._slots
            weights = self._weights.take(given) if slots is None else tuple(map(getitem, *slots))
        except (RunEagerly, UnsupportedArgument):
            return None  # raised again when the call is described
        if not block_guard.check_weights(*weights):
            return None
        if (block_guard.wants_gradients or guard.wants_gradients) and torch.is_grad_enabled():
            return None
        if resolved not in self._usable and (resolved.verdict is not None or not self._may_use(resolved)):
            return None
        inputs = guard.prepare_inputs(given)
        return None if inputs is None else (resolved, guard, (*weights, *inputs), given)

    def verdict(self, call: Call, captured: bool) -> Reason | None:
        """Why calls like this one do not run their graph; None where that is unknown before the weights are taken."""
        return self._eager.get((call.spec, layouts_of(call.given), captured))

    def find(self, call: Call, captured: bool = False) -> tuple[bool, ResolvedGraph | None]:
        """Whether something was added for calls like this one, and what; from then on guards match them."""
        self._drop_outdated()
        layouts, weights = layouts_of(call.given), _weight_layouts(call)
        if (call.spec, layouts, captured, weights) in self._eager:
            return True, None
        graphs = self._known.graphs.get((call.spec, weights), {})
        resolved = graphs.get((layouts, captured))
        if resolved is None or not self._may_use(resolved):
            return False, None
        if resolved.verdict is not None:
            self._eager[call.spec, layouts, captured] = resolved.verdict
        elif not resolved.is_compared and self._guards_made[resolved] < _MAX_GUARDS_MADE:
            self._guards_made[resolved] += 1
            self._guard(call, resolved, weights, graphs)
        return True, resolved

    def _guard(self, call: Call, resolved: ResolvedGraph, weights: tuple, graphs: dict[tuple, ResolvedGraph]) -> None:
        """Have guards match calls like this one, of this block, and of those whose weights are laid out alike."""
        block_guard = self._known.blocks.get(self._path)
        if block_guard is None or block_guard.layouts != weights or not block_guard.check_weights(*call.weights):
            block_guard = self._known.blocks[self._path] = BlockGuard(call.weights, weights, self._replace)
        signature = block_guard.signature_of(call.args, call.kwargs, call.spec, call.given, graphs)
        guard = GraphGuard(call, resolved)
        for captured in filter(resolved.serves, (False, True)):
            signature.add(resolved, guard, call.given, captured)

    def add(self, call: Call, resolved: ResolvedGraph | None) -> None:
        """Run calls like this one with the graph from now on; None runs them eagerly."""
        layouts, weights = layouts_of(call.given), _weight_layouts(call)
        if len(self._eager) >= _MAX_CALLS:
            self._eager.clear()
        if resolved is None:
            self._eager.update({(call.spec, layouts, captured, weights): None for captured in (False, True)})
            return
        graphs = self._known.graphs.setdefault((call.spec, weights), {})
        if len(graphs) >= _MAX_CALLS:
            graphs.clear()
        graphs.update({(layouts, captured): resolved for captured in filter(resolved.serves, (False, True))})
        self._usable.add(resolved)

    def clear(self) -> None:
        self._known.clear()
        self._generation = -1
        self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Look up every graph again once one has left the cache."""
        if self._generation != self._cache.generation:
            self._generation = self._cache.generation
            self._usable.clear()
            self._eager.clear()

    def _may_use(self, resolved: ResolvedGraph) -> bool:
        """Whether the graph is still in the cache; its entry is then leased to this run."""
        if resolved not in self._usable:
            entry, lease = resolved.entry, self._lease
            is_leased = lease is not None and lease.has(entry)
            if not entry.has(resolved.graph) or not (is_leased or self._cache.get(entry.key, lease) is entry):
                return False
            self._usable.add(resolved)
        return True
