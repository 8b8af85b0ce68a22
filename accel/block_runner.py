"""A block's stand-in: finds the compiled graph for a call, or runs the block as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import call_spec, compilers, kinds
from .fallbacks import fallbacks
from .graph_cache import Entry, GraphCache
from .graph_key import GraphKey, tensor_spec
from .probe import Probe
from .regions import Region
from .row_survey import RowSurvey

_MAX_REMEMBERED = 64
"""Call shapes a stand-in remembers the graph of; more than one model call ever has."""


class RunEagerly(Exception):
    """This call of a block is not for a graph; the message says why. Expected, so never `Trouble`."""


class Trouble(RuntimeError):
    """Raised instead of running eagerly, where the user asked to stop."""


@dataclass(frozen=True)
class CompileSettings:
    """How blocks are compiled.

    backend: a name of `compilers.BACKENDS`, or any that torch knows.
    any_size: one graph for all sizes; False makes one for each.
    stop_on_trouble: raise `Trouble` where a block would fall back to eager.
    min_repetitions: kinds with fewer blocks in the model stay eager.
    measured: compare each new graph with its block (`probe`) and give up one that does not pay.
    """

    backend: str = "inductor"
    any_size: bool = True
    stop_on_trouble: bool = False
    min_repetitions: int = 1
    measured: bool = False

    def __post_init__(self) -> None:
        if self.min_repetitions < 1:
            raise ValueError(f"min_repetitions is {self.min_repetitions}; it must be 1 or more")


class BlockRunner:
    """Stands in for one block's forward during model calls (a layer of `substitution`).

    simplify_options: what a dict among the arguments is replaced by, so that a host's per-call options
        do not reach the compiler; it raises `RunEagerly` when they concern the block.
    interrupts: exceptions that mean "stop the run" to the host, and are never swallowed.
    rows: tells sizes that are 1 because the batch is from those that always are.
    """

    def __init__(
        self,
        region: Region,
        cache: GraphCache,
        settings: CompileSettings,
        simplify_options: Callable[[dict], dict] | None = None,
        interrupts: tuple[type[BaseException], ...] = (),
        rows: RowSurvey | None = None,
    ):
        self._region = region
        self._cache = cache
        self._settings = settings
        self._simplify = simplify_options
        self._interrupts = interrupts
        self._rows = rows
        self._slots = kinds.weight_slots(region.block, region.kind.weights)
        self._remembered: dict[tuple, tuple[Entry, compilers.CompiledGraph] | None] = {}
        self._generation = cache.generation

    @property
    def kind(self) -> kinds.Kind:
        return self._region.kind

    def tensors_of(self, call: tuple) -> list[torch.Tensor]:
        """The input tensors of a call (args, kwargs) of the block, as a graph gets them."""
        tensors: list[torch.Tensor] = []
        call_spec.flatten(call, tensors, self._simplify)
        return tensors

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        inputs: list[torch.Tensor] = []
        try:
            spec = call_spec.flatten((args, kwargs), inputs, self._simplify)
        except RunEagerly as reason:
            fallbacks.note(self._region.kind.name, str(reason))
            return inner(*args, **kwargs)
        except call_spec.UnsupportedArgument as reason:
            return self._eagerly(inner, args, kwargs, f"it is called with {reason}")
        given, inputs = inputs, [call_spec.dense(tensor) for tensor in inputs]
        tensors = (*self._slots.read(), *inputs)
        found = self._look_up(spec, inputs, tensors)
        if found is None:
            return inner(*args, **kwargs)
        entry, graph = found
        if graph.changed and call_spec.share_memory(given, graph.changed):
            return self._eagerly(inner, args, kwargs, "it changes an argument that shares memory with another")
        entry.hits += 1

        def run() -> Any:
            out = graph.run(tensors)
            for index in graph.changed:
                if inputs[index] is not given[index]:
                    given[index].copy_(inputs[index])
            return out

        try:
            if entry.probe is not None:
                return self._probe(entry, run, inner, spec, inputs, tensors)
            return run()
        except self._interrupts:
            raise
        except Exception as error:
            self._remembered.clear()
            if isinstance(error, Trouble):
                raise
            if not isinstance(error, torch.OutOfMemoryError):
                entry.give_up(compilers.one_line(error))
            return self._eagerly(inner, args, kwargs, f"its compiled graph failed: {compilers.one_line(error)}")

    def _probe(self, entry, run, inner, spec, inputs, tensors):
        """A call run both ways, on copies where the block might change its inputs; settles in a few of them."""
        probe = entry.probe

        def eager():
            args, kwargs = call_spec.rebuild(spec, [tensor.clone() for tensor in inputs])
            return inner(*args, **kwargs)

        out = probe.call(run, eager, tensors[0].device)  # a weight's: numbers among the inputs lie on the CPU
        if probe.done:
            entry.probe = None
            if probe.verdict is not None:
                self._remembered.clear()
                entry.give_up(probe.verdict)
                self._note(probe.verdict)
        return out

    def _look_up(self, spec, inputs, tensors):
        if self._generation != self._cache.generation:
            self._remembered.clear()
            self._generation = self._cache.generation
        signature = (spec, tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs))
        try:
            return self._remembered[signature]
        except KeyError:
            pass
        found = self._find_or_compile(spec, inputs, tensors)
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[signature] = found
        self._generation = self._cache.generation
        return found

    def _find_or_compile(self, spec, inputs, tensors):
        region, settings = self._region, self._settings
        elsewhere = _elsewhere(tensors[: len(region.kind.weights)], inputs)
        if elsewhere is not None:
            # A graph would be good for this split of the weights alone, and the next prompt splits them otherwise.
            fallbacks.note(region.kind.name, f"its weights are partly on {elsewhere}, its inputs are not")
            return None
        key = GraphKey(
            kind=region.kind,
            call=spec,
            inputs=tuple(tensor_spec(tensor) for tensor in inputs),
            backend=settings.backend,
            sizes=None if settings.any_size else tuple(tensor.shape for tensor in inputs),
        )

        def compile_graph() -> compilers.CompiledGraph:
            try:
                template = kinds.template_of(region.block)
            except Exception as error:
                raise compilers.CompileFailed(f"it cannot be copied: {compilers.one_line(error)}") from error
            weights = tensors[: len(region.kind.weights)]
            growing = self._rows.growing(region.block, inputs) if self._rows and settings.any_size else None
            return compilers.compile_block(
                template, region.kind, weights, spec, inputs, settings.backend, settings.any_size, growing
            )

        try:
            found = self._cache.find(key, region.kind.name, lambda graph: graph.accepts(tensors), compile_graph)
        except torch.OutOfMemoryError as error:
            self._note(f"out of memory while compiling: {compilers.one_line(error)}")
            return None
        if found is None:
            failure = self._cache.failure(key)
            self._note(failure or "the graph cache has no room for it")
        elif settings.measured and not found[0].hits:
            found[0].probe = Probe()
        return found

    def _eagerly(self, inner, args, kwargs, reason):
        self._note(reason)
        return inner(*args, **kwargs)

    def _note(self, reason: str) -> None:
        if self._settings.stop_on_trouble:
            raise Trouble(f"{self._region.kind.name} ({self._region.path}) cannot run compiled: {reason}")
        fallbacks.note(self._region.kind.name, reason)


def _elsewhere(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.device | None:
    """A device that holds weights but is not the inputs'; None where all is in one place."""
    here = {tensor.device for tensor in inputs if tensor.ndim and tensor.numel()}
    return next((weight.device for weight in weights if weight.ndim and here and weight.device not in here), None)
