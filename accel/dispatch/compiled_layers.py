"""The stand-ins for one model's blocks, for any host."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.entry import Lease
from ..cache.graph_cache import GraphCache, shared
from ..core.compile_settings import CompileSettings
from ..core.errors import one_line
from ..core.events import emit
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, RunEagerly
from ..core.torch_internals import tell_compilers
from ..fingerprint.survey import KeptSurveys, Region, Survey, Traceable, survey
from ..modules import wrapped_layers
from ..modules.streamed_weights import Plain, WeightSource, keep_in_place
from ..modules.substitution import Layer, Outside
from ..modules.wrapped_layers import Wraps
from .block_runner import BlockRunner
from .current_code import CurrentCode
from .resolver import BlocksRun
from .wrapped_runner import WrappedRunner

Simplify = Callable[[dict], dict]


@dataclass(frozen=True)
class Host:
    """What the engine needs from the program that calls the model.

    ignored: as for `CodeReader`. interrupts: exceptions that mean "stop the run", never swallowed.
    ask: raises one of these where the user has stopped the run, in the middle of a call that waits.
    simplifier: for a block, what a dict among its arguments is replaced by (`BlockRunner`'s simplify_options).
    wraps: recognises the host's wrappers around layers, such as LoRA.
    outside_recording: asked when a model's layers are made: the context for their calls where the host records what the
        model allocates; None where it does not.
    between: whether others' code runs between the blocks in a call of the model with these arguments.
    plain, weights: for blocks whose weights the host streams: how they look with them in place, and the source of a
        block's weights; None where they are in place.
    traceable: a context in which the host's functions can be traced, although extensions have hidden them from torch.
    """

    ignored: frozenset[tuple[str, str]] = frozenset()
    interrupts: tuple[type[BaseException], ...] = ()
    ask: Callable[[], None] = lambda: None
    simplifier: Callable[[Region], Simplify | None] = lambda region: None
    wraps: Wraps | None = None
    outside_recording: Callable[[], Outside | None] = lambda: None
    between: Callable[[tuple, dict[str, Any]], bool] = lambda args, kwargs: False
    plain: Plain = keep_in_place
    weights: Callable[[Region], WeightSource | None] = lambda region: None
    traceable: Traceable = nullcontext


def survey_model(
    model: torch.nn.Module, settings: CompileSettings, host: Host, surveys: KeptSurveys | None = None
) -> Survey:
    """The survey of the model's blocks as they are now, or one of earlier runs (`surveys`) that still holds; emits
    "survey", and notes what is left uncompiled."""
    started, name = time.perf_counter(), type(model).__name__
    found = _survey(model, settings, host, surveys)
    if not found.regions and not found.left_eager:
        fallbacks.note(name, Reason("no_blocks"))
    left = _count_uncompiled(model, found, host.wraps)
    for (block, reason), number in left.items():
        fallbacks.note(block, reason, calls=number)  # one each: a run's record adds the others
    seconds = time.perf_counter() - started
    emit("survey", model=name, blocks=len(found.regions), kinds=len(found.kinds), left=left, seconds=seconds)
    return found


def _count_uncompiled(model: torch.nn.Module, found: Survey, wraps: Wraps | None) -> Counter[tuple[str, Reason]]:
    """How many blocks of which class the survey has left uncompiled, by reason."""
    if not found.left_eager:
        return Counter()
    # A path is without the host's wrappers, and a block may be in the model at two places.
    parts = {**dict(model.named_modules(remove_duplicate=False)), **dict(wrapped_layers.modules(model, wraps))}
    return Counter(
        (type(parts[path]).__name__ if path in parts else path, why)
        for path, why in found.left_eager
        if why.code != "too_few_blocks"  # which was asked for
    )


def _survey(model: torch.nn.Module, settings: CompileSettings, host: Host, surveys: KeptSurveys | None) -> Survey:
    how = (settings.min_repetitions, host.ignored, host.wraps, host.plain, host.traceable)
    return (surveys or KeptSurveys()).find(model, how, lambda: survey(model, *how))


def make_compiled_layers(
    model: torch.nn.Module,
    found: Survey,
    settings: CompileSettings,
    host: Host,
    cache: GraphCache = shared,
    lease: Lease | None = None,
    surveys: KeptSurveys | None = None,
) -> dict[torch.nn.Module, Layer]:
    """A stand-in for every block found, and a layer around the model that tells them of its calls. lease: of the run,
    which keeps its graphs in the cache."""

    def make(region: Region, of: Survey, outside: Outside = nullcontext) -> BlockRunner:
        try:
            source = host.weights(region)
        except host.interrupts:
            raise
        except Exception as error:  # layers of extensions may lack what the host's own have
            raise RunEagerly(Reason("weights_not_taken", error=one_line(error))) from error
        run = BlocksRun(
            cache=cache,
            settings=settings,
            lease=lease,
            interrupts=host.interrupts,
            ask=host.ask,
            kind_unchanged=functools.partial(code.kind_unchanged, of),
            make=functools.partial(make, of=of),
        )
        runner = BlockRunner if region.wrapped is None else WrappedRunner
        return runner(region, run, host.simplifier(region), source, outside)

    tell_compilers()
    survey_now = functools.partial(_survey, model, settings, host, surveys)
    code = CurrentCode(model, found, survey_now, make, host.interrupts, host.between)
    layers: dict[torch.nn.Module, Layer] = {model: code}
    outside = host.outside_recording() or nullcontext
    for region in found.regions:
        try:
            layers[region.block] = runner = make(region, found, outside)
        except RunEagerly as refusal:
            fallbacks.note(region.kind.name, refusal.reason)
            continue
        code.place(region, runner)
    return layers
