"""The stand-ins for one model's blocks, for any host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache.entry import Lease
from ..cache.graph_cache import GraphCache, shared
from ..core.compile_settings import CompileSettings
from ..core.events import emit, log
from ..fingerprint.survey import Region, Survey, survey
from ..modules.substitution import Layer
from ..modules.wrapped_layers import Wraps
from .batch_dry_run import BatchDryRun
from .block_runner import BlockRunner

Simplify = Callable[[dict], dict]


@dataclass(frozen=True)
class Host:
    """What the engine needs from the program that calls the model.

    ignored: as for `CodeReader`. interrupts: exceptions that mean "stop the run", never swallowed.
    simplifier: for a block, what a dict among its arguments is replaced by (`BlockRunner`'s simplify_options).
    without_hooks: what a dict among the model's arguments is replaced by where nobody's code may run (`BatchDryRun`).
    wraps: recognises the host's wrappers around layers, such as LoRA.
    """

    ignored: frozenset[tuple[str, str]] = frozenset()
    interrupts: tuple[type[BaseException], ...] = ()
    simplifier: Callable[[Region], Simplify | None] = lambda region: None
    without_hooks: Simplify = dict
    wraps: Wraps | None = None


def survey_model(model: torch.nn.Module, settings: CompileSettings, host: Host) -> Survey:
    """Survey the model's blocks as they are now; emits "survey" and logs what stays eager."""
    found = survey(model, settings.min_repetitions, host.ignored, host.wraps)
    for path, reason in found.left_eager:
        log.debug("%s stays eager: %s", path, reason)
    emit(
        "survey",
        model=type(model).__name__,
        blocks=len(found.regions),
        kinds=len(found.kinds),
        left_eager=found.left_eager,
    )
    return found


def compiled_layers(
    model: torch.nn.Module,
    found: Survey,
    settings: CompileSettings,
    host: Host,
    cache: GraphCache = shared,
    lease: Lease | None = None,
    on_shortage: Callable[[], None] = lambda: None,
) -> dict[torch.nn.Module, Layer]:
    """A stand-in for every block found, and a layer around the model that keeps the arguments of its calls.

    lease: of the run; its graphs stay in the cache while it lasts.
    on_shortage: as for `BlockRunner`.
    """
    tensors_of: dict[torch.nn.Module, Callable[[tuple], list[torch.Tensor]]] = {}
    dry_run = BatchDryRun(model, tensors_of, host.without_hooks, host.interrupts)
    layers: dict[torch.nn.Module, Layer] = {model: dry_run}
    for region in found.regions:
        runner = BlockRunner(
            region, cache, settings, host.simplifier(region), host.interrupts, dry_run, lease, on_shortage
        )
        layers[region.block] = runner
        tensors_of[region.block] = runner.tensors_of
    return layers
