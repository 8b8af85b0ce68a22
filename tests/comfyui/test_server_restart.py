"""A ComfyUI that starts again, with a workflow it has run before: nothing is compiled, and the image is the same."""

import dataclasses

import pytest
import safetensors.torch
import torch
from tiny_dits import DITS

from bench import workflow
from bench.client import Client
from bench.comfyui import make_base
from bench.server import serving

SOME_PROMPT = """
import torch

class SomePrompt:
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    def make(self, seed):
        generator = torch.Generator().manual_seed(seed)
        pooled = torch.randn(1, 32, generator=generator)
        return ([[torch.randn(1, 24, 48, generator=generator), {"pooled_output": pooled}]],)

NODE_CLASS_MAPPINGS = {"SomePrompt": SomePrompt}
"""
"""A pack with a prompt for the smallest model that core's loader knows by its weights; no text encoder is as small."""

MODEL = "tiny-sd3.safetensors"


@pytest.fixture
def base(tmp_path):
    """A base directory with a new user folder, the model, and its prompts."""
    make_base(tmp_path)
    (tmp_path / "custom_nodes" / "some_prompt.py").write_text(SOME_PROMPT, encoding="utf-8")
    family = DITS["SD3"].family
    family = dataclasses.replace(family, config={**family.config, "num_blocks": 2})  # a middle block and the last
    folder = tmp_path / "models" / "diffusion_models"
    folder.mkdir()
    weights = family.load(torch.float32).model.diffusion_model.state_dict()
    safetensors.torch.save_file(weights, folder / MODEL)
    return tmp_path


def graph(width=64, height=64):
    def node(class_type, **inputs):
        return {"class_type": class_type, "inputs": inputs}

    return {
        "unet": node("UNETLoader", unet_name=MODEL, weight_dtype="default"),
        "model": node(
            "AccelModel", model=["unet", 0], shapes="any size", backend="inductor", on_trouble="stop with the reason"
        ),
        "positive": node("SomePrompt", seed=1),
        "negative": node("SomePrompt", seed=2),
        "latent": node("EmptySD3LatentImage", width=width, height=height, batch_size=1),
        "sampler": node(
            "KSampler",
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            **dict(seed=3, steps=3, cfg=4.0, sampler_name="euler", scheduler="normal", denoise=1.0),
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="restart"),
    }


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
