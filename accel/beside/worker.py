"""The process that compiles graphs beside the images: all but the trace of a block's Python is done there.

It is sent traced graphs, and answers with code as saved graphs have it. It runs nothing on a device, and makes no
context there, whose memory images would lack. It ends with the process that began it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import re
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import torch
from torch.fx.node import map_aggregate

from ..compile.inductor import code_generation
from ..core import torch_internals
from ..kernels import casts, convolution
from ..signature.switches import put_in_force
from .making import ANSWER, NodeName


def main(asked: BinaryIO, answers: BinaryIO) -> None:
    """Answer each job that is asked: `_compile`'s result, or a text that says why not."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                jobs.put(pickle.load(asked))
        finally:  # in the middle of a job too: nobody waits for it, or for compilers that it has started
            with suppress(AttributeError, OSError):
                os.killpg(os.getpid(), signal.SIGKILL)
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    with suppress(AttributeError, OSError):  # where the system has neither
        if os.getloadavg()[0] + 1 < (os.cpu_count() or 1):
            os.nice(5)  # the image goes first; on a busy machine the process would get next to nothing
    lacking = torch_internals.find_missing(torch_internals.IN_WORKER)
    if lacking is None:
        _keep_off_devices()
    while True:
        try:
            if lacking is not None:
                raise torch_internals.Lacking(f"this torch has no {lacking}")
            answer: tuple[bytes, str] | str = _compile(**jobs.get())
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        answers.write(ANSWER)
        pickle.dump(answer, answers)
        answers.flush()


def _keep_off_devices() -> None:
    """Have torch build kernels here and not load them, and describe tensors without making one."""
    os.environ["TORCH_WARM_POOL"] = "0"  # a process of 600 MB that would build kernels, and more for each core
    find_assembler, loaded, key, save = (name.get() for name in torch_internals.KERNELS_BESIDE)

    def triton(self: Any, name: str, source: str, device_str: str = "cuda") -> None:
        find_assembler()
        kernel = loaded(name, source)
        kernel.precompile(warm_cache_only=True)
        if kernel.is_statically_launchable():
            save(key(source), kernel)

    patterns = torch_internals.PATTERNS.get()
    torch_internals.KERNEL_BUILDER.replace(triton).start()
    torch_internals.NO_CONTEXT.replace(lambda device: None).start()
    torch_internals.PATTERNS.replace(lambda device: patterns(torch.device("cpu"))).start()  # else a number on it
    torch_internals.PADDING_TIMES.replace(_refuse_timing).start()


def _refuse_timing(*_: Any) -> None:
    raise RuntimeError("products would be timed on the device")


def _compile(
    graph: bytes,
    device: torch.device,
    sources: Sequence[str],
    switches: tuple,
    libraries: Iterable[str],
    settings: Sequence[dict[str, Any]],
    threads: int,
    environment: Mapping[str, str],
) -> tuple[bytes, str]:
    """Inductor's code for a traced graph, as torch's cache has it; and what that asks of sizes (`Facts.asked`).

    device: that the code is for. sources: expressions for the sizes that the graph is given, in its order.
    switches: `read_switches`. libraries: modules to import for operators. settings: of inductor, of autograd, of sizes.
    """
    from torch._functorch import config as of_autograd
    from torch._inductor import config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    os.environ.update(environment)
    torch.set_num_threads(threads)
    put_in_force(switches)
    convolution.define()
    casts.define()
    for library in libraries:
        with suppress(Exception):  # then an operator is missing, which says more
            importlib.import_module(library)
    mode = torch_internals.FAKE_MODE.get()(shape_env=ShapeEnv())
    module = torch_internals.GRAPH_PICKLER.get().loads(graph, mode)
    nodes = {node.name: node for node in module.graph.nodes}
    for node in nodes.values():
        given = (node.args, node.kwargs)
        node.args, node.kwargs = map_aggregate(given, lambda one: nodes[one] if isinstance(one, NodeName) else one)
    examples = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    with (
        torch.no_grad(),
        config.patch(settings[0] | ({} if device.type == "cpu" else {"compile_threads": 1})),  # no pool either
        of_autograd.patch(settings[1]),
        torch.fx.experimental._config.patch(settings[2]),
        torch_internals.TRACING.get()(torch_internals.TRACING_CONTEXT.get()(mode)),
        code_generation(device),
    ):
        data = pickle.dumps(torch_internals.LOOK_UP_BACKEND.get()("inductor")(module, examples).serialize())
    sizes = [size for size in examples if isinstance(size, torch.SymInt)]
    asked = mode.shape_env.produce_guards_expression(sizes) or ""
    return data, re.sub(r"L\['t(\d+)'\]", lambda found: sources[int(found[1])], asked)
