"""A ComfyUI that starts again, with a workflow it has run before: nothing is compiled, and the image is the same."""

import pytest
import safetensors.torch
import torch

from dev.bench import fleet_base
from dev.tools import workflow
from dev.tools.client import Client
from dev.tools.server import serving


@pytest.fixture
def base(tmp_path):
    """A base directory with a new user folder, the model, and its prompts."""
    fleet_base.make(tmp_path)
    return tmp_path


def graph(width=64, height=64):
    asked = fleet_base.graph(width, height, seed=3, backend="inductor", steps=3)
    del asked["image"]
    asked["save"] = {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": "restart"}}
    return asked


def run(base, url, asked):
    """The finished latent."""
    (saved,) = Client(url).run(asked, timeout=300).outputs["save"]["latents"]
    return safetensors.torch.load_file(base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]


@pytest.mark.thorough  # compiles two kinds with inductor, in a server of their own
def test_server_that_starts_again_loads_what_it_compiled_before(base):
    states, latents = [], []
    for number in (1, 2):
        environment = {
            "ACCEL_STORE": "",
            "TORCHINDUCTOR_CACHE_DIR": str(base / f"torch-{number}"),  # nothing of torch's own is left
            "TORCHINDUCTOR_VEC_ISA_OK": "0",  # or it builds half a dozen programs to find out
            "OMP_NUM_THREADS": "1",
        }
        with serving(base, environment=environment) as server:
            client = Client(server.url)
            assert client.get("/accel/state")["graph_cache"]["compilations"] == 0
            latents.append(run(base, server.url, graph()))
            states.append(client.get("/accel/state"))
            if number == 2:
                other_size = run(base, server.url, graph(96, 72))
                plain = run(base, server.url, workflow.bypass(graph(96, 72)))
                last = client.get("/accel/state")["graph_cache"]
    first, second = states
    assert first["graph_cache"]["compilations"] == first["graph_store"]["saved"] == 2
    assert first["graph_cache"]["loaded"] == second["graph_cache"]["compilations"] == 0
    assert second["graph_cache"]["loaded"] == 2 and second["graph_store"]["misses"] == []
    assert first["graph_cache"]["fallbacks"] == second["graph_cache"]["fallbacks"] == []
    assert latents[0].std() > 0 and torch.equal(*latents)
    assert last["compilations"] == 0 and last["fallbacks"] == []
    torch.testing.assert_close(other_size, plain, rtol=1e-3, atol=1e-4)
