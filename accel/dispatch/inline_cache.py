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
"""Sizes of one way of calling a kind that are remembered; more than people take turns between."""

_MAX_GUARDS_MADE = 8
"""Guards made for one call shape in a run: some never match."""


def _weight_layouts(call: Call) -> tuple:
    return layouts_of(call.weights), tuple([weight.storage_offset() for weight in call.weights])


class KnownCalls:
    """What runs have found of the calls of one kind's blocks, for their next calls and runs.

    graphs: by the structure of the call and the layouts of the weights, and then as `CallSignature` has them. blocks:
    what recognises the calls of each, by path.

    It lasts as long as the survey (`SurveyContext.calls`), and is cleared when a graph leaves the cache: it keeps none
    alive. Guards ask for all else that may have changed; what a run is refused is asked anew in each.
    """

    def __init__(self, cache: GraphCache):
        self.graphs: dict[tuple, dict[tuple, ResolvedGraph]] = {}
        self.blocks: dict[str, BlockGuard] = {}
        cache.listeners[self] = None

    @classmethod
    def get_or_create(cls, region: Region, cache: GraphCache, *how: Hashable) -> KnownCalls:
        """Those of a block's kind in runs over this cache. how: what else the graphs that run its calls depend on."""
        alone = region.path if region.calls_layers else None  # what runs in there may be others' code in this block
        key = (cache, region.kind.digest, alone, *how)
        return region.context.calls.get(key) or region.context.calls.setdefault(key, cls(cache))

    def clear(self) -> None:
        self.graphs.clear()
        self.blocks.clear()


class GraphGuard(InputGuard):
    """Recognises the inputs (not yet dense) of later calls like one that a graph runs, of any block of the kind.

    counter: of these calls. copied: where the graph's inputs are copies of those that it writes to.
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
        """Runs the graph with what it takes, faster than `graph.run`; None where nothing does."""

    def _run_watched(self, tensors: Sequence[torch.Tensor]) -> Any:
        facts = self._graph.facts
        changed = [facts.weights + at for at in facts.changed]
        out, self.fast_run = run_watched(self._graph.run, tensors, changed)
        return out

    def prepare_inputs(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """What the graph takes for the inputs of such a call; None where the call may need another graph."""
        if self._pairs and overlap(given, self._pairs):
            return None
        if not self._strided:
            return given
        inputs = list(given)
        for at in self._strided:
            inputs[at] = inputs[at].contiguous()
        return inputs


class BlockGuard(CallSignatures):
    """What recognises the calls of one block: its weights, the layouts that these have, and the ways it is called."""

    def __init__(self, weights: Sequence[torch.Tensor], layouts: tuple, replace: Callable[[dict], Any] | None):
        super().__init__(replace)
        self.check_weights, self.layouts = tensor_guard(weights), layouts
        self.wants_gradients = any(weight.requires_grad for weight in weights)


class InlineCache:
    """The graphs of one block by call in one run; None for a call that runs eagerly.

    path: the block's. cache: where the graphs are; once one leaves it, this run asks for each anew. weights: the
        block's. replace: as for `CallSignatures`. known: of all runs. lease: of this one.
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
        self._slots = (weights.holders, weights.names) if type(weights) is WeightSlots and not weights.forms else None
        self._replace = replace
        self._known, self._lease = known, lease
        self._usable: set[ResolvedGraph] = set()
        """The known graphs that this run has asked for, and leased."""
        self._eager: dict[tuple, Reason | None] = {}
        """Calls of the block that run eagerly: by call and weights those without a graph, by call alone those of which
        the graph is not the one to run, and why."""
        self._guards_made: Counter[ResolvedGraph] = Counter()
        self._generation = cache.generation

    def match(
        self, args: tuple, kwargs: dict[str, Any], captured: bool
    ) -> tuple[ResolvedGraph, GraphGuard, Sequence[torch.Tensor], Sequence[torch.Tensor]] | None:
        """The graph that runs a call like this one, the guard that recognised it, what the graph takes now, and the
        inputs as they were given; None where there is none.

        captured: as in `find`.
        """
        if self._generation != self._cache.generation:
            self._ask_anew()
        block = self._known.blocks.get(self._path)
        try:
            found = None if block is None else block.match(args, kwargs, captured)
            if found is None:
                return None
            resolved, guard, given = found
            slots = self._slots
            weights = self._weights.take(given) if slots is None else tuple(map(getitem, *slots))
        except (RunEagerly, UnsupportedArgument):
            return None  # raised again when the call is described
        if not block.check_weights(*weights):
            return None
        if (block.wants_gradients or guard.wants_gradients) and torch.is_grad_enabled():
            return None
        if resolved not in self._usable and (resolved.verdict is not None or not self._may_use(resolved)):
            return None
        inputs = guard.prepare_inputs(given)
        return None if inputs is None else (resolved, guard, (*weights, *inputs), given)

    def verdict(self, call: Call, captured: bool) -> Reason | None:
        """Why calls like this one do without their graph, where that is known before the weights are taken.

        captured: as in `find`.
        """
        return self._eager.get((call.spec, layouts_of(call.given), captured))

    def find(self, call: Call, captured: bool = False) -> tuple[bool, ResolvedGraph | None]:
        """Whether something was added for calls like this one, and what; from then on guards match them.

        captured: the call is one of those that will be captured, for which other times count.
        """
        if self._generation != self._cache.generation:
            self._ask_anew()
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
        known, path = self._known, self._path
        block = known.blocks.get(path)
        if block is None or block.layouts != weights or not block.check_weights(*call.weights):
            block = known.blocks[path] = BlockGuard(call.weights, weights, self._replace)
        signature = block.signature_of(call.args, call.kwargs, call.spec, call.given, graphs)
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
