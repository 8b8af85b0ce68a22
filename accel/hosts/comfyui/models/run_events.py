"""Events of sampling runs: what begins, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ....cache.entry import Use
from ....core.events import emit, log
from .. import preferences
from ..running_prompt import get_prompt_id, steps_shown
from ..sizes.model_sizes import family_name, latent_layout
from ..sizes.shape_errors import sizes_explained
from .options import INTERRUPTS


@contextmanager
def run_events(executor: Any, arguments: Sequence[Any], key: str, **facts: Any) -> Iterator[dict[str, Any]]:
    """Emit "run_start" and "run_end" around a call of an OUTER_SAMPLE wrapper, and explain sizes that do not fit.

    Several wrappers around one sampler describe the same run together.

    arguments: of the call, core's (noise, latent_image, sampler, sigmas, ...). facts: fields of `run_record.Run`.
    Yields the transformer_options of the run; what they have under `key` is taken back at its end.
    """
    preferences.current()  # puts the log's verbosity into force
    guider = executor.class_obj
    # The guider's model_options belong to this run; core copies them, with our state by reference.
    options = guider.model_options.setdefault("transformer_options", {})
    before = {key: options[key]} if key in options else {}
    emit("run_start", owner=id(guider), **_describe_sampling(executor, arguments), **facts)
    failed, steps_done = True, None
    try:
        with sizes_explained(executor, arguments):
            yield options
        failed = False
    except INTERRUPTS:
        steps_done = steps_shown()
        raise
    finally:
        options.pop(key, None)
        options.update(before)
        share = _ask("how much of the model is loaded", lambda: _find_loaded_share(guider.model_patcher))
        emit("run_end", owner=id(guider), failed=failed, steps_done=steps_done, loaded_share=share)


def note_sampling(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """A SAMPLER_SAMPLE wrapper: emit "sampling", since the model is loaded now and its steps begin."""
    emit("sampling")
    return executor(*args, **kwargs)


def uses(executor: Any, arguments: Sequence[Any], contexts: Iterable[int]) -> tuple[Use, ...]:
    """What the run used graphs for, one entry per length of prompt; empty for an unknown kind of latent."""
    run = _describe_sampling(executor, arguments)
    if len(run["latent"]) < 3:
        return ()
    batch, _, *sizes = run["latent"]
    return tuple(Use(run["model"], tuple(sizes), batch, context) for context in tuple(contexts) or (None,))


def _ask(what: str, ask: Callable[[], Any]) -> Any:
    """What another pack's patcher or model says; None where it cannot be asked, and a hint is lost."""
    try:
        return ask()
    except Exception as error:
        log.debug("%s is not known: %s", what, error)
        return None


def _find_loaded_share(patcher: Any) -> float | None:
    """The fraction of the weights that is on the device."""
    whole = patcher.model_size()
    return patcher.loaded_size() / whole if whole else None


def _describe_sampling(executor: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    noise, _, sampler, sigmas = [*arguments, None, None, None, None][:4]
    function = getattr(sampler, "sampler_function", None)
    patcher = getattr(executor.class_obj, "model_patcher", None)
    latent = tuple(noise.shape) if isinstance(noise, torch.Tensor) else ()
    scale = _ask("the size in pixels", lambda: latent_layout(patcher).scale)  # none for sound and 3D
    return {
        "model": family_name(patcher),
        "prompt": get_prompt_id(),
        "latent": latent,
        "pixels": (latent[-1] * scale, latent[-2] * scale) if scale and len(latent) > 3 else None,
        "steps": sigmas.shape[-1] - 1 if isinstance(sigmas, torch.Tensor) and sigmas.ndim else None,
        "sampler": None if function is None else getattr(function, "__name__", "").removeprefix("sample_") or None,
    }
