"""A replica: one ComfyUI behind what Ray Serve calls: prompts, health, and the keys that it has run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray import serve

from .comfyui_process import ComfyUI, Gone
from .counts import Keys, counted
from .results import Results
from .settings import Settings

log = logging.getLogger("ray.serve")

_WATCH = 1.0
"""Seconds between checks whether ComfyUI still runs."""


class Replica:
    """One ComfyUI, ready once its warm-up is done.

    If ComfyUI ends, the replica ends too: Serve starts another, and the front runs its prompts again.
    """

    async def __init__(self, given: dict[str, Any]):  # type: ignore[misc]  # Serve awaits it
        settings = Settings(**given)
        self._names = {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        }
        self._results = Results(Path(settings.results))
        self._comfyui = ComfyUI(settings.tree(), _own_folder(), settings.all_flags(), settings.environment)
        self._prompts = 0
        try:
            await self._comfyui.start(settings.start_s)
            self._names["address"] = self._comfyui.address
            await self._comfyui.state()
            for prompt in settings.warm_up:
                await self._warm_up(prompt)
            self._keys = Keys()
        except BaseException:
            await self._comfyui.stop()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def run(self, prompt_id: str, key: str, body: dict[str, Any]) -> AsyncIterator[tuple[str, Any]]:
        """Run a prompt and publish its results, with the events of `ComfyUI.run` between "replica" and "done".

        key: the prompt's `routing_key`, "" for none. "replica" names this replica; "done" has its `state`, the
        published entry, and whether it had run the key before ("met").
        """
        entry = self._results.entry(prompt_id)
        if entry is not None:  # by a replica that ended before it could say so
            yield "done", {"met": None, "entry": entry}
            return
        yield "replica", self._names
        met = await self._keys.met(key)
        try:
            async with contextlib.aclosing(self._comfyui.run(prompt_id, body)) as events:
                async for kind, value in events:
                    if kind != "history":
                        yield kind, value
                        continue
                    self._prompts += 1
                    entry = await asyncio.to_thread(self._results.publish, prompt_id, value, self._comfyui.made)
                    yield "done", {"met": met, "entry": entry, "replica": await self.state()}
        except Gone:
            # Ends before the front hears of it: to a replica that is there it would send the prompt again.
            for _ in range(20):
                self._end_with_comfyui()
                await asyncio.sleep(0.1)
            raise

    async def state(self) -> dict[str, Any]:
        """Counts of this replica since its start."""
        state = await self._comfyui.state()
        return {**self._names, "prompts": self._prompts, **counted(state["graph_cache"], state["graph_store"])}

    async def check_health(self) -> None:
        await self._comfyui.state()

    async def __del__(self) -> None:
        if hasattr(self, "_watching"):  # a start that failed has cleaned up
            self._watching.cancel()
            await self._comfyui.stop()

    async def _warm_up(self, prompt: dict[str, Any]) -> None:
        """Run a prompt in API format to its end.

        Raises Gone: it was refused, or failed; the message says why.
        """
        async for kind, value in self._comfyui.run(uuid.uuid4().hex, {"prompt": prompt}):
            if kind == "refused":
                raise Gone(f"The warm-up was refused: {value[1]}")
            entry = value
        if entry["status"]["status_str"] != "success":
            raise Gone(f"The warm-up failed: {entry['status']['messages'][-1]}")

    async def _watch(self) -> None:
        while True:
            self._end_with_comfyui()
            await asyncio.sleep(_WATCH)

    def _end_with_comfyui(self) -> None:
        """End this process if ComfyUI has ended."""
        if not self._comfyui.ended:
            return
        log.error("ComfyUI ended, and this replica with it:\n%s", self._comfyui.read_log()[-2000:])
        shutil.rmtree(self._comfyui.work, ignore_errors=True)
        os._exit(1)


def _own_folder() -> Path:
    """A path for this process's new folder; folders of killed processes are removed."""
    namespace = "/proc/self/ns/pid"  # of process ids: containers may share the folder, and machines
    numbers = f"{os.uname().nodename}-{os.stat(namespace).st_ino}" if os.path.exists(namespace) else "all"
    parent = Path(tempfile.gettempdir()) / f"comfy-accel-ray-{os.getuid() if hasattr(os, 'getuid') else 'all'}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and parent.lstat().st_uid != os.getuid():  # somebody else was first
        parent = Path(tempfile.mkdtemp(prefix="comfy-accel-ray-"))
    for folder in parent.iterdir():
        pid, _, by = folder.name.rpartition("-")[0].partition("-")
        if pid.isdecimal() and by == numbers and os.name != "nt" and not _runs(int(pid)):  # there 0 is Ctrl-C
            shutil.rmtree(folder, ignore_errors=True)
    return parent / f"{os.getpid()}-{numbers}-{uuid.uuid4().hex[:8]}"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
