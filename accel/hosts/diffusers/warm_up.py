"""Warm-up: call a diffusers pipeline at given sizes, so that compiling is done before the first real image."""

from __future__ import annotations

import operator
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from ...core.events import log, subscribe
from ...core.sentences import counted
from . import pipeline_call
from .component_call import call_of
from .components import components


@dataclass
class WarmUp:
    """What a warm-up did; `str` gives a one-line summary.

    runs: (width, height, images at once) of each call, sizes in pixels. seconds: of all calls. compiled, loaded: names
    of kinds of blocks whose graph was compiled, or read from the graph store. failed: of those that run eagerly.
    """

    runs: list[tuple[int, int, int]] = field(default_factory=list)
    seconds: float = 0.0
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        uncompiled = f", {len(self.failed)} not possible" if self.failed else ""
        return (
            f"Warm-up: {counted(len(self.compiled), 'graph')} compiled, {len(self.loaded)} loaded{uncompiled}, "
            f"in {counted(len(self.runs), 'run')} and {self.seconds:.1f} s."
        )


def warm_up(
    pipe: Any, sizes: Sequence[tuple[int, int]] = ((1024, 1024),), batches: Sequence[int] = (1,), **call_arguments: Any
) -> WarmUp:
    """Call an accelerated pipeline once at every combination of size and batch, in the fewest steps that run it all.

    sizes: (width, height) pairs in pixels, in the order of ComfyUI and PIL, not in that of diffusers' arguments.
    batches: images per prompt made at once (`num_images_per_prompt`, `num_videos_per_prompt`).
    call_arguments: arguments of the pipeline. Pass those that affect shapes: `num_frames`, `max_sequence_length`, a
        `guidance_scale` without guidance; and those that cannot be made up, such as `prompt_embeds` if there is no
        text encoder. Input images, masks and ControlNet images are made up.

    The results are discarded. The pipeline is left unchanged even on errors: its schedulers (copies of them run), its
    attributes and settings, and all random states. tqdm shows the progress, if it is installed and the pipeline's own
    progress bar is not disabled.

    Raises:
        ValueError: the pipeline is not accelerated; an invalid size or batch, or one that the pipeline refuses; a
            missing or unknown argument. The message says what to pass.
    """
    decode = any(name.endswith(".decoder") for name in _accelerated(pipe))
    calls = _calls(sizes, batches)
    pipeline_call.check(pipe, call_arguments)
    done = WarmUp()
    with _bar(pipe, len(calls)) as show, _untouched(pipe), _noting(done):
        for width, height, batch in calls:
            show(f"{width}x{height}, batch {batch}", step=0)
            arguments = pipeline_call.arguments_for(pipe, width, height, batch, call_arguments, decode)
            started = time.perf_counter()
            try:
                pipe(**arguments, generator=torch.Generator().manual_seed(0))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{type(pipe).__name__} cannot be called at {width}x{height} (width x height), batch {batch}: "
                    f"{error} What it needs beside the size can be passed to warm_up, as to the pipeline."
                ) from error
            done.seconds += time.perf_counter() - started
            done.runs.append((width, height, batch))
            show(f"{counted(len(done.compiled), 'graph')} compiled", step=1)
    log.info("%s", done)
    return done


def _accelerated(pipe: Any) -> list[str]:
    """The names of the accelerated components. Raises ValueError if there are none."""
    found = [name for name, part in components(pipe).items() if call_of(part) is not None]
    if not found:
        raise ValueError(f"Nothing of this {type(pipe).__name__} is accelerated: call accelerate_pipeline(pipe) first.")
    return found


def _calls(sizes: Any, batches: Any) -> list[tuple[int, int, int]]:
    """Every (width, height, batch), once each. Raises ValueError, with an example, for invalid ones."""

    def whole(value: Any) -> int | None:
        try:
            number = operator.index(value)
        except TypeError:
            return None
        return number if number > 0 and not isinstance(value, bool) else None

    try:
        pairs = [tuple(whole(side) for side in size) for size in sizes]
    except TypeError:
        pairs = []
    if not pairs or any(len(pair) != 2 or None in pair for pair in pairs):
        raise ValueError(
            f"sizes is {sizes!r}: it takes (width, height) pairs of whole pixels, 1 or more, as in [(1024, 1024)]."
        )
    try:
        numbers = [whole(batch) for batch in batches]
    except TypeError:
        numbers = []
    if not numbers or None in numbers:
        raise ValueError(f"batches is {batches!r}: it takes whole numbers, 1 or more, as in (1, 2).")
    return list(dict.fromkeys((*pair, batch) for pair in pairs for batch in numbers))


@contextmanager
def _noting(done: WarmUp) -> Iterator[None]:
    """Add the names of the kinds that this thread compiles and loads."""
    thread = get_ident()
    lists = {"compile_end": done.compiled, "graph_loaded": done.loaded, "compile_failed": done.failed}

    def note(event: str, data: dict[str, Any]) -> None:
        if event in lists and get_ident() == thread:
            lists[event].append(data["name"])

    unsubscribe = subscribe(note)
    try:
        yield
    finally:
        unsubscribe()


@contextmanager
def _untouched(pipe: Any) -> Iterator[None]:
    """Run copies of the pipeline's schedulers without progress bars; restore everything on exit."""
    with ExitStack() as undo:
        undo.enter_context(_random_states())
        undo.callback(_restore_attributes, pipe, dict(vars(pipe)))
        undo.callback(pipe.maybe_free_model_hooks)  # which the pipeline itself does only after a complete image
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                undo.callback(_restore_dtype, part, getattr(part, "dtype", None))
        for name, part in pipe.components.items():
            if hasattr(part, "set_timesteps"):
                setattr(pipe, name, deepcopy(part))
        pipe._progress_bar_config = {**getattr(pipe, "_progress_bar_config", {}), "disable": True}
        yield


def _restore_attributes(pipe: Any, attributes: dict[str, Any]) -> None:
    now = vars(pipe)
    for name in set(now) - set(attributes):
        del now[name]
    # setattr would change the pipeline's configuration. Offloading hooks have been replaced since.
    now.update({name: value for name, value in attributes.items() if name != "_all_hooks"})


def _restore_dtype(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Undo the cast of a VAE by pipelines that decode in float32 and were interrupted."""
    if dtype is not None and model.dtype != dtype:
        model.to(dtype)


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore the state of torch's, Python's and NumPy's global generators on exit."""
    numpy = sys.modules.get("numpy")
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        undo.callback(random.setstate, random.getstate())
        if numpy is not None:
            undo.callback(numpy.random.set_state, numpy.random.get_state())
        yield


@contextmanager
def _bar(pipe: Any, total: int):
    """A function that shows (text, finished runs) on a progress bar, if tqdm is installed and bars are not disabled."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda text, step: None
        return
    settings = {"desc": "warm-up", "unit": "run", **getattr(pipe, "_progress_bar_config", {}), "total": total}
    with tqdm(**settings) as bar:

        def show(text: str, step: int) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(step)
            bar.refresh()

        yield show
