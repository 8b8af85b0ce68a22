"""Running a diffusers pipeline at sizes to come, so that whatever has to be compiled is, before it is waited for."""

from __future__ import annotations

import operator
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.events import log, subscribe
from . import pipeline_call
from .component_call import call_of
from .components import components


@dataclass(frozen=True)
class WarmUpRun:
    """One call of the pipeline. Pixels, images at once, seconds; names of the kinds of blocks.

    compiled, loaded: kinds that a graph was made for, or read from the graph store. failed: kinds that run uncompiled.
    """

    width: int
    height: int
    batch: int
    seconds: float
    compiled: tuple[str, ...]
    loaded: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up did, run by run; as text, one line about all of it."""

    runs: tuple[WarmUpRun, ...]

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def compiled(self) -> tuple[str, ...]:
        return tuple(name for run in self.runs for name in run.compiled)

    @property
    def loaded(self) -> tuple[str, ...]:
        return tuple(name for run in self.runs for name in run.loaded)

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(name for run in self.runs for name in run.failed)

    def __str__(self) -> str:
        uncompiled = f", {len(self.failed)} not possible" if self.failed else ""
        return (
            f"Warm-up: {len(self.compiled)} graphs compiled, {len(self.loaded)} loaded{uncompiled}, "
            f"in {len(self.runs)} runs and {self.seconds:.1f} s."
        )


def warm_up(
    pipe: Any,
    sizes: Sequence[tuple[int, int]] = ((1024, 1024),),
    batches: Sequence[int] = (1,),
    **call_arguments: Any,
) -> WarmUp:
    """Call an accelerated pipeline once at every combination of size and batch, in as few steps as run all of it.

    sizes: (width, height) pairs in pixels, as ComfyUI and PIL say them, and not as diffusers' arguments are ordered.
    batches: images made at once of each prompt (`num_images_per_prompt`, `num_videos_per_prompt`).
    call_arguments: arguments of the pipeline. Those that decide over shapes are worth passing: `num_frames`,
        `max_sequence_length`, a `guidance_scale` at which nothing is guided; and what cannot be made up, such as
        `prompt_embeds` where there is no text encoder. Images to start from, masks and ControlNets' images are made.

    The results are thrown away. The pipeline is left as it was, whatever happens: its schedulers (copies of them run),
    its attributes and settings, and all random states. Progress is shown by tqdm, where it is there and the pipeline's
    own progress bar is not turned off.

    Raises:
        ValueError: the pipeline is not accelerated; a size or batch that is none, or that the pipeline refuses;
            an argument that it needs or does not know. The message says what to pass.
    """
    decode = any(name.endswith(".decoder") for name in _accelerated(pipe))
    wanted = _runs(sizes, batches)
    pipeline_call.check(pipe, call_arguments)
    runs = []
    with _bar(pipe, len(wanted)) as show, _untouched(pipe):
        for width, height, batch in wanted:
            show(f"{width}x{height}, batch {batch}", step=0)
            arguments = pipeline_call.arguments_for(pipe, width, height, batch, call_arguments, decode)
            run = _run(pipe, width, height, batch, arguments)
            log.debug("%s", run)
            runs.append(run)
            show(f"{sum(len(run.compiled) for run in runs)} graphs compiled", step=1)
    done = WarmUp(tuple(runs))
    log.info("%s", done)
    return done


def _accelerated(pipe: Any) -> list[str]:
    """The names of the components that are; ValueError where none is."""
    found = [name for name, part in components(pipe).items() if call_of(part) is not None]
    if not found:
        raise ValueError(f"Nothing of this {type(pipe).__name__} is accelerated: call accelerate_pipeline(pipe) first.")
    return found


def _runs(sizes: Any, batches: Any) -> list[tuple[int, int, int]]:
    """Every (width, height, batch) asked for, once each."""

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


def _run(pipe: Any, width: int, height: int, batch: int, arguments: dict[str, Any]) -> WarmUpRun:
    heard = _Heard()
    unsubscribe = subscribe(heard)
    started = time.perf_counter()
    try:
        pipe(**arguments, generator=torch.Generator().manual_seed(0))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{type(pipe).__name__} cannot be called at {width}x{height} (width x height), batch {batch}: {error} "
            "What it needs beside the size can be passed to warm_up, as to the pipeline."
        ) from error
    finally:
        unsubscribe()
    seconds = time.perf_counter() - started
    return WarmUpRun(width, height, batch, seconds, *map(tuple, (heard.compiled, heard.loaded, heard.failed)))


@dataclass
class _Heard:
    """What the engine says of its graphs, in the thread that made this."""

    thread: int = field(default_factory=threading.get_ident)
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __call__(self, event: str, data: dict[str, Any]) -> None:
        kept = {"compile_end": self.compiled, "graph_loaded": self.loaded, "compile_failed": self.failed}.get(event)
        if kept is not None and threading.get_ident() == self.thread:
            kept.append(data["name"])


@contextmanager
def _untouched(pipe: Any) -> Iterator[None]:
    """While it lasts, copies of the pipeline's schedulers run, silently; afterwards all is as it was."""
    with ExitStack() as undo:
        undo.enter_context(_random_states())
        undo.callback(_restore_attributes, pipe, dict(vars(pipe)))
        undo.callback(pipe.maybe_free_model_hooks)  # as at the end of every image, where it has come that far
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
    # Not by setattr, which would write the pipeline's configuration anew. What offloads models is new by now.
    now.update({name: value for name, value in attributes.items() if name != "_all_hooks"})


def _restore_dtype(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Some pipelines decode in float32, and when they are interrupted leave the VAE so."""
    if dtype is not None and model.dtype != dtype:
        model.to(dtype)


@contextmanager
def _random_states() -> Iterator[None]:
    """While it lasts, whoever draws from torch's, Python's or NumPy's global generators changes nothing of them."""
    numpy = sys.modules.get("numpy")
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        undo.callback(random.setstate, random.getstate())
        if numpy is not None:
            undo.callback(numpy.random.set_state, numpy.random.get_state())
        yield


@contextmanager
def _bar(pipe: Any, total: int):
    """What shows (text, finished runs), on a progress bar where there is tqdm and nobody has turned bars off."""
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
