"""Models with compiled blocks: a clone of a ModelPatcher, for Accelerate Model.

`accelerate` wraps the clone: the outer wrapper begins a `Run` for each sampling, the inner one has each call of
the model made in it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP, get_wrappers_with_key

from ....cache.entry import Lease
from ....cache.graph_cache import GraphCache, shared
from ....core.compile_settings import CompileSettings, Trouble
from ....core.events import emit
from ....core.fallbacks import fallbacks
from ....core.reasons import Reason
from ....dispatch.compiled_layers import Host, make_compiled_layers, survey_model
from ....dispatch.whole_calls import WholeCalls
from ....fingerprint.survey import KeptSurveys
from ....modules.blocks import is_compiled, unwrap_compiled
from ....modules.substitution import Forward, Layer
from ....report.run import Totals
from ....store.graph_store import attach
from .. import attention, preferences, weight_patches  # noqa: F401 the last is known once it is imported
from ..recording import make_unrecorded_context
from ..running_prompt import CompileProgress, find_upstream_node
from ..tracing import NO_RESULT_DEPENDS_ON, traceable
from ..versions import is_split_over_devices, put_wrappers
from . import streamed
from .options import CORE_COMPILE, INTERRUPTS, WARMS_UP, runs_between, simplifier
from .run_events import note_sampling, run_events, uses

if TYPE_CHECKING:
    from .capture import CapturedModel

KEY = "accel.compile"  # the key of our wrappers on a patcher, and of the run's state in its transformer_options
HOST = Host(
    NO_RESULT_DEPENDS_ON,
    INTERRUPTS,
    comfy.model_management.throw_exception_if_processing_interrupted,
    lambda region: simplifier(region.strings),
    plain=streamed.plain,
    weights=streamed.weights_of,
    traceable=traceable,
    between=runs_between,
    outside_recording=make_unrecorded_context,
)


def accelerate(
    model: Any,
    settings: CompileSettings,
    cache: GraphCache = shared,
    made_by: str | None = None,
    graphs: bool = False,
    quality: str | None = None,
) -> Any:
    """A clone of a ModelPatcher whose repeated blocks run compiled. made_by: the class of the node that shows progress
    and gain. graphs: capture and replay whole model calls where possible. quality: the node's choice, for reports."""
    attach(cache, preferences.find_running_home)
    patched = streamed.clone_for_compiling(model, cache)
    if graphs:
        from . import capture

        capture.attach(cache, patched)
    shapes = "any size" if settings.any_size else "exact size"
    compiling: dict[str, Any] = {"backend": settings.backend, "shapes": shapes, "check_gain": settings.measured}
    compiling |= {"graphs": graphs, "quality": quality}
    wrappers = {
        WrappersMP.OUTER_SAMPLE: _wrap_sampling(settings, cache, made_by, compiling),
        WrappersMP.SAMPLER_SAMPLE: note_sampling,
        WrappersMP.APPLY_MODEL: _wrap_model_call(settings, cache),
    }
    put_wrappers(patched, KEY, wrappers)
    return patched


def _wrap_sampling(settings: CompileSettings, cache: GraphCache, made_by: str | None, compiling: dict[str, Any]):
    def sample_in_run(executor, *args, **kwargs):
        node_id = find_upstream_node(made_by, "MODEL")
        with run_events(executor, args, KEY, compiling={**compiling, "node": node_id}) as options:
            lease, is_finished = cache.begin_lease(), False
            graphs = compiling["graphs"] and _may_have_graphs(cache)
            run = options[KEY] = Run(settings, cache, lease, node_id, graphs)
            try:
                out = executor(*args, **kwargs)
                is_finished = True
                return out
            finally:
                lease.uses = uses(executor, args, sorted(run.lengths))
                cache.end_lease(lease)
                run.emit_totals(is_finished)

    return sample_in_run


def _may_have_graphs(cache: GraphCache) -> bool:
    """Whether to try CUDA graphs, and tell why there are none: not where the device is no CUDA device at all."""
    try:
        reason = cache.captures.capturer.why_not(comfy.model_management.get_torch_device())
    except Exception:  # the attempt to capture will report it
        return True
    return reason is None or reason.code != "not_cuda"


def _wrap_model_call(settings: CompileSettings, cache: GraphCache):
    # Core's own compile node would trace this wrapper with the model.
    @torch.compiler.disable
    def call_in_run(executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        options = {} if transformer_options is None else transformer_options
        run = options.get(KEY)
        # Other code may call the model outside of a sampler.
        with nullcontext() if run is not None else cache.lease() as lease:
            run = run or Run(settings, cache, lease)
            with run.call(executor.class_obj, options, c_crossattn, x, c_concat, control, *kwargs.values()) as options:
                try:
                    return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
                finally:
                    attention.begin(None)

    return call_in_run


@dataclass
class _ModelInRun:
    """A model in one run: layers for its blocks and itself (none where another node compiles it), what puts them in
    place, the number of kinds, and its captures, if any."""

    layers: dict[torch.nn.Module, Layer]
    calls: WholeCalls
    kinds: int
    captured: CapturedModel | None = None


@dataclass(eq=False)
class Run:
    """The compiled layers of one sampling run; made at its start, dropped at its end.

    Layers are made at a model's first call, because its weights are loaded only then. Each model has its own: the
    host may call a clone on each of several devices at once, from one thread per device.

    graphs: whether whole calls are captured. lengths: of the prompts, in tokens.
    """

    settings: CompileSettings
    cache: GraphCache
    lease: Lease
    node_id: str | None = None
    graphs: bool = False
    progress: CompileProgress = field(default_factory=CompileProgress)
    lock: threading.Lock = field(default_factory=threading.Lock)
    models: dict[torch.nn.Module, _ModelInRun] = field(default_factory=dict)
    lengths: set[int] = field(default_factory=set)
    model_calls: int = 0

    @contextmanager
    def call(
        self, base: torch.nn.Module, options: dict[str, Any], context: Any = None, *inputs: Any
    ) -> Iterator[dict[str, Any]]:
        """Run a BaseModel's blocks compiled during one call, or replay the call. Yields its transformer_options.
        context: the prompt [B, T, ...], if any. inputs: the others."""
        model = base.diffusion_model
        with self.lock:
            if model not in self.models:
                self.models[model] = self._prepare(model, options)
        in_run = self.models[model]
        if not in_run.layers:
            yield options
            return
        if isinstance(context, torch.Tensor) and context.ndim > 1:
            self.lengths.add(context.shape[1])
        with self.progress.report_call(in_run.kinds, self.node_id):
            if self.graphs:
                with self.lock:
                    self.model_calls += 1
            if not self.graphs or is_split_over_devices(options):
                with in_run.calls.put_in_place((context, *inputs)):
                    yield options
                return
            from . import capture  # a slow import, which only captured runs should pay for

            with self.lock:
                if in_run.captured is None:
                    in_run.captured = capture.begin(base, self.settings, self.cache, self.lease, in_run.layers)
            with in_run.captured.replay_or_capture(options) as options:
                yield options

    def _prepare(self, model: torch.nn.Module, options: dict[str, Any]) -> _ModelInRun:
        name, reason, layers = type(unwrap_compiled(model)).__name__, Reason("no_blocks"), {}
        if is_compiled(model) or get_wrappers_with_key(WrappersMP.APPLY_MODEL, CORE_COMPILE, options):
            reason = Reason("compiled_around")
            fallbacks.note(name, reason, how="without Accel")
        else:
            # A warm-up ends with its code made.
            settings = replace(self.settings, beside=self.settings.beside and not options.get(WARMS_UP))
            layers = block_layers(model, settings, self.cache, self.lease)
        calls = WholeCalls(name, layers, self.cache, self.settings)
        kinds = count_kinds(calls)
        if self.settings.stop_on_trouble and not kinds:
            raise Trouble(f"{name} cannot run compiled: {reason}")
        return _ModelInRun(layers, calls, kinds)

    def emit_totals(self, is_finished: bool) -> None:
        """Emit "run_calls" for the run's record, once its lease is over."""
        runners = [runner for model in self.models.values() for runner in model.calls.runners.values()]
        captures: list[Any] = [model.captured.capture for model in self.models.values() if model.captured is not None]
        calls = [*(model.calls for model in self.models.values()), *(capture.blocks for capture in captures)]
        eager_calls = sum(layer.eager_calls for layer in (*runners, *captures)) + sum(whole.end() for whole in calls)
        if is_finished and runners and not (eager_calls or self.lease.calls or self.lease.replays):
            for model in self.models:  # Wan Animate 2 calls methods of its blocks
                fallbacks.note(type(model).__name__, Reason("no_block_runs", part="forward"))
        counts = {"eager_calls": eager_calls, "contexts": tuple(sorted(self.lengths)), "model_calls": self.model_calls}
        emit("run_calls", totals=Totals.from_lease(self.lease, self.settings.backend, self.settings.measured, **counts))


@dataclass(eq=False)
class NetworkRun:
    """One run, by one thread, of a network beside the sampled one (ControlNet). leaves_eager: blocks not to compile."""

    network: torch.nn.Module
    settings: CompileSettings
    cache: GraphCache
    lease: Lease
    node_id: str | None
    leaves_eager: Callable[[torch.nn.Module], bool] = lambda block: False
    progress: CompileProgress = field(default_factory=CompileProgress)

    @functools.cached_property
    def _layer_and_calls(self) -> tuple[Layer, WholeCalls, int]:
        """The network's own layer, its blocks' calls and number of kinds; made once weights are in place."""
        layers = block_layers(self.network, self.settings, self.cache, self.lease)
        network_layer, name = layers.pop(self.network), type(self.network).__name__
        layers = {block: layer for block, layer in layers.items() if not self.leaves_eager(block)}
        calls = WholeCalls(name, layers, self.cache, self.settings)
        if not calls.runners:
            fallbacks.note(name, Reason("no_blocks"))
        return network_layer, calls, count_kinds(calls)

    def call(self, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        """The output of the network's own forward, with its blocks compiled."""
        network_layer, calls, kinds = self._layer_and_calls  # the layer cannot be put in place of a running forward
        with self.progress.report_call(kinds, self.node_id), calls.put_in_place((*args, *kwargs.values())):
            return network_layer(inner, *args, **kwargs)

    def end(self) -> None:
        """Report calls that ran uncompiled; not called after a run that was broken off."""
        if "_layer_and_calls" in vars(self):
            self._layer_and_calls[1].end()


def block_layers(
    model: torch.nn.Module, settings: CompileSettings, cache: GraphCache = shared, lease: Lease | None = None
) -> dict[torch.nn.Module, Layer]:
    """Layers for every block of the model that can be compiled, and for the model itself, which observes its calls."""
    if cache is shared:
        preferences.current()  # puts the settings into force before the first graph is made
    surveys = KeptSurveys.get_or_create(model)
    survey = survey_model(model, settings, HOST, surveys)
    return make_compiled_layers(model, survey, settings, HOST, cache, lease, surveys=surveys)


def count_kinds(calls: WholeCalls) -> int:
    """How many kinds of blocks run compiled in them."""
    return len({runner.kind for runner in calls.runners.values()})
