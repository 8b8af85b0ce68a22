"""A process that uses a store, for tests that run several: `python store_process.py VERB FOLDER`."""

import dataclasses
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from dev.tools import pack  # noqa: E402

pack.load()
import torch  # noqa: E402
from comfy_accel.accel.cache.graph_cache import GraphCache  # noqa: E402
from comfy_accel.accel.core.compile_settings import CompileSettings  # noqa: E402
from comfy_accel.accel.core.fallbacks import fallbacks  # noqa: E402
from comfy_accel.accel.dispatch.block_runner import BlockRunner  # noqa: E402
from comfy_accel.accel.fingerprint.survey import survey  # noqa: E402
from comfy_accel.accel.store.graph_store import GraphStore  # noqa: E402

from kit import stores  # noqa: E402

KILLED_WIDTHS = (8, 12, 16)
KILLED_STORE_BYTES = 1_000_000


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(self.norm(x)))


class Scaled(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.weight


class CheapBlock(torch.nn.Module):
    """Compiles in a second, where one with a matrix in it takes several; a kind of its own for each width."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = Scaled(width), Scaled(width)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.inner(x)) + torch.sin(self.outer(x))


class Layers(torch.nn.Module):
    """Two blocks of one kind."""

    def __init__(self, make):
        super().__init__()
        self.blocks = torch.nn.ModuleList(make() for _ in range(2))


def run(make, width, store, batches=(2, 1, 5)):
    """Load or compile the one kind of a model's blocks, in a cache of its own: what happened, and what came out.

    make: gives a block over [B, width]; its weights are the same in every call. out: exact to the last bit.
    """
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = Layers(make).eval().requires_grad_(False)
    cache = GraphCache()
    cache.store = store
    fallbacks.clear()
    traced = counters["stats"]["unique_graphs"]
    runners = [BlockRunner(region, cache, CompileSettings()) for region in survey(model).regions]
    compiled, eager = [], []
    for batch in batches:
        x = y = torch.linspace(-1, 1, batch * width).view(batch, width)
        for block, runner in zip(model.blocks, runners, strict=True):
            x, y = runner(block.forward, x), block(y)
        compiled.append(x)
        eager.append(y)
    return {
        "compilations": cache.statistics()["compilations"],
        "loaded": cache.statistics()["loaded"],
        "traced": counters["stats"]["unique_graphs"] - traced,
        "store": store and store.statistics(),
        "uncompiled": fallbacks.rows(),
        "off": max((one - other).abs().max().item() for one, other in zip(compiled, eager, strict=True)),
        "out": [x.tolist() for x in compiled],
    }


def say(answer):
    print(json.dumps(answer), flush=True)


def real(home):
    """One small block with a matrix in it, with the store where ComfyUI would have it."""
    from comfy_accel.accel.store import location
    from torch._dynamo.utils import counters

    store = None
    if os.environ.get("ACCEL_STORE") != "off":
        store = GraphStore(location.folder(home))
    answer = run(Block, 8, store)
    say({**answer, "inductor": dict(counters["inductor"]), "autograd": dict(counters["aot_autograd"])})


def rounds(root):
    """For each line read, {"home", "width", "wait" in seconds}: a store there, maybe empty, shared with others."""
    run(partial(CheapBlock, 4), 4, None)  # the compiler's own start, which is not what is measured against each other
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        time.sleep(asked["wait"])
        width = asked["width"]
        say(run(partial(CheapBlock, width), width, stores.store(root / asked["home"])))


class Gathering(GraphStore):
    """Has nothing, and keeps what it is given to save."""

    gathered = ()

    def load(self, *arguments, **options):
        return None

    def save(self, *arguments, **options):
        self.gathered = (*self.gathered, arguments)
        return False


def kills(home):
    """For each line read, a number of seconds: a process that saves real graphs without end is killed after so long.

    What is said then is what a new store, as at a start, gave for each of the graphs.
    """
    gathering = Gathering(None)
    for width in KILLED_WIDTHS:
        run(partial(CheapBlock, width), width, gathering)
    print("ready", flush=True)
    for line in sys.stdin:
        listen, begun = os.pipe()
        child = os.fork()
        if not child:
            save_without_end(home, gathering.gathered, begun)
        os.close(begun)
        os.read(listen, 1)
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        os.close(listen)
        answers = [run(partial(CheapBlock, width), width, stores.store(home)) for width in KILLED_WIDTHS]
        say({"killed": killed, "starts": answers})


def save_without_end(home, gathered, begun):
    """Each graph under its own key and under ever new ones, so that the oldest have to go. Ends if one is not saved."""
    try:
        store = stores.store(home, max_bytes=lambda: KILLED_STORE_BYTES)
        os.write(begun, b"b")
        saved, number = True, 0
        while saved:
            key, name, devices, graph, *rest = gathered[number % len(gathered)]
            number += 1
            for under in (key, dataclasses.replace(key, sizes=((os.getpid(), number),))):
                saved = saved and store.save(under, name, devices, dataclasses.replace(graph), *rest)
        print(store.statistics(), file=sys.stderr, flush=True)
    finally:
        os._exit(1)  # never back into the code of the process that it was forked from


if __name__ == "__main__":
    {"real": real, "rounds": rounds, "kills": kills}[sys.argv[1]](Path(sys.argv[2]))
