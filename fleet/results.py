"""Results of finished prompts, each published once, in a folder that all replicas and the front share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROMPT_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
"""Valid prompt ids: they name folders, and clients may choose their own."""

KINDS = ("output", "temp")
"""ComfyUI's types of files that a prompt makes."""

_HISTORY = "history.json"
_UNFINISHED = ".unfinished-"
"""Prefix of a folder for a prompt that is being published, with one folder in it for each run."""

Entry = dict[str, Any]
"""What ComfyUI's /history says of one prompt: {"prompt", "outputs", "status", "meta"}."""


def published(outputs: Any, prompt_id: str, seen: Callable[[dict], None] = lambda file: None) -> Any:
    """A copy of nodes' outputs that names each file where `Results.publish` puts it.

    seen: called with each file as ComfyUI named it: {"filename", "subfolder", "type"}.
    """
    if isinstance(outputs, list):
        return [published(item, prompt_id, seen) for item in outputs]
    if not isinstance(outputs, dict):
        return outputs
    if isinstance(outputs.get("filename"), str) and outputs.get("type") in KINDS:
        seen(outputs)
        below = outputs.get("subfolder") or ""
        return {**outputs, "subfolder": f"{prompt_id}/{below}" if below else prompt_id}
    return {name: published(value, prompt_id, seen) for name, value in outputs.items()}


class Results:
    """Published prompts: files in FOLDER/ID/output and FOLDER/ID/temp, the history in FOLDER/ID/history.json.

    The folder is renamed to its id when it is complete. If a prompt ran twice, as after a replica's death, the first
    run to finish is published and the other's files are dropped.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def publish(self, prompt_id: str, entry: Entry, made: Mapping[str, Path]) -> Entry:
        """Publish a prompt's files and history. Returns the published entry: that of an earlier run if there was one.

        made: the folder of ComfyUI's files for each of `KINDS`. Raises OSError.
        """
        runs = self._folder / f"{_UNFINISHED}{prompt_id}"
        unfinished = runs / secrets.token_hex(8)
        files: list[dict] = []
        try:
            unfinished.mkdir(parents=True)
            entry = {**entry, "outputs": published(entry["outputs"], prompt_id, files.append)}
            for file in files:
                relative = Path(os.path.normpath(Path(file.get("subfolder") or "", file["filename"])))
                # What a node has put elsewhere, as some do, stays there: it may be any file of the machine.
                if file["type"] in made and not (relative.is_absolute() or ".." in relative.parts):
                    with contextlib.suppress(ValueError):  # no system has a file of such a name
                        _link(made[file["type"]] / relative, unfinished / file["type"] / relative)
            (unfinished / _HISTORY).write_text(json.dumps(entry), encoding="utf-8")
            os.rename(unfinished, self._folder / prompt_id)  # never replaces a folder that has something in it
            return entry
        except OSError:
            earlier = self.entry(prompt_id)
            if earlier is None:
                raise
            return earlier
        finally:
            # Once the prompt is published, what other runs have there is too late, or of replicas that were killed.
            shutil.rmtree(runs if self.entry(prompt_id) is not None else unfinished, ignore_errors=True)
            with contextlib.suppress(OSError):
                runs.rmdir()

    def entry(self, prompt_id: str) -> Entry | None:
        """The history of a published prompt; None for any other."""
        if PROMPT_ID.fullmatch(prompt_id):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                return json.loads((self._folder / prompt_id / _HISTORY).read_text(encoding="utf-8"))
        return None

    def latest(self, count: int) -> list[str]:
        """The ids of the `count` latest prompts, oldest first."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as items:
            for item in items:
                if PROMPT_ID.fullmatch(item.name):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        found.append((item.stat().st_mtime, item.name))
        found.sort()
        return [name for _, name in found[max(len(found) - count, 0) :]]

    def file(self, kind: str, subfolder: str, filename: str) -> Path | None:
        """The path of a published file, named as in the history; None for anything else."""
        prompt_id, _, below = subfolder.partition("/")
        if kind not in KINDS or not PROMPT_ID.fullmatch(prompt_id):
            return None
        return inside(self._folder / prompt_id / kind, below, filename)

    def remove(self, prompt_id: str) -> None:
        """Delete a prompt's files and history, if there are any."""
        if PROMPT_ID.fullmatch(prompt_id):
            shutil.rmtree(self._folder / prompt_id, ignore_errors=True)


def inside(folder: Path, subfolder: str, filename: str) -> Path | None:
    """The path of a file in the folder; None if there is none, or if the names lead out of it."""
    with contextlib.suppress(OSError, ValueError):
        path = (folder / subfolder / filename).resolve()
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return path
    return None


def last_messages(entry: Entry) -> list[dict[str, Any]]:
    """What ComfyUI says of a prompt whose files can be fetched: each node's output, then how the prompt ended."""
    said = []
    for node, output in entry["outputs"].items():
        shown = entry["meta"].get(node, {}).get("display_node", node)
        data = {"node": node, "display_node": shown, "output": output, "prompt_id": entry["prompt"][1]}
        said.append({"type": "executed", "data": data})
    kind, data = entry["status"]["messages"][-1]
    return [*said, {"type": kind, "data": data}]


def failed(kind: str, prompt: list, **details: Any) -> Entry:
    """The history entry of a prompt that no replica finished.

    kind: execution_error or execution_interrupted. prompt: an item of ComfyUI's queue.
    """
    message = {"prompt_id": prompt[1], "node_id": None, "node_type": "", "executed": [], **details}
    status = {"status_str": "error", "completed": False, "messages": [[kind, message]]}
    return {"prompt": prompt, "outputs": {}, "status": status, "meta": {}}


def _link(source: Path, place: Path) -> None:
    """Hard-link a file, or copy it where links are not possible. It stays in place: ComfyUI may return it again."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        return
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)
