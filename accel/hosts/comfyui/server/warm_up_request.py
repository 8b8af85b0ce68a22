"""The request of `POST /accel/warm_up`, validated, and as a prompt of core's and this pack's nodes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....compile.registry import BACKENDS, DEFAULT
from ..models.warm_up import LARGEST_BATCH, LONGEST_PROMPT, MOST, check_amount
from ..sizes.size_text import parse_numbers, parse_sizes

MOST_SIZES, LONGEST_NAME = 64, 1024


class Refused(Exception):
    """The request is invalid or cannot be served; the message is one sentence that says what is valid."""

    def __init__(self, sentence: str, status: int = 400):
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class WarmUpRequest:
    """The checkpoint to run and at which sizes, as text in the node's format.

    client_id: of the WebSocket that gets progress messages; None for none.
    """

    checkpoint: str
    sizes: str
    batches: str
    prompt_lengths: str
    backend: str
    client_id: str | None = None

    def graph(self) -> dict[str, dict[str, Any]]:
        """The prompt in ComfyUI's API format, different each time: ComfyUI does not run an equal one again."""
        words = secrets.token_hex(4)
        return {
            "checkpoint": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": self.checkpoint}},
            "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["checkpoint", 1], "text": words}},
            "model": {
                "class_type": "AccelModel",
                "inputs": {
                    "model": ["checkpoint", 0],
                    "shapes": "any size",
                    "backend": self.backend,
                    "on_trouble": "run eagerly",
                },
            },
            "warm_up": {
                "class_type": "AccelWarmUpGraphs",
                "inputs": {
                    "model": ["model", 0],
                    "conditioning": ["text", 0],
                    "sizes": self.sizes,
                    "batches": self.batches,
                    "prompt_lengths": self.prompt_lengths,
                },
            },
            "report": {"class_type": "PreviewAny", "inputs": {"source": ["warm_up", 1]}},
        }


def read(body: Any, checkpoints: Callable[[], Sequence[str]]) -> WarmUpRequest:
    """The request in a JSON body: {"checkpoint", "sizes": ["1024x1024"], "batches": [1], "prompt_lengths": [77], ...}.

    checkpoints: the names that ComfyUI knows; nothing else is ever looked for on the disk.

    Raises Refused: something in it is missing, of a wrong type, or out of range.
    """
    if not isinstance(body, dict):
        raise Refused("The body must be a JSON object.")
    known = {"checkpoint", "sizes", "batches", "prompt_lengths", "backend", "client_id"}
    unknown = sorted(set(body) - known)
    if unknown:
        raise Refused(f"{_short(unknown[0])} is unknown; the fields are {', '.join(sorted(known))}.")
    checkpoint = _text(body, "checkpoint")
    sizes = _list(body, "sizes", str, 'strings such as "1024x1024"')
    batches = _list(body, "batches", int, "whole numbers", default=[1])
    lengths = _list(body, "prompt_lengths", int, "whole numbers", default=[])
    if not sizes or not batches:
        raise Refused("Name at least one size and one batch.")
    if len(sizes) > MOST_SIZES:
        raise Refused(f"{len(sizes)} sizes are too many: at most {MOST_SIZES} are allowed at once.")
    given = [", ".join(map(str, values)) for values in (sizes, batches, lengths)]
    try:
        parsed = parse_sizes(given[0])
        if len(parsed) != len(sizes):
            raise ValueError("Each entry of sizes must be one size, as in 720x960.")
        numbers = parse_numbers(given[1], "batches", LARGEST_BATCH)
        check_amount(parsed, numbers, parse_numbers(given[2], "prompt lengths", LONGEST_PROMPT))
    except ValueError as error:
        raise Refused(str(error)) from None
    backend = _text(body, "backend", DEFAULT)
    if backend not in BACKENDS:
        raise Refused(f"backend must be one of: {', '.join(BACKENDS)}.")
    client_id = _text(body, "client_id") if "client_id" in body else None
    if checkpoint not in checkpoints():
        raise Refused(f"There is no checkpoint {_short(checkpoint)}; GET /models/checkpoints lists them.", 404)
    return WarmUpRequest(checkpoint, *given, backend, client_id)


def _text(body: dict, name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise Refused(f"{name} must be a text of 1 to {LONGEST_NAME} characters.")
    return value


def _list(body: dict, name: str, kind: type, what: str, default: list | None = None) -> list:
    value = body.get(name, default)
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise Refused(f"{name} must be a list of {what}.")
    if len(value) > MOST or any(len(str(item)) > 32 for item in value):
        raise Refused(f"{name} must have at most {MOST} entries, each of at most 32 characters.")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
