"""What a replica has run and counted, and what a front knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

MET = {True: "met", False: "not_met", None: "without_key"}
"""What `Keys.met` says of a request → the front's count of it."""

ENOUGH = 256
"""Keys of a replica whose graphs serve every size."""


class Keys:
    """The keys that a replica has run: Serve keeps them, the least recently used go first, and tells the router.

    most: keys that a replica's graphs and captured calls are kept of.
    """

    def __init__(self, most: int):
        self._key = serve.multiplexed(_Key.new, max_num_models_per_replica=most)

    async def met(self, key: str) -> bool | None:
        """Whether this replica has run the key before, and still counts it; from now on it has. None without a key."""
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
    """What each replica said last; of no more than there are, since Serve does not say which has ended for good."""

    def __init__(self, most: int):
        self.most = most
        self._by_name: dict[str, dict[str, Any]] = {}

    @property
    def known(self) -> list[dict[str, Any]]:
        return list(self._by_name.values())

    def heard(self, said: dict[str, Any]) -> None:
        """Add what it said to its state; beyond the number, the replica that was silent longest has no state."""
        self._by_name[said["replica"]] = {**self._by_name.pop(said["replica"], {}), **said}
        if len(self._by_name) > self.most:
            del self._by_name[next(iter(self._by_name))]

    def forget(self, name: str) -> None:
        self._by_name.pop(name, None)


def counted(cache: Mapping[str, Any], store: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a replica tells of its graphs. cache, store: `statistics` of the engine's."""
    counts = {name: cache[name] for name in ("compilations", "loaded", "captures", "bytes")}
    return {**counts, "store": {name: (store or {}).get(name) for name in ("loaded", "saved")}}
