"""What becomes of a fleet's work when something ends: a replica's ComfyUI, the fleet.

Real ComfyUIs under a real Ray on this machine, as in `bench fleet`: counts are results here, seconds are not.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tools import Problem, command
from tools.comfyui import complete, tree

from . import report
from .fleet import left_of, make_base, own_ray, running_fleet, state_of
from .fleet_base import graph

COLUMNS = ("fault", "replicas", "prompts", "answered", "run_again", "images", "half_published", "seconds")
LEGEND = """\
comfyui: the ComfyUI of a replica is killed while it runs a prompt. shutdown: the fleet is deleted while it runs one,
with a client's WebSocket open. run_again: prompts that were sent twice. half_published: folders in results that are no
prompt's. seconds: from the fault until all replicas were ready again, or the fleet was gone."""

DRAIN_S = 120


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    complete(tree())
    rows = []
    with tempfile.TemporaryDirectory(prefix="accel-fleet-", ignore_cleanup_errors=True) as work:
        base = make_base(Path(work))
        with own_ray(options.replicas) as url:
            for fault in options.faults:
                rows.append({"fault": fault, **FAULTS[fault](options, Path(work), base, url)})
                print(report.table(rows[-1:], COLUMNS), file=sys.stderr, flush=True)
            started = psutil.Process().children(recursive=True)
        left = left_of(Path(work), started)
    print(f"{report.table(rows, COLUMNS)}\n\n{LEGEND}\n{left} processes were left behind.")
    report.finish(options.json, rows, failure(rows, left))


def failure(rows: list[report.Row], left: int) -> str | None:
    """What must not be: a prompt without its one answer, a fleet that does not end."""
    for row in rows:
        fault = row["fault"]
        if row["answered"] != row["prompts"] or row["images"] != row["prompts"] or row["half_published"]:
            return f"{fault}: {row['answered']} of {row['prompts']} prompts were answered, with {row['images']} images."
        if fault == "comfyui" and not 1 <= row["run_again"] <= 2:  # what it ran, and what waited in it
            return f"{fault}: {row['run_again']} prompts ran again."
        if fault == "shutdown" and row["seconds"] > DRAIN_S / 2:
            return f"{fault}: it took {row['seconds']} s, so something was not told of it."
    return f"{left} processes were left behind." if left else None


def _comfyui(options: argparse.Namespace, work: Path, base: Path, url: str) -> report.Row:
    results = work / "results-comfyui"
    with running_fleet(options, base, results, environment={"ACCEL_STORE": "off"}) as replicas:
        with _client(url, [graph(64, 64, seed=seed, steps=300) for seed in range(4)]) as ended:
            busy = _until(lambda: _running(url), 60)
            (comfyui,) = [process for process in _comfyuis(base) if process.ppid() == busy["pid"]]
            comfyui.kill()
            killed = time.perf_counter()
            _until(lambda: len(ended) == 4, 300)
        names = {state["replica"] for state in _states(replicas, options.replicas, without=busy["replica"])}
        seconds = time.perf_counter() - killed
        counts = state_of(url)["prompts"]
    return {
        "replicas": len(names),
        **_published(results, 4),
        "run_again": counts["runs"] - 4,
        "seconds": round(seconds, 1),
    }


def _shutdown(options: argparse.Namespace, work: Path, base: Path, url: str) -> report.Row:
    results = work / "results-shutdown"
    environment = {"ACCEL_STORE": "off"}
    with contextlib.ExitStack() as client:
        with running_fleet(options, base, results, environment=environment, drain_s=DRAIN_S):
            client.enter_context(_client(url, [graph(64, 64, seed=0, steps=1500)]))
            _until(lambda: _running(url), 60)
            began = time.perf_counter()
        seconds = time.perf_counter() - began
    if _comfyuis(base):
        raise Problem("A ComfyUI outlived its fleet.")
    return {"replicas": options.replicas, **_published(results, 1), "seconds": round(seconds, 1)}


FAULTS = {"comfyui": _comfyui, "shutdown": _shutdown}


def _published(results: Path, prompts: int) -> report.Row:
    entries = [json.loads(file.read_text()) for file in results.glob("*/history.json")]
    return {
        "prompts": prompts,
        "answered": sum(entry["status"]["status_str"] == "success" for entry in entries),
        "images": len(list(results.glob("*/output/*.png"))),
        "half_published": len(list(results.glob(".unfinished-*"))),
    }


def _comfyuis(base: Path) -> list[psutil.Process]:
    """The ComfyUIs of a fleet over this base directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"--base-directory", str(base)} <= set(process.info["cmdline"] or ())
    ]


def _states(replicas: Any, count: int, without: str = "") -> list[dict[str, Any]]:
    """What each of so many replicas says; without: one that is not asked for."""
    states: dict[str, dict[str, Any]] = {}

    def all_answered() -> bool:
        with contextlib.suppress(Exception):  # Ray's, for the replica that has ended and is not taken off yet
            state = replicas.state.remote().result(timeout_s=60)
            if state["replica"] != without:
                states[state["replica"]] = state
        return len(states) >= count

    _until(all_answered, 300)
    return list(states.values())


def _running(url: str) -> dict[str, Any] | None:
    """The replica that runs a prompt."""
    return next((replica for replica in state_of(url)["replicas"] if replica["running"]), None)


@contextlib.contextmanager
def _client(url: str, graphs: list) -> Iterator[set[str]]:
    """Sends prompts and listens; the ids of those that it was told have ended."""
    ended: set[str] = set()
    done = threading.Event()

    async def follow() -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws?clientId=bench") as messages:
            for asked in graphs:
                async with session.post(f"{url}/prompt", json={"prompt": asked, "client_id": "bench"}) as answer:
                    answer.raise_for_status()
            while not done.is_set() and not messages.closed:
                with contextlib.suppress(asyncio.TimeoutError):
                    message = await messages.receive(timeout=1)
                    event = json.loads(message.data) if message.type is aiohttp.WSMsgType.TEXT else {}
                    if event.get("type") == "executing" and event["data"]["node"] is None:
                        ended.add(event["data"]["prompt_id"])

    thread = threading.Thread(target=lambda: asyncio.run(follow()))
    thread.start()
    try:
        yield ended
    finally:
        done.set()
        thread.join()


def _until(what: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > deadline:
            raise Problem(f"It took longer than {seconds:.0f} s.")
        time.sleep(0.1)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench fleet_faults", description=__doc__)
    parser.add_argument("--replicas", type=int, default=3, help="default: 3")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS), help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))
