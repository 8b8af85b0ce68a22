"""Backends of torch's own, compiled ahead of time: one graph for one function, and no later call compiles."""

from __future__ import annotations

import functools
import random
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..core import toolchain, torch_internals
from ..core.reasons import Reason
from . import generated_code
from .backend import Artifact, NotSavable


class AheadOfTime:
    """A backend of torch's that saves nothing."""

    is_faster = False
    load: Callable[[bytes, torch.nn.Module], Artifact] | None = None

    def __init__(self, name: str | Callable):
        """name: one that torch knows, such as "eager", or a function as `torch.compile` takes it."""
        self.name = name

    def find_missing(self, device: str | None = None) -> Reason | None:
        if (lacking := torch_internals.find_missing(torch_internals.AHEAD_OF_TIME)) is not None:
            return Reason("torch_lacks", torch=torch.__version__, name=str(lacking))
        return toolchain.find_missing(device) if self.is_faster and device else None

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Artifact:
        with generated_code.collect_modules() as modules:
            compiled = compile_function(function, tensors, _make_serializable(self.name))
        return artifact_of(compiled, function.__globals__, modules, generated_code.bytes_of(modules))


def compile_function(function: Callable[..., Any], tensors: Sequence[torch.Tensor], backend: str | Callable) -> Any:
    """Torch's compiled function of these tensors, guarded by their sizes alone."""
    from torch._inductor import config

    # What a graph depends on besides sizes is in its key.
    options = {"guard_filter_fn": lambda guards: [guard.guard_type == "SHAPE_ENV" for guard in guards]}
    own_noise = config.patch(fallback_random=True)  # code draws as the block would: images keep their noise
    with own_noise, _sources_unread(), torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(function, fullgraph=True, backend=backend, options=options)
        return compiled.aot_compile((tuple(tensors), {}))


def artifact_of(
    compiled: Any,
    scope: dict[str, Any],
    modules: Sequence[Any],
    nbytes: int,
    save: Callable[[torch.nn.Module], bytes] | None = None,
) -> Artifact:
    """The artifact around torch's compiled function; threads may run it at once, as its code writes to nothing global.

    scope: globals of the function that was traced, in which torch keeps what it compiled; of a loaded one its own.
    modules: the generated code that it runs.
    """
    check, call = compiled._artifacts.guard_manager.check, compiled.fn
    # Guards ask for the values of the function's free variables by name.
    cells = {n: c.cell_contents for n, c in zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)}

    def guards(tensors: Sequence[torch.Tensor]) -> bool:
        return check({**cells, "tensors": tuple(tensors)})

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        return call(*tensors)

    release = functools.partial(generated_code.release, scope, modules)
    return Artifact(run, guards, nbytes, save, release)


@contextmanager
def _sources_unread() -> Iterator[None]:
    """A context in which torch does not read the source of what this thread traces: a tenth of a trace. Torch keeps it
    to refuse saved functions whose source has changed, as our keys do."""
    read, thread = torch_internals.READ_SOURCE.get(None), threading.get_ident()
    if read is None:
        yield
        return

    def add_code(info: Any, code: types.CodeType) -> None:
        if threading.get_ident() != thread:
            read(info, code)

    with torch_internals.READ_SOURCE.replace(add_code):
        yield


@contextmanager
def random_numbers_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context that leaves the random numbers of Python, and torch's on the CPU and on these devices, as they were.

    Within, Python's follow from no seed: torch names a graph in its cache after one of them (2.11,
    `autograd_cache_key`), and would find another block's graph there wherever somebody has seeded them.
    """
    state, others = random.getstate(), {device for device in devices if device.type in ("cuda", "xpu")}
    kind = next((device.type for device in others), "cuda")
    random.seed()
    try:
        with torch.random.fork_rng([device.index or 0 for device in others], device_type=kind):
            yield
    finally:
        random.setstate(state)


def _make_serializable(backend: str | Callable) -> Callable:
    """The backend with its result wrapped as serializable, which compiling ahead of time asks of all of them."""
    make = torch_internals.LOOK_UP_BACKEND.get()(backend) if isinstance(backend, str) else backend

    class InProcess(torch_internals.AOT_CALLABLE.get()):  # type: ignore[misc]  # found at run time
        """A callable that cannot leave the process."""

        def __init__(self, function: Callable):
            self._function = function

        def __call__(self, *args: Any) -> Any:
            return self._function(*args)

        @classmethod
        def serialize_compile_artifacts(cls, fn: Any) -> bytes:
            raise NotSavable(f"graphs of the backend {backend} cannot be saved")

        @classmethod
        def deserialize_compile_artifacts(cls, data: bytes) -> Any:
            raise NotSavable(f"graphs of the backend {backend} cannot be loaded")

    return lambda graph, examples: InProcess(make(graph, examples))
