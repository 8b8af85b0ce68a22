"""The arguments that call a diffusers pipeline of any class for images of a given size, from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

PROMPT = "a photograph"

STRENGTH = 0.5
"""Strength for image-to-image; at 1 some pipelines skip encoding the image."""

VIDEO_FRAMES = 9
"""Frames of an input video; of the forms 8 n + 1 and 4 n + 1, as video models require."""

GIVEN_OTHERWISE = {
    "height": "sizes",
    "width": "sizes",
    "num_images_per_prompt": "batches",
    "num_videos_per_prompt": "batches",
    "generator": None,
    "latents": None,
}
"""Pipeline arguments that warm_up does not take → its argument for the same; None if it makes its own."""


def arguments_for(
    pipe: Any, width: int, height: int, batch: int, given: Mapping[str, Any], decode: bool
) -> dict[str, Any]:
    """Arguments for `batch` images of this size, in pixels, in the fewest steps that run everything.

    given: the caller's arguments, which take precedence. decode: the VAE's decoder has to run.

    Input images are black, masks white. There is no generator among the arguments.

    Raises ValueError: the pipeline needs something that cannot be made here; the message names it.
    """
    names = _parameters(pipe)
    check(pipe, given)
    made: dict[str, Any] = {}

    def offer(name: str | None, value: Any) -> bool:
        taken = name in names and name not in given
        if taken:
            made[name] = value
        return taken

    _offer_prompt(pipe, names, given, offer)
    per_prompt = next((name for name in names if name.startswith("num_") and name.endswith("_per_prompt")), None)
    features = {name: value for name, value in given.items() if "prompt" in name and _is_tensors(value)}
    if features and not any(name.startswith("ip_adapter") for name in given):
        # Some pipelines fail to repeat features for several images per prompt; all accept features for each image.
        given = {**given, **{name: _repeated(value, batch) for name, value in features.items()}}
    elif not offer(per_prompt, batch) and not offer("batch_size", batch) and batch > 1:
        if "prompt" not in made:
            raise ValueError(f"{_class(pipe)} makes one image of each prompt: warm it up at batches=(1,).")
        made["prompt"] = [PROMPT] * batch
    offer("height", height)
    offer("width", width)
    _offer_images(pipe, width, height, offer)
    offer("strength", STRENGTH)
    offer("num_inference_steps", _fewest_steps(pipe, {**made, **given}.get("strength")))
    offer("output_type", "pt" if decode else "latent")
    missing = [
        name
        for name, parameter in names.items()
        if parameter.default is inspect.Parameter.empty and name not in made and name not in given
    ]
    if missing:
        raise ValueError(_please_pass(pipe, missing))
    return {**made, **given}


def check(pipe: Any, given: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that the pipeline does not have, or that `warm_up` takes in another way."""
    names = _parameters(pipe)
    for name in given:
        if name in GIVEN_OTHERWISE:
            instead = GIVEN_OTHERWISE[name]
            says = f"{instead}=... says it here" if instead else "the warm-up makes its own and leaves yours alone"
            raise ValueError(f"warm_up takes no {name}: {says}.")
        if name not in names:
            raise ValueError(f"{_class(pipe)} has no argument {name}; it has {', '.join(names)}.")


def _parameters(pipe: Any) -> dict[str, inspect.Parameter]:
    """The named parameters of the pipeline's call."""
    parameters = inspect.signature(pipe.__call__).parameters
    return {name: one for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}


def _is_tensors(value: Any) -> bool:
    """Whether the value is features: [B, ...], or a list with one tensor per prompt."""
    several = value if isinstance(value, list) else [value]
    return bool(several) and all(isinstance(one, torch.Tensor) for one in several)


def _repeated(features: Any, times: int) -> Any:
    """The features of all prompts, repeated."""
    return features * times if isinstance(features, list) else torch.cat([features] * times)


def _offer_prompt(pipe, names, given, offer) -> None:
    if "prompt" not in names or any(name.startswith("prompt") for name in given):
        return
    if any(name.startswith("text_encoder") and part is not None for name, part in pipe.components.items()):
        offer("prompt", PROMPT)
        return
    embeds = [name for name in names if "prompt_embeds" in name]
    raise ValueError(f"It has no text encoder. {_please_pass(pipe, embeds or ['prompt'])}")


def _offer_images(pipe, width, height, offer) -> None:
    import PIL.Image  # diffusers needs it too

    blank = PIL.Image.new("RGB", (width, height))
    nets = getattr(getattr(pipe, "controlnet", None), "nets", None)  # a MultiControlNet takes one image each
    control = blank if nets is None else [blank] * len(nets)
    # If the pipeline starts from an image, that is "image", and the ControlNet's is "control_image".
    offer("image", blank if offer("control_image", control) or "strength" in _parameters(pipe) else control)
    offer("mask_image", PIL.Image.new("L", (width, height), 255))
    offer("video", [blank] * VIDEO_FRAMES)


def _fewest_steps(pipe: Any, strength: Any) -> int:
    """The fewest that run every model; image-to-image skips the first 1 - strength of them."""
    needed = 1 if getattr(pipe, "transformer_2", None) is None else 2  # one for each half of the schedule
    if getattr(getattr(getattr(pipe, "scheduler", None), "config", None), "skip_prk_steps", True) is False:
        needed = 4  # PNDM's Runge-Kutta start
    steps = needed
    if isinstance(strength, (int, float)) and 0 < strength <= 1:
        while int(steps * strength) < needed:
            steps += 1
    return steps


def _please_pass(pipe: Any, names: list[str]) -> str:
    example = ", ".join(f"{name}=..." for name in names)
    return f"{_class(pipe)} needs {' and '.join(names)}: pass it as to the pipeline, warm_up(pipe, {example})."


def _class(pipe: Any) -> str:
    return type(pipe).__name__
