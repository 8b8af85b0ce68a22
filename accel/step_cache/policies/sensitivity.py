"""What an error of the deep feature does to the prediction, by noise level, as earlier runs showed it.

It is the model's rather than the image's: on the trained networks images differ by 1 to 5 dB, noise levels by 10 to 20.
So once a few runs have compared, later ones need not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from ...core.atomic_file import opened, write_whole
from ...core.events import log

NAME = "sensitivity.json"
"""Of the file, in an installation's home."""

BIN = 0.1
"""Radians of the noise level (`step_schedule.angle`) that are one place."""

NEAR = 2
"""Places on either side that tell about one."""

ENOUGH = 4
"""Comparisons near a noise level after which none is needed there. Each further run would change the next image."""

_MOST_KEYS = 256
_LARGEST_FILE = 1 << 20

Known = Mapping[int, tuple[int, float]]
"""Place → how many comparisons were made there, and the mean logarithm of what they showed."""


class Sensitivity:
    """The ratio of the prediction's error, as a share of the latent's range, to the feature's, root mean squares."""

    def __init__(self, known: Known | None = None):
        self._known = dict(known or {})
        self._shift = 0.0
        """Of the image at hand over the others, as the newest comparison showed it: logarithm."""

    def __bool__(self) -> bool:
        return bool(self._known)

    def is_sure(self, angle: float) -> bool:
        """Whether enough comparisons were made near this noise level."""
        place = _place(angle)
        return sum(count for other, (count, _) in self._known.items() if abs(other - place) <= NEAR) >= ENOUGH

    def at(self, angle: float) -> float | None:
        """The ratio at this noise level for the image at hand; None where nothing is known near it or below."""
        mean = self._mean(angle)
        return None if mean is None else math.exp(mean + self._shift)

    def _mean(self, angle: float) -> float | None:
        """Between the places that are known, or as at the lowest below it. Above the highest it may be many times as
        large."""
        places, at = sorted(self._known), angle / BIN
        if not places or _place(angle) > places[-1] + NEAR:
            return None
        low = max((place for place in places if place <= at), default=places[0])
        high = min((place for place in places if place >= at), default=places[-1])
        share = (at - low) / (high - low) if high > low else 0.0
        return (1 - share) * self._known[low][1] + share * self._known[high][1]

    def learn(self, angle: float, ratio: float) -> None:
        """Take in what a comparison at this noise level showed of the image at hand."""
        if not self.is_sure(angle):
            place = _place(angle)
            count, mean = self._known.get(place, (0, 0.0))
            self._known[place] = count + 1, mean + (math.log(ratio) - mean) / (count + 1)
        self._shift = math.log(ratio) - self._mean(angle)

    def as_known(self) -> dict[int, tuple[int, float]]:
        return dict(self._known)


class Learnt:
    """The sensitivities of models, each by a key, kept in a file; in memory alone where it cannot be written."""

    def __init__(self, file: Path):
        self._file: Path | None = file
        self._lock = threading.Lock()
        self._known: dict[str, dict[int, tuple[int, float]]] | None = None

    def of(self, key: str) -> Sensitivity:
        """What is known of this model now, for a run to add to."""
        with self._lock:
            return Sensitivity(self._loaded().get(key))

    def add(self, key: str, lessons: Iterable[tuple[float, float]]) -> None:
        """Keep what a run's comparisons showed: the noise level and the ratio of each."""
        with self._lock:
            if self._file is not None:
                self._known = None  # another process may have learnt meanwhile
            known = self._loaded()
            newest, before = next(reversed(known), None), known.pop(key, None)
            now = Sensitivity(before)
            for lesson in lessons:
                now.learn(*lesson)
            known[key] = now.as_known()
            if known[key] == before and key == newest:
                return
            while len(known) > _MOST_KEYS:
                del known[next(iter(known))]
            if self._file is not None:
                try:
                    write_whole(self._file, json.dumps(known).encode())
                except OSError as error:
                    self._file = None
                    log.debug("What qualities learn is kept in memory alone: %s", error)

    def _loaded(self) -> dict[str, dict[int, tuple[int, float]]]:
        if self._known is None:
            self._known = {} if self._file is None else _read(self._file)
        return self._known


@functools.lru_cache(maxsize=4)
def learnt_in(home: Path) -> Learnt:
    """What the installation with this home has learnt."""
    return Learnt(home / NAME)


def key_of(model: torch.nn.Module, *facts: Hashable) -> str:
    """Of what a run of this model learns. facts: what else decides it."""
    digest = hashlib.sha256(repr((_mark(model), *facts)).encode()).hexdigest()[:16]
    return f"{type(model).__module__}.{type(model).__qualname__} {digest}"


_marks: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()


def _mark(model: torch.nn.Module) -> str:
    """What tells models of a class apart: one small weight, which is read once."""
    if model not in _marks:
        _marks[model] = ""
        try:
            small = (weight for weight in model.parameters() if _is_small(weight))
            if (weight := next(small, None)) is not None:
                _marks[model] = hashlib.sha256(weight.detach().float().cpu().numpy().tobytes()).hexdigest()
        except Exception as error:  # somebody's own tensor, or memory that the host moves
            log.debug("What qualities learn is of the model's class alone: %s", error)
    return _marks[model]


def _is_small(weight: torch.nn.Parameter) -> bool:
    is_plain = type(weight.data) is torch.Tensor and weight.is_floating_point() and not weight.is_meta
    return is_plain and weight.ndim == 1 and weight.numel() > 1


def _place(angle: float) -> int:
    return round(angle / BIN)


def _read(file: Path) -> dict[str, dict[int, tuple[int, float]]]:
    """What the file holds that makes sense; nothing where it cannot be read."""
    try:
        with opened(file) as (found, _):
            known = json.loads(found.read(_LARGEST_FILE))
        return {key: _checked(places) for key, places in known.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as error:
        log.debug("What qualities have learnt cannot be read: %s", error)
        return {}


def _checked(places: Mapping[str, Sequence[float]]) -> dict[int, tuple[int, float]]:
    read = ((int(place), int(count), float(mean)) for place, (count, mean) in places.items())
    last = _place(math.pi / 2)
    return {p: (count, mean) for p, count, mean in read if 0 <= p <= last and count > 0 and abs(mean) < 100}
