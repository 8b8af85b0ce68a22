"""A process that uses a store, for tests that end it in the middle or run two: `python store_process.py VERB FOLDER`.

Prints a line when it is ready and waits for one, so that two start together.
"""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import pack  # noqa: E402

pack.load()
import store_kit  # noqa: E402


def save_forever(folder):
    """Save graphs of random bytes, each of which says its own checksum, until the process is ended."""
    number = 0
    while True:
        data = os.urandom(200_000)
        store_kit.save(store_kit.store(folder, max_bytes=3_000_000), f"{number % 8}", data)
        number += 1


def real(folder):
    """Load or compile one small block and print what happened and what it computed."""
    import torch
    from comfy_accel.accel.block_runner import BlockRunner, CompileSettings
    from comfy_accel.accel.fallbacks import fallbacks
    from comfy_accel.accel.graph_cache import GraphCache
    from comfy_accel.accel.regions import survey
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()) for _ in range(2)))
    model = Model(model).eval().requires_grad_(False)
    cache = GraphCache()
    cache.store = store_kit.store(folder)
    runners = [BlockRunner(region, cache, CompileSettings()) for region in survey(model).regions]
    out = []
    for batch in (2, 1, 5):
        x = torch.linspace(-1, 1, batch * 8).view(batch, 8)
        for runner in runners:
            x = runner(runner._region.block.forward, x)
        out.append(x.tolist())
    statistics = cache.statistics()
    print(
        json.dumps(
            {
                "compilations": statistics["compilations"],
                "loaded": statistics["loaded"],
                "traced": counters["stats"]["unique_graphs"],
                "store": cache.store.statistics(),
                "uncompiled": fallbacks.rows(),
                "out": out,
            }
        ),
        flush=True,
    )


def rounds(root):
    """Twenty times or as often as asked: an empty store, shared with another process that does the same."""
    for line in sys.stdin:
        folder = Path(root) / line.strip()
        mine = store_kit.store(folder)
        compiled = 0
        found = store_kit.load(mine)
        if found is None:
            compiled += 1
            store_kit.save(mine, data=b"the code")
            found = store_kit.load(store_kit.store(folder))
        print(json.dumps({"compiled": compiled, "image": found[0].decode(), "misses": store_kit.reasons(mine)}))
        sys.stdout.flush()


def make_model():
    import torch

    class Model(torch.nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = torch.nn.ModuleList(blocks)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return Model


if __name__ == "__main__":
    Model = make_model()
    print("ready", flush=True)
    {"save": save_forever, "real": real, "rounds": rounds}[sys.argv[1]](Path(sys.argv[2]))
