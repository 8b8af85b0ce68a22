"""One model call under DeepCache, in any host: skipped, full with its features stored, or plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..core.errors import one_line
from ..core.events import log
from ..modules.substitution import Layer, Order, Outside, outside_recording, substituted
from .capture_io import FeaturesProxy
from .features import BranchKey, Features, OfRun, OutdatedFeature


def cached_call(
    features: Features,
    keys: Sequence[BranchKey] | None,
    full: Callable[[], Any],
    skipped: Callable[[], Any],
    interrupts: tuple[type[BaseException], ...],
    capture: Callable[[FeaturesProxy], AbstractContextManager] | None = None,
    outside: Outside | None = None,
    this_thread_only: bool = False,
    clean_up: Callable[[], None] = lambda: None,
) -> Any:
    """The model's output; counts the call in its run.

    keys: the call's branches; None for a call that must be plain. full: calls the model with the given arguments.
    skipped: calls it without what `split.withhold` removes. interrupts: exceptions that the host handles; any other in
    a skipped call ends skipping for the rest of the run, and this call is made plainly. So does lack of memory in any
    call while features are kept: they are given back first. `full` may be called twice. capture: a context around calls
    that may be replayed from a CUDA graph; it learns what they exchange with the run. outside: the host's context for
    the split's own work. this_thread_only: other threads may be calling the same model. clean_up: called before
    a call that ran out of memory is made again.
    """
    if keys is not None:
        try:
            return _stored_or_skipped(features, keys, full, skipped, interrupts, capture, outside, this_thread_only)
        except torch.OutOfMemoryError:
            if not features.run.bytes:
                raise
        # Outside the handler, whose exception would keep what the call had made.
        features.run.give_back()
        clean_up()
    return _counted(features.run, full)


def with_own_lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with copies of the lists in it: models take entries off those that they are given, and `full` may be
    called twice."""
    return {name: list(value) if isinstance(value, list) else value for name, value in given.items()}


def _counted(run: OfRun, full: Callable[[], Any]) -> Any:
    out = full()
    run.count(skipped=False)
    return out


def _stored_or_skipped(
    features: Features,
    keys: Sequence[BranchKey],
    full: Callable[[], Any],
    skipped: Callable[[], Any],
    interrupts: tuple[type[BaseException], ...],
    capture: Callable[[FeaturesProxy], AbstractContextManager] | None,
    outside: Outside | None,
    this_thread_only: bool,
) -> Any:
    within, run, split = capture or nullcontext, features.run, features.split

    def placed(layers: Mapping[torch.nn.Module, Layer]) -> AbstractContextManager:
        if outside is not None:
            layers = {module: outside_recording(layer, outside) for module, layer in layers.items()}
        return substituted(layers, Order.CACHED, this_thread_only)

    if features.can_skip(keys):
        try:
            proxy = FeaturesProxy(features, keys, skips=True)
            with placed(split.skip_layers(proxy, keys)), within(proxy):
                out = skipped()
            split.check_done()
            run.count(skipped=True)
            return out
        except OutdatedFeature as error:
            log.debug("DeepCache: a feature is out of date: %s", error)
        except (torch.OutOfMemoryError, *interrupts):
            raise
        except Exception as error:
            run.run_in_full(f"a skipped step failed ({one_line(error)})", error)
            return _counted(run, full)
    proxy = FeaturesProxy(features, keys, skips=False)
    with placed(split.full_layers(proxy, keys)), within(proxy):
        return _counted(run, full)
