"""Which allocator torch has in a server, by what was chosen and by whom: on the made-up device, which ComfyUI takes for
an NVIDIA card."""

import os

import pytest
from kit import made_up_device

from dev.tools import comfyui, synthetic, workflow
from dev.tools.client import Client
from dev.tools.comfyui import make_base, offer_checkpoint
from dev.tools.server import serving

pytestmark = pytest.mark.thorough  # servers of their own; what is chosen when is in unit/test_prestartup.py

OURS, CORES = "native", "cudaMallocAsync"
NO_NODES = "NODE_CLASS_MAPPINGS = {}\n"
WITHOUT_VALUES = f"""
import functools, sys
import comfy.samplers, torch

torch.backends.cudnn.enabled = False
for name, module in list(sys.modules.items()):
    if name.endswith(".accel.signature.output_check"):
        module._worst = functools.wraps(module._worst)(lambda *of_outputs: 0.0)
comfy.samplers.calculate_sigmas = lambda sampling, scheduler, steps: torch.linspace(10.0, 0.0, steps + 1)
if "comfy_kitchen" in sys.modules:
    sys.modules["comfy_kitchen"].disable_backend("cuda")
{NO_NODES}
"""
"""As `made_up_device.prepare` and `sample_without_values`, in a server."""


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The environment of a process with the device."""
    try:
        return made_up_device.environment(made_up_device.build(tmp_path_factory.mktemp("made_up_device")))
    except made_up_device.Unavailable as why:
        pytest.skip(f"there can be no made-up device: {why}")


def another_pack(base, place):
    """The folder of a pack without nodes at a place in the order in which ComfyUI loads packs, which the disk has."""
    nodes = base / "custom_nodes"
    for number in range(100):
        pack = nodes / f"another_pack_{number}"
        if not pack.exists():
            pack.mkdir()
        if os.listdir(nodes)[place] == pack.name:
            (pack / "__init__.py").write_text(NO_NODES)
            return pack
        if not (pack / "__init__.py").exists():
            pack.rmdir()
    raise AssertionError("no name comes there")


@pytest.fixture
def start(device, tmp_path, monkeypatch):
    """Starts a server in one base directory, and gives what its page is told: the allocator's name, and the state."""
    monkeypatch.setattr(comfyui, "has_accelerator", lambda: True)

    def started(*flags, prestartup="", nodes=NO_NODES, ask=lambda client: None, **environment):
        make_base(tmp_path)
        (another_pack(tmp_path, 0) / "prestartup_script.py").write_text(prestartup)
        (another_pack(tmp_path, -1) / "__init__.py").write_text(nodes)
        variables = {"ACCEL_STORE": "off", **device, **environment}
        with serving(tmp_path, extra_flags=flags, environment=variables) as server:
            client = Client(server.url)
            state = client.get("/accel/state")
            ask(client)
            name = client.get("/system_stats")["devices"][0]["name"].rpartition(" ")[2]
            return name, state["cuda_graphs"]["code"], server.read_log()

    return started


def choose(choice):
    return lambda client: client.post("/accel/settings", {"cuda_graphs": choice})


def test_a_click_gives_torch_its_own_allocator_from_the_next_start_on_and_another_takes_it_back(start):
    name, code, log = start(ask=choose("on"))
    assert (name, code) == (CORES, "graphs_off") and "Accel: CUDA graphs" not in log
    name, code, log = start(ask=choose("off"))
    assert (name, code) == (OURS, "graphs_on") and log.count("Accel: CUDA graphs are turned on") == 1
    name, code, _ = start()
    assert (name, code) == (CORES, "graphs_off")


def test_turned_on_calls_are_captured_and_replayed(start, tmp_path):
    prompt = workflow.change(
        workflow.load(),
        {
            "CheckpointLoaderSimple": {"ckpt_name": synthetic.checkpoint().name},
            "AccelModel": {"backend": "eager", "graphs": "auto"},
            "AccelDeepCache": {"start_percent": 0.0, "end_percent": 0.01},
            "EmptyLatentImage": {"width": 64, "height": 64, "batch_size": 1},
            "KSampler": {"steps": 8},
        },
    )
    runs = []

    def ask(client):
        client.run(prompt, timeout=300)
        runs.append(client.get("/accel/state")["last_run"])

    flags = ["--extra-model-paths-config", str(offer_checkpoint(make_base(tmp_path), synthetic.checkpoint()))]
    for choice in ("off", "on"):
        start(*flags, nodes=WITHOUT_VALUES, ask=ask, ACCEL_CUDA_GRAPHS=choice)
    assert [run["captures"] for run in runs] == [0, 1] and runs[0]["replays"] == 0 < runs[1]["replays"]
    (why,) = runs[0]["fallbacks"]
    assert "turn on CUDA graphs in the Accel tab, or set ACCEL_CUDA_GRAPHS=on" in why["reason"]
