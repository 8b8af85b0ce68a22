"""One call of a model under DeepCache, the same in every host: skipped, in full and remembered, or plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..core.events import log
from ..modules.substitution import Order, substituted
from .capture_io import Taps
from .run import BranchKey, DeepCacheRun
from .unet_split import OutdatedFeature


def cached_call(
    run: DeepCacheRun,
    boundary: Any,
    keys: Sequence[BranchKey] | None,
    full: Callable[[], Any],
    skipped: Callable[[], Any],
    must_pass: Callable[[Exception], bool],
    recorded: Callable[[Taps], AbstractContextManager] | None = None,
) -> Any:
    """The model's output, and the call counted in its run.

    keys: the call's streams; None for a call that must be plain. full: makes the call as it was asked for.
    skipped: makes it without what `boundary.withhold` leaves out. must_pass: tells the exceptions that are
    the host's to handle; any other ends skipping for the rest of the run, and this call is made plainly.
    recorded: where the call may be a recorded one, tells whoever replays it, for its length, of what it exchanges
    with the run.
    """
    within = recorded or nullcontext
    if keys is not None and run.can_skip(keys):
        try:
            taps = Taps(run, boundary, keys, skips=True)
            with substituted(boundary.skipping(taps, keys), Order.CACHED), within(taps):
                out = skipped()
            run.count(skipped=True)
            return out
        except OutdatedFeature as error:
            log.debug("DeepCache: a feature is out of date: %s", error)
        except Exception as error:
            if must_pass(error):
                raise
            run.failed, keys = True, None
            log.warning("DeepCache: a skipped step failed (%s); the rest of this run is computed in full.", error)
            log.debug("DeepCache: where it failed", exc_info=True)
    if keys is None:
        out = full()
    else:
        taps = Taps(run, boundary, keys, skips=False)
        with substituted(boundary.recording(taps, keys), Order.CACHED), within(taps):
            out = full()
    run.count(skipped=False)
    return out
