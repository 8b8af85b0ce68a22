"""A fleet of real ComfyUIs under a real Ray on this machine: prompts of many sizes with a replica killed; on request
cold starts, and what becomes of prompts when a ComfyUI or the whole fleet ends.

The model is the smallest that core's loader knows, and every replica shares the same processors: counts are results
here, seconds are not. A prompt met its graph where its replica has run the same model and size before; on a GPU that
is a captured call and a loaded model.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from dev import ROOT, Problem
from dev.tools import command
from dev.tools.comfyui import complete, free_port, has_accelerator, tree

from . import report
from .fleet_base import graph

SIZES = [(64 + 16 * number, 160 - 8 * (number % 5)) for number in range(12)]
LOAD_COLUMNS = (
    *("route", "prompts", "answered", "failed", "run_again", "images", "duplicates", "met_graph", "seconds"),
)
COLD_COLUMNS = ("store", "replicas", "compilations", "loaded", "ready_s", "store_mb")
FAULT_COLUMNS = ("fault", "replicas", "prompts", "answered", "run_again", "images", "half_published", "seconds")
LEGEND = """\
run_again: prompts that were sent twice, since the killed replica had taken them. images: files in all that was
published. duplicates: of a prompt.
met_graph: share of prompts whose replica had run their model and size before; the first of each size never can.
compilations, loaded: graphs, in all replicas together.
ready_s: until every replica had done its warm-up. store_mb: what the shared store holds then.
comfyui: the ComfyUI of a replica is killed while it runs a prompt. shutdown: the fleet is deleted while it runs one,
with a client's WebSocket open. half_published: folders in results that are no prompt's. seconds, of a fault: until all
replicas were ready again, or the fleet was gone."""
ROUTES = ("graph", "any")
STORES = ("shared", "none")
KINDS = 2
"""Of blocks that the model has."""

DRAIN_S = 120
STARTS = 4
"""Of Ray, which gives its own processes half a minute to start: too little where others keep the processors busy."""


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    complete(tree())
    with tempfile.TemporaryDirectory(prefix="accel-fleet-", ignore_cleanup_errors=True) as work:
        base = make_base(Path(work))
        loads, colds, faults = [], [], []
        with own_ray(options.replicas) as url:
            for names, measure, rows, columns in (
                (options.routes, _kill_replica, loads, LOAD_COLUMNS),
                (options.stores, _start_cold, colds, COLD_COLUMNS),
                (options.faults, _cause, faults, FAULT_COLUMNS),
            ):
                for name in names:
                    rows.append(measure(options, Path(work), base, url, name))
                    print(report.table(rows[-1:], columns), file=sys.stderr, flush=True)
            started = psutil.Process().children(recursive=True)
        left = count_left(Path(work), started)
    for rows, columns in ((loads, LOAD_COLUMNS), (colds, COLD_COLUMNS), (faults, FAULT_COLUMNS)):
        if rows:
            print(f"\n{report.table(rows, columns)}")
    print(f"\n{LEGEND}\n{'No process was' if not left else f'{left} processes were'} left behind.")
    report.finish(options.json, [*loads, *colds, *faults], find_failure(loads, colds, faults, left))


def find_failure(loads: list[report.Row], colds: list[report.Row], faults: list[report.Row], left: int) -> str | None:
    """What must not be: a prompt without its one answer, more graphs compiled than there can be, a fleet left over."""
    for row in loads:
        route = f"route {row['route']}"
        if row["answered"] != row["prompts"] or row["failed"]:
            return f"{route}: {row['answered']} of {row['prompts']} prompts were answered, {row['failed']} failed."
        if row["duplicates"] or row["images"] != row["prompts"]:
            return f"{route}: {row['images']} images of {row['prompts']} prompts, {row['duplicates']} of them twice."
        if not row["run_again"]:
            return f"{route}: the killed replica had taken no prompt, so nothing was shown: run it again."
    for row in colds:
        least, most = KINDS, KINDS * row["replicas"]  # replicas that need a graph at the same moment all compile it
        if row["store"] == "shared" and not least <= row["compilations"] <= most:
            return f"{row['compilations']} graphs were compiled beside a shared store; {least} to {most} are right."
    for row in faults:
        fault = row["fault"]
        if row["answered"] != row["prompts"] or row["images"] != row["prompts"] or row["half_published"]:
            return f"{fault}: {row['answered']} of {row['prompts']} prompts were answered, with {row['images']} images."
        if fault == "comfyui" and not 1 <= row["run_again"] <= 2:  # what it ran, and what waited in it
            return f"{fault}: {row['run_again']} prompts ran again."
        if fault == "shutdown" and row["seconds"] > DRAIN_S / 2:
            return f"{fault}: it took {row['seconds']} s, so something was not told of it."
    return f"{left} processes were left behind." if left else None


def make_base(work: Path) -> Path:
    """ComfyUI's base directory with the model, as `fleet_base` makes it."""
    base = work / "base"
    made = subprocess.run([sys.executable, "-m", "dev.bench.fleet_base", str(base)], cwd=ROOT, capture_output=True)
    if made.returncode:
        raise Problem(f"The model could not be made: {made.stderr.decode(errors='replace')[-300:]}")
    return base


@contextlib.contextmanager
def own_ray(replicas: int) -> Iterator[str]:
    """A Ray of this machine alone, without a dashboard: the address that its applications answer at."""
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise Problem(f"This needs the package ray[serve]: {error}.") from None
    # Its workers import the application by this name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    port = free_port()
    for attempt in range(STARTS):
        try:
            ray.init(
                num_cpus=2 * replicas + 2,  # as many as are asked for, however few there are
                num_gpus=None if has_accelerator() else 0,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100_000_000,
            )
            break
        except Exception as error:  # of no class of its own
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                raise
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextlib.contextmanager
def running_fleet(options: argparse.Namespace, base: Path, results: Path, **settings: Any) -> Iterator[Any]:
    """A running fleet, ready: Serve's handle of its replicas."""
    from ray import serve

    from fleet.app import app
    from fleet.settings import Settings

    asked = Settings(
        comfyui=str(tree()),
        results=str(results),
        replicas=options.replicas,
        gpus=1 if has_accelerator() else 0,
        flags=["--base-directory", str(base), "--use-pytorch-cross-attention"],
        start_s=600,
        **settings,
    )
    serve.run(app(asked), name="fleet", route_prefix="/")
    try:
        yield serve.get_deployment_handle("ComfyUI", "fleet")
    finally:
        serve.delete("fleet")


def _kill_replica(options: argparse.Namespace, work: Path, base: Path, url: str, route: str) -> report.Row:
    """All prompts at once, in a mixed order; a third of them answered, a replica is killed."""
    results = work / f"results-{route}"
    graphs = [graph(*SIZES[number % len(SIZES)], seed=number, steps=6) for number in range(options.prompts)]
    random.Random(0).shuffle(graphs)
    warm_up = [graph(64, 64, seed=0)]
    with running_fleet(options, base, results, route=route, environment={"ACCEL_STORE": "off"}, warm_up=warm_up):
        started = time.perf_counter()
        with _sending(url, graphs) as ended:
            _wait_until(lambda: len(ended) >= len(graphs) // 3, 600)
            os.kill(_wait_until(lambda: _find_running(url), 60)["pid"], signal.SIGKILL)
            _wait_until(lambda: len(ended) == len(graphs), 600)
            entries = [_get(f"{url}/history/{prompt_id}")[prompt_id] for prompt_id in ended]
        seconds = time.perf_counter() - started
        counts = _get(f"{url}/accel/state")["prompts"]
    files = [file for entry in entries for out in entry["outputs"].values() for file in out.get("images", ())]
    images = list(results.glob("*/output/*.png"))
    named = {results / file["subfolder"] / "output" / file["filename"] for file in files}
    met, not_met = counts.get("met", 0), counts.get("not_met", 0)
    return {
        "route": route,
        "prompts": len(graphs),
        "answered": sum(entry["status"]["status_str"] == "success" for entry in entries),
        "failed": counts.get("failed", 0),
        "run_again": counts["runs"] - len(graphs),
        "images": len(images),
        "duplicates": len(images) - len(named & set(images)),
        "met_graph": round(met / (met + not_met), 3),
        "seconds": round(seconds, 1),
        "replicas": options.replicas,
    }


def _start_cold(options: argparse.Namespace, work: Path, base: Path, url: str, store: str) -> report.Row:
    """All replicas start at once and warm up, without a store or with one that all share."""
    environment = {
        "ACCEL_STORE": str(work / "graphs") if store == "shared" else "off",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # or each builds half a dozen programs to find out
        "TORCHINDUCTOR_CACHE_DIR": str(work / f"torch-{store}"),
    }
    warm_up = [graph(64, 64, seed=0, backend="inductor")]
    started = time.perf_counter()
    with running_fleet(options, base, work / "results-cold", environment=environment, warm_up=warm_up) as replicas:
        seconds = time.perf_counter() - started
        states = _ask_states(replicas, options.replicas)
    saved = (work / "graphs").rglob("*") if store == "shared" else ()
    return {
        "store": store,
        "replicas": options.replicas,
        "compilations": sum(state["compilations"] for state in states),
        "loaded": sum(state["loaded"] for state in states),
        "ready_s": round(seconds, 1),
        "store_mb": round(sum(file.stat().st_size for file in saved if file.is_file()) / 1e6, 3),
    }


def _cause(options: argparse.Namespace, work: Path, base: Path, url: str, fault: str) -> report.Row:
    return {"fault": fault, **FAULTS[fault](options, work, base, url)}


def _kill_comfyui(options: argparse.Namespace, work: Path, base: Path, url: str) -> report.Row:
    results = work / "results-comfyui"
    with running_fleet(options, base, results, environment={"ACCEL_STORE": "off"}) as replicas:
        with _sending(url, [graph(64, 64, seed=seed, steps=300) for seed in range(4)]) as ended:
            busy = _wait_until(lambda: _find_running(url), 60)
            (comfyui,) = [process for process in _find_comfyuis(base) if process.ppid() == busy["pid"]]
            comfyui.kill()
            killed = time.perf_counter()
            _wait_until(lambda: len(ended) == 4, 300)
        names = {state["replica"] for state in _ask_states(replicas, options.replicas, without=busy["replica"])}
        seconds = time.perf_counter() - killed
        counts = _get(f"{url}/accel/state")["prompts"]
    return {
        "replicas": len(names),
        **_read_published(results, 4),
        "run_again": counts["runs"] - 4,
        "seconds": round(seconds, 1),
    }


def _shut_down(options: argparse.Namespace, work: Path, base: Path, url: str) -> report.Row:
    results = work / "results-shutdown"
    environment = {"ACCEL_STORE": "off"}
    with contextlib.ExitStack() as client:
        with running_fleet(options, base, results, environment=environment, drain_s=DRAIN_S):
            client.enter_context(_sending(url, [graph(64, 64, seed=0, steps=1500)]))
            _wait_until(lambda: _find_running(url), 60)
            began = time.perf_counter()
        seconds = time.perf_counter() - began
    if _find_comfyuis(base):
        raise Problem("A ComfyUI outlived its fleet.")
    return {"replicas": options.replicas, **_read_published(results, 1), "seconds": round(seconds, 1)}


FAULTS = {"comfyui": _kill_comfyui, "shutdown": _shut_down}


def _read_published(results: Path, prompts: int) -> report.Row:
    entries = [json.loads(file.read_text()) for file in results.glob("*/history.json")]
    return {
        "prompts": prompts,
        "answered": sum(entry["status"]["status_str"] == "success" for entry in entries),
        "images": len(list(results.glob("*/output/*.png"))),
        "half_published": len(list(results.glob(".unfinished-*"))),
    }


def _find_comfyuis(base: Path) -> list[psutil.Process]:
    """The ComfyUIs of a fleet over this base directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"--base-directory", str(base)} <= set(process.info["cmdline"] or ())
    ]


def _ask_states(replicas: Any, count: int, without: str = "") -> list[dict[str, Any]]:
    """What each of so many replicas says; without: one that is not asked for."""
    states: dict[str, dict[str, Any]] = {}

    def all_answered() -> bool:
        with contextlib.suppress(Exception):  # Ray's, for the replica that has ended and is not taken off yet
            state = replicas.state.remote().result(timeout_s=60)
            if state["replica"] != without:
                states[state["replica"]] = state
        return len(states) >= count

    _wait_until(all_answered, 300)
    return list(states.values())


def _find_running(url: str) -> dict[str, Any] | None:
    """A replica that runs a prompt."""
    return next((replica for replica in _get(f"{url}/accel/state")["replicas"] if replica["running"]), None)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


@contextlib.contextmanager
def _sending(url: str, graphs: list) -> Iterator[set[str]]:
    """Sends prompts and listens, as a client that knows nothing of the fleet; the ids of those that have ended."""
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


def _wait_until(what: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > deadline:
            raise Problem(f"It took longer than {seconds:.0f} s.")
        time.sleep(0.1)


def count_left(work: Path, started: list[psutil.Process], seconds: float = 20) -> int:
    """Processes of this measurement that still run, so many seconds after its end.

    started: those that there were before; who loses its parent is no child of ours any more.
    """
    deadline = time.monotonic() + seconds
    while True:
        ours = {*started, *psutil.Process().children(recursive=True)}
        for process in psutil.process_iter(["cmdline"]):
            if any(str(work) in part for part in process.info["cmdline"] or ()):
                ours.add(process)
        left = sum(map(_is_running, ours))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="dev.py bench fleet", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="default: 2")
    parser.add_argument("--prompts", type=int, default=200, help="default: 200, of 12 sizes")
    parser.add_argument("--routes", nargs="*", choices=ROUTES, default=ROUTES, help="default: both")
    parser.add_argument(
        "--stores", nargs="*", choices=STORES, default=(), help="cold starts to measure, with inductor: minutes each"
    )
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=(), help="faults to cause")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))
