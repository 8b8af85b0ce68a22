"""A process that uses a store, for tests that run two: `python store_process.py VERB FOLDER`. Says when it is ready."""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import pack  # noqa: E402

pack.load()
import store_kit  # noqa: E402
import torch  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(self.norm(x)))


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def real(folder):
    """Load or compile one small block and print what happened and what it computed."""
    from comfy_accel.accel import store_location
    from comfy_accel.accel.block_runner import BlockRunner, CompileSettings
    from comfy_accel.accel.fallbacks import fallbacks
    from comfy_accel.accel.graph_cache import GraphCache
    from comfy_accel.accel.graph_store import GraphStore
    from comfy_accel.accel.regions import survey
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = Layers().eval().requires_grad_(False)
    cache = GraphCache()
    if os.environ.get("ACCEL_STORE") != "off":
        folder_of_graphs = store_location.folder(folder)
        cache.store = GraphStore(folder_of_graphs, store_location.secret(folder))
    runners = [BlockRunner(region, cache, CompileSettings()) for region in survey(model).regions]
    out = []
    for batch in (2, 1, 5):
        x = torch.linspace(-1, 1, batch * 8).view(batch, 8)
        for block, runner in zip(model.blocks, runners, strict=True):
            x = runner(block.forward, x)
        out.append(x.tolist())
    statistics = cache.statistics()
    print(
        json.dumps(
            {
                "compilations": statistics["compilations"],
                "loaded": statistics["loaded"],
                "traced": counters["stats"]["unique_graphs"],
                "store": cache.store and cache.store.statistics(),
                "inductor": dict(counters["inductor"]),
                "autograd": dict(counters["aot_autograd"]),
                "uncompiled": fallbacks.rows(),
                "out": out,
            }
        ),
        flush=True,
    )


def rounds(root):
    """For each line read: an empty store of that name, shared with another process that does the same."""
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


if __name__ == "__main__":
    print("ready", flush=True)
    {"real": real, "rounds": rounds}[sys.argv[1]](Path(sys.argv[2]))
