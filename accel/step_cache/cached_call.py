"""One model call under DeepCache, in any host: skipped, full with its features stored, or plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..core.errors import one_line
from ..core.events import log
from ..modules.substitution import Order, Outside, outside_recording, substituted
from .capture_io import FeaturesProxy
from .features import BranchKey, Features, OutdatedFeature


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
    run, split = features.run, features.split

    @contextmanager
    def placed(skips: bool) -> Iterator[None]:
        proxy = FeaturesProxy(features, keys, skips)
        layers = (split.skip_layers if skips else split.full_layers)(proxy, keys)
        if outside is not None:
            layers = {module: outside_recording(layer, outside) for module, layer in layers.items()}
        with substituted(layers, Order.CACHED, this_thread_only), (capture or nullcontext)(proxy):
            yield

    def in_full(context: AbstractContextManager[Any]) -> Any:
        with context:
            out = full()
            run.count(skipped=False)
            return out

    try:
        if keys is not None and features.can_skip(keys):
            try:
                with placed(skips=True):
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
                keys = None
        return in_full(nullcontext() if keys is None else placed(skips=False))
    except torch.OutOfMemoryError:
        kept = run.bytes
        if not kept:
            raise
    # Outside the handler, whose exception would keep what the call had made.
    run.run_in_full(f"memory ran out while it kept {kept / (1 << 20):.0f} MB for skipped steps")
    clean_up()
    return in_full(nullcontext())


def with_own_lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with copies of the lists in it: models take entries off those that they are given, and `full` may be
    called twice."""
    return {name: list(value) if isinstance(value, list) else value for name, value in given.items()}
