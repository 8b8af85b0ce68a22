"""Every event of the engine as a line in the log, with the key it is about and, for what is compiled, the reason."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from ..cache.entry import id_of
from ..cache.graph_cache import shared
from ..core.events import log, subscribe

_KEYED = {"graph_hit": "hit", "graph_loaded": "loaded", "compile_start": "miss, compiling", "compile_end": "compiled"}

_stop: Callable[[], None] | None = None


def listen(is_on: bool) -> None:
    """From now on log events, or no longer."""
    global _stop
    if is_on and _stop is None:
        _stop = subscribe(_hear)
    elif not is_on and _stop is not None:
        _stop()
        _stop = None


def _hear(name: str, data: dict[str, Any]) -> None:
    key = data.get("key")
    seconds = f" in {data['seconds']:.3f} s" if isinstance(data.get("seconds"), float) else ""
    if name == "compile_failed":
        log.debug("%s %s: not compiled%s: %s", data["name"], id_of(key), seconds, data["reason"])
    elif name in _KEYED:
        why = f": {why_missed(key, shared.keys())}" if name == "compile_start" else ""
        log.debug("%s %s: %s%s%s", data["name"], id_of(key), _KEYED[name], seconds, why)
        if name != "graph_hit":
            log.debug("key %s: %r", id_of(key), key)
    else:
        log.debug("%s: %s", name, ", ".join(f"{field} {value}" for field, value in data.items() if field != "lease"))


def why_missed(key: Hashable, others: Iterable[Hashable]) -> str:
    """What tells a `GraphKey` from the one nearest to it in the cache, in words."""
    if not is_dataclass(key):
        return "nothing is known under this key"
    alike = [other for other in others if type(other) is type(key) and other != key and _name(other) == _name(key)]
    if not alike:
        return "it is the first of its kind" if key not in set(others) else "its graphs do not fit this call"
    differences = min((_differences(key, other) for other in alike), key=len)
    return f"the nearest of {len(alike)} others of this name differs in {'; '.join(differences)}"


def _name(key: Any) -> str:
    return getattr(getattr(key, "kind", None), "name", "")


def _differences(key: Any, other: Any) -> list[str]:
    """Of two keys, by field; with the values where these are short."""
    found = []
    for field in fields(key):
        one, two = getattr(key, field.name), getattr(other, field.name)
        if one == two:
            continue
        if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
            place = next(index for index, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
            values = f"{_short(two[place])} there, {_short(one[place])} here"
            found.append(f"{field.name}[{place}] ({values})")
        else:
            found.append(field.name)
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
