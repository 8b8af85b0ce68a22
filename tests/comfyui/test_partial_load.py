"""A model of which a part is on the device: whole blocks run compiled, the others as they are, and images are alike.

On the CPU the parts that are loaded and those that are not share a device, so what is moved is not seen here; what is
compiled is.
"""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models import streamed
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from kit import tiny_models
from kit.compiled import graphs
from kit.other_nodes import lora


@pytest.fixture
def model():
    model = tiny_models.res_blocks(model_channels=64)
    yield model
    model.detach()


def load(model, share: float) -> int:
    """Load this share of the weights; how many blocks are loaded whole."""
    model.detach()
    model.load(torch.device("cpu"), lowvram_model_memory=int(model.model_size() * share), full_load=share == 1)
    return len(survey(model.model.diffusion_model, plain=streamed.plain).regions)


def ran_compiled(model, cache) -> int:
    """How many blocks of the accelerated model ran compiled; the result is that of the plain one, bit for bit."""
    x, t, context = torch.randn(2, 4, 12, 15), torch.tensor([5.0, 5.0]), torch.randn(2, 77, tiny_models.CONTEXT_DIM)
    before = cache.statistics()["hits"]
    with torch.inference_mode():
        plain = model.model.apply_model(x, t, c_crossattn=context, transformer_options={})
        options = {"wrappers": accelerate(model, CompileSettings(backend="eager"), cache).wrappers}
        assert torch.equal(model.model.apply_model(x, t, c_crossattn=context, transformer_options=options), plain)
    return cache.statistics()["hits"] - before


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_blocks_that_are_loaded_whole_run_compiled_on_the_same_graphs_and_the_others_as_they_are(model, strength):
    cache = GraphCache()
    all_blocks = load(model, 1)
    ran_compiled(model, cache)
    compiled = graphs()
    patched = lora(model, strength=strength) if strength else model
    for share in (0.995, 0.2, 1):  # all but a part of one block; the largest parts alone; all
        whole = load(patched, share)
        assert whole <= all_blocks and (whole == all_blocks) == (share == 1)
        assert ran_compiled(patched, cache) == whole
    assert graphs() == compiled > 0
    assert {row["fields"]["what"].partition(", ")[2] for row in fallbacks.rows()} == {
        "since the model is loaded in part"
    }
    patched.detach()


def test_a_block_whose_weights_wait_is_told_with_the_reason(model):
    load(model, 0.2)
    reasons = {str(reason) for _, reason in survey(model.model.diffusion_model, plain=streamed.plain).left_eager}
    assert reasons == {
        "it cannot be compiled as it is: weights that wait in the CPU's memory, since the model is loaded in part"
    }


def test_module_that_counts_as_false_is_copied_without_what_core_keeps_on_it():
    class Empty(torch.nn.Module):
        def __len__(self):
            return 0

    block = torch.nn.Sequential(Empty())
    block[0].seed_key = "0"
    assert not hasattr(streamed.plain(block)[0], "seed_key") and hasattr(block[0], "seed_key")
