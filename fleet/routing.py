"""Where a prompt goes: to the replica that has run its graphs, so that captured calls and loaded models serve again.

This is the rule alone, without Ray and without a clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeVar

MODELS = ("ckpt_name", "unet_name")
"""Inputs of loaders, core's and others', that name the diffusion model."""

SIZES = ("width", "height", "length", "batch_size")
"""Inputs of nodes that make an empty latent: pixels, frames, images at once."""

LONGEST = 300

Replica = TypeVar("Replica", bound=Hashable)


def routing_key(prompt: Any) -> str:
    """Equal for prompts that run the same graphs and captured calls, such as "sdxl.safetensors 1024x1024x1".

    Empty where the prompt does not state it: a size that another node works out, or an image to start from.

    prompt: in ComfyUI's API format; anything else gives an empty key too.
    """
    models, shapes = set(), set()
    for node in prompt.values() if isinstance(prompt, Mapping) else ():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        if not isinstance(inputs, Mapping):
            continue
        models.update(inputs[name] for name in MODELS if isinstance(inputs.get(name), str))
        if "batch_size" in inputs and "width" in inputs and "height" in inputs:
            given = [inputs[name] for name in SIZES if name in inputs]
            if not all(type(value) is int for value in given):
                return ""
            shapes.add("x".join(map(str, given)))
    if not models or not shapes:
        return ""
    key = " ".join([*sorted(models), *sorted(shapes)])[:LONGEST]
    return key.encode(errors="replace").decode()  # Serve sends it as UTF-8, and JSON may hold lone surrogates


def choose(
    key: str,
    waited: float,
    patience: float,
    ran: Mapping[Replica, Collection[str]],
    queued: Callable[[Replica], int | None],
) -> list[list[Replica]]:
    """Replicas that may take a prompt, best first: those of a later list only if no earlier one has room.

    A prompt waits for a replica that has run its key; after `patience` seconds, any idle replica may take it.

    waited: seconds since the prompt came. ran: the keys that each replica has lately run. queued: how many prompts a
    replica has; None if that is unknown.
    """
    homes = [replica for replica, keys in ran.items() if key in keys] or [_home_of_new(key, ran)]
    idle = [replica for replica in ran if not queued(replica)] if waited >= patience else []
    return [homes, idle] if idle else [homes]


def _home_of_new(key: str, ran: Mapping[Replica, Collection[str]]) -> Replica:
    """A replica with at most its share of keys, preferably one that has run the key's model.

    The same one each time, so that a burst of one key stays together before its replica has reported the key.
    """
    share = sum(map(len, ran.values())) // len(ran)
    model = _model(key)

    def rank(replica: Replica) -> tuple[bool, bool, int]:
        held = ran[replica]
        unknown = all(_model(other) != model for other in held)
        return len(held) > share, unknown, zlib.crc32(f"{key} {replica}".encode())

    return min(ran, key=rank)


def _model(key: str) -> str:
    """A key ends with the shape of the latent."""
    return key.rpartition(" ")[0]
