"""Counters of replicas, and what the front knows about each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

MET = {True: "met", False: "not_met", None: "without_key"}
"""Result of `Keys.met` → the name of the front's counter."""

MOST_KEYS = 256
"""Beyond these a replica forgets the key that it used least recently."""


class Keys:
    """The keys that a replica has run: Serve keeps them as model ids for the router."""

    def __init__(self) -> None:
        self._key = serve.multiplexed(_Key.new, max_num_models_per_replica=MOST_KEYS)

    async def met(self, key: str) -> bool | None:
        """Whether this replica has run the key before and still holds it; from now on it does. None without a key."""
        return (await self._key(key)).use() if key else None


class _Key:
    def __init__(self) -> None:
        self._used = False

    @staticmethod
    async def new(key: str) -> _Key:
        return _Key()

    def use(self) -> bool:
        used, self._used = self._used, True
        return used


class States:
    """The latest state of each replica, limited to `most`, since Serve does not tell which ones are gone for good."""

    def __init__(self, most: int):
        self.most = most
        self._by_name: dict[str, dict[str, Any]] = {}

    @property
    def known(self) -> list[dict[str, Any]]:
        return list(self._by_name.values())

    def heard(self, said: dict[str, Any]) -> None:
        """Merge a report into its replica's state; beyond `most`, the replica silent for longest is dropped."""
        self._by_name[said["replica"]] = {**self._by_name.pop(said["replica"], {}), **said}
        if len(self._by_name) > self.most:
            del self._by_name[next(iter(self._by_name))]

    def forget(self, name: str) -> None:
        self._by_name.pop(name, None)


def counted(cache: Mapping[str, Any], store: Mapping[str, Any] | None) -> dict[str, Any]:
    """A replica's graph counters. cache, store: `statistics` of the engine's graph cache and store."""
    counts = {name: cache[name] for name in ("compilations", "loaded", "captures", "bytes")}
    return {**counts, "store": {name: (store or {}).get(name) for name in ("loaded", "saved")}}
