"""Compiles graphs in a process beside this one: an image waits for traces, and goes on without their code."""

from __future__ import annotations

import atexit
import dataclasses
import io
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..compile import generated_code
from ..compile.backend import Artifact
from ..compile.inductor import Inductor, code_generation, device_of
from ..core import torch_internals
from ..core.events import log
from ..core.torch_internals import AOT_INDUCTOR
from ..signature import switches

VARIABLE = "ACCEL_COMPILE_BESIDE"
"""In the environment: 0 has every image wait for its code, 1 none, whatever the machine has."""

MEMORY, IDLE, LIMIT, AGAIN, LATE = 2 << 30, 60.0, 600.0, 300.0, 300.0
"""Bytes that must be free, of which it takes 660 MB, and compilers some. Seconds: without a graph after which it ends;
of one graph, or 3 times the longest so far, after which it has hung and is stopped; from there to another, then twice;
of images without code until that is said."""

_ENGINE = __name__.rsplit(".", 2)[0]
_SIZE = re.compile(r"L\['tensors'\]\[\d+\]\.size\(\)\[\d+\]")
ANSWER = b"accel answers\n"  # before each: other packages have Python print while it starts
_BEGIN = """
import sys
sys.path[:] = [path for path in sys.path if path]  # nothing comes from the folder that a person is in
import importlib, os, pickle, types
jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # what it starts would inherit the pipe, and on Windows hang
os.dup2(2, 1)  # what compilers print is no answer
sys.path[:], around, name = pickle.load(jobs)
for package, places in around.items():
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = places
importlib.import_module(name).main(jobs, answers)
"""
"""The engine has its name of here, by which saved code refers to it; what is around it is not imported."""


def is_possible() -> bool:
    """Whether the machine, and the container, have room for the process: a processor core, and memory of its own."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if _process.has_failed or chosen == "0" or torch_internals.find_missing(torch_internals.BESIDE) is not None:
        return False
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    psutil = sys.modules.get("psutil")  # which hosts have loaded
    if chosen == "1" or psutil is None or sys.platform == "win32":  # where no machine has run it yet
        return chosen == "1"
    for quota, period in (*_limits("cpu.max"), *_limits("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        cores = min(cores, float(quota) / float(period)) if quota != "-1" else cores
    free = psutil.virtual_memory().available
    for limit, *said in (*_limits("memory.max", "memory.stat"), *_limits("memory.limit_in_bytes", "memory.stat")):
        taken = dict(zip(said[::2], said[1::2], strict=False))  # without files, which it can do without
        free = min(free, float(limit) - float(taken.get("total_rss", taken.get("anon", 0))))
    return cores >= 2 and (free > MEMORY or _process._running is not None)


def _limits(*files: str) -> Iterator[list[str]]:
    """What these files say in each control group of Linux that this process is in, the innermost first."""
    own = Path("/proc/self/cgroup")
    for of, path in re.findall(r":(.*):/(.*)", own.read_text() if os.access(own, os.R_OK) else ""):
        for group in (at := Path("/sys/fs/cgroup") / of / path, *at.parents):
            with suppress(OSError):
                yield " ".join((group / name).read_text() for name in files).replace("max", "inf").split()


def progress() -> tuple[int, int]:
    """How many graphs the process is done with, and how many it has been given, since it last had none."""
    return _process.done, _process.given


def estimate_seconds(done: int, more: int) -> float | None:
    """For more graphs, by those that it is done with."""
    return (time.monotonic() - _process.began) / done * more if done else None


def tell_if_late() -> None:
    """Say once in a process that images have gone without code for minutes, and what to do."""
    if not _process.is_told and time.monotonic() - _process.began > LATE:
        _process.is_told, (done, given) = True, progress()
        said = "The code of %d of %d graphs is not ready after %.0f minutes; images run uncompiled until it is. If it "
        said += "never is, set %s=0 in the environment and start again: images then wait for it."
        log.info(said, given - done, given, LATE / 60, VARIABLE)


class Beside(Inductor):
    """Inductor in the process: the code of an artifact is pending."""

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Artifact:
        making = _Making(device_of(tensors))
        artifact, making.modules = self._compile(function, tensors, making.backend)
        return artifact if making.job is None else dataclasses.replace(artifact, pending=making)


class _Making:
    """The function of one graph for a device, while it is made. job: the process's answer; None: it was not sent."""

    def __init__(self, device: torch.device):
        self.device, self.modules = device, []
        self._run: Any = None
        self.job: Future | None = None

    def backend(self, graph: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Any:
        """For torch: this, which runs once it is taken; a function made here where the graph cannot be sent."""
        try:
            self.job = _process.ask(_job_of(torch.fx.GraphModule(graph, graph.graph), self.device))
        except Exception as error:
            log.debug("A graph is compiled in this process: %s: %s", type(error).__name__, error)
        if self.job is not None:
            return AOT_INDUCTOR.get()(self)
        with code_generation(self.device), generated_code.building_told():  # which imports all of inductor
            return AOT_INDUCTOR.get()(torch_internals.LOOK_UP_BACKEND.get()("inductor")(graph, examples))

    @property
    def is_done(self) -> bool:
        return self.job.done()

    def take(self) -> tuple[str, int]:
        answer = self.job.result()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        with generated_code.collect_modules() as made, generated_code.own_settings():
            self._run = generated_code.load_entry(self.serialize())
        self.modules += made
        return answer[1], generated_code.bytes_of(made)

    def __call__(self, *tensors: Any) -> Any:
        return self._run(*tensors)

    def serialize(self) -> Any:
        return pickle.loads(self.job.result()[0])


class NodeName(str):
    """Stands for the node of this name in a graph that was sent."""


def _source_of(size: torch.SymInt) -> str:
    """Which size of the function's tensors this is. Raises StopIteration: none of them."""
    known = size.node.shape_env.source_to_var.items()
    return next(source for source, symbol in known if symbol == size.node.expr and _SIZE.fullmatch(source))


def _job_of(graph: torch.fx.GraphModule, device: torch.device) -> dict[str, Any]:
    """The graph, and how torch is set, for the process. Raises Exception, of any type: something cannot leave here."""
    from torch._functorch import config as of_autograd
    from torch._inductor import config

    is_deterministic = torch.are_deterministic_algorithms_enabled()
    is_other = is_deterministic or not torch.backends.mkldnn.enabled or torch.get_default_dtype() is not torch.float32
    if is_other or config.max_autotune or config.max_autotune_gemm or config.max_autotune_pointwise:
        raise ValueError("torch is set otherwise")
    if any(node.name.startswith("triton_kernel_wrapper") for node in graph.graph.nodes):
        raise ValueError("it has kernels of others")
    mode = torch_internals.FAKE_MODE.get()

    class Pickler(torch_internals.GRAPH_PICKLER.get()):  # type: ignore[misc]  # found at run time
        """Names nodes in slices, where torch does not look for them; and leaves out the mode, which torch keeps in the
        description of a view's base, and replaces when it loads it."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return NodeName, (value.name,)
            return (type(None), ()) if isinstance(value, mode) else super().reducer_override(value)

    options = torch_internals.PICKLED_NODES.get()(ops_filter=None, node_metadata_key_filter="example_value".__eq__)
    Pickler(stream := io.BytesIO(), options).dump(graph)
    given = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    operators = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {
        "graph": stream.getvalue(),
        "device": device,
        "sources": [_source_of(size) for size in given if isinstance(size, torch.SymInt)],
        "switches": switches.read_switches(),
        "libraries": {operator.namespace for operator in operators},
        "settings": [_settings(each) for each in (config, of_autograd, torch.fx.experimental._config)],
        "threads": torch.get_num_threads(),
        "environment": {name: value for name, value in os.environ.items() if name.endswith("_CACHE_DIR")},
    }


def _settings(config: Any) -> dict[str, Any]:
    """Torch's settings without passes of ours, which the process has. Raises ValueError: there are some of others."""
    settings = config.save_config_portable()
    for name, value in config.get_config_copy().items():
        if callable(value):
            if not getattr(value, "__module__", "").startswith(_ENGINE):
                raise ValueError(f"{name} is of others")
            settings.pop(name, None)
    return settings


class _Process:
    """The process. given, done: jobs since it last had none, at `began`. is_told: images without code were told of."""

    def __init__(self) -> None:
        self.given, self.done, self.began, self.is_told, self._longest = 0, 0, 0.0, False, 0.0
        self._again, self._pause = 0.0, AGAIN
        self._jobs: queue.SimpleQueue[tuple[bytes, Any, Future]] = queue.SimpleQueue()
        self._running: subprocess.Popen | None = None
        self._thread = threading.Thread(target=self._serve, name="accel-beside", daemon=True)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended or could not begin, minutes ago."""
        return time.monotonic() < self._again

    def ask(self, job: dict[str, Any]) -> Future:
        """Its answer, or an exception where it has ended. One thread asks at a time, as torch compiles."""
        data = pickle.dumps(job)
        if self._thread.ident is None:
            self._thread.start()
        if self.done == self.given:
            self.given, self.done, self.began = 0, 0, time.monotonic()
        self.given += 1
        self._jobs.put((data, job.get("device"), answer := Future()))
        return answer

    def stop(self) -> None:
        """End it, in the middle of a job too."""
        running, self._running = self._running, None
        if running is not None:
            _kill(running)
            running.wait()

    def _serve(self) -> None:
        while True:
            try:
                job, device, answer = self._jobs.get(timeout=IDLE)
            except queue.Empty:
                self.stop()
                job, device, answer = self._jobs.get()
            try:
                if self.has_failed:
                    raise EOFError("the process that compiles beside images has ended")
                made = self._send(job)
                if device == torch.device("cpu"):  # inductor asks when code is loaded, for minutes where it is cold
                    torch_internals.VECTORS.get(list)()
                answer.set_result(made)
            except Exception as error:
                if not self.has_failed:
                    self._again, self._pause = time.monotonic() + self._pause, 2 * self._pause
                self.stop()
                answer.set_exception(error)
            self.done += 1

    def _send(self, job: bytes) -> Any:
        running = self._running = self._running or _begin()
        began, limit = time.monotonic(), max(LIMIT, 3 * self._longest)
        watch = threading.Timer(limit, _kill, [running])
        watch.daemon = True
        watch.start()
        running.stdin.write(job)
        running.stdin.flush()
        if not any(line.endswith(ANSWER) for line in running.stdout):
            raise EOFError(f"the process beside has ended, or hung for {limit:.0f} s")
        answer = pickle.load(running.stdout)  # type: ignore[arg-type]  # a pipe, as it was begun
        watch.cancel()
        self._longest = max(self._longest, time.monotonic() - began)
        return answer


def _kill(process: subprocess.Popen) -> None:
    with suppress(AttributeError, OSError):  # its group: the compilers that it runs; Windows has none
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _begin() -> subprocess.Popen:
    names = _ENGINE.split(".")
    around = {name: list(sys.modules[name].__path__) for name in (".".join(names[:at]) for at in range(1, len(names)))}
    quietly: Any = {"creationflags": 0x08004000} if sys.platform == "win32" else {}  # no window, below normal priority
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    made: Any = subprocess.Popen([sys.executable, "-c", _BEGIN], start_new_session=True, **pipes, **quietly)
    pickle.dump(([path for path in sys.path if path], around, f"{_ENGINE}.beside.worker"), made.stdin)
    return made


_process = _Process()
atexit.register(_process.stop)
