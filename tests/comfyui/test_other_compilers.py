"""Nodes that put torch.compile around a model that is accelerated: it is left to them, with one line that says so."""

import logging

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings, Trouble
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_api.torch_helpers import set_torch_compile_wrapper
from kit import tiny_models
from kit.blocks import reasons

SIZE = {"width": 64, "height": 64, "steps": 2}


def by_wrapper(model):
    """As core's TorchCompileModel."""
    set_torch_compile_wrapper(model, backend="eager", fullgraph=True)


def by_blocks(model):
    """As KJNodes."""
    names = [name for name, _ in model.model.named_modules() if name.endswith("transformer_blocks.0")]
    set_torch_compile_wrapper(model, backend="eager", keys=names)


def by_patch(model):
    """As WaveSpeed and TeaCache."""
    network = model.get_model_object("diffusion_model")
    model.add_object_patch("diffusion_model", torch.compile(network, backend="eager", fullgraph=True))


@pytest.mark.parametrize("compiled", [by_wrapper, by_blocks, by_patch])
@pytest.mark.parametrize("accelerated_first", [True, False])
def test_model_that_another_node_compiles_is_left_to_it_and_blocks_run_compiled_without_it(
    compiled, accelerated_first, caplog, capfd
):
    torch._dynamo.reset()
    model, cache = tiny_models.small_unet(), GraphCache()
    expected = tiny_models.sample(model, **SIZE)

    def fast(model, **settings):
        return accelerate(model, CompileSettings(backend="eager", **settings), cache)

    tiny_models.sample(fast(model), **SIZE)
    before = cache.statistics()
    both = (fast(model) if accelerated_first else model).clone()
    compiled(both)
    both = both if accelerated_first else fast(both)
    frames = []
    for _ in range(2):
        torch.testing.assert_close(tiny_models.sample(both, **SIZE), expected)
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert frames[0] == frames[1] and cache.statistics()["hits"] == before["hits"]
    assert len(reasons()) == 1 and "another node compiles the model" in reasons()[0]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1 and said[0].startswith("UNetModel runs without Accel: another node")
    assert "torch._dynamo" not in capfd.readouterr().err
    if accelerated_first:
        compiled(stops := fast(model, stop_on_trouble=True))
        with pytest.raises(Trouble, match="another node compiles the model"):
            tiny_models.sample(stops, **SIZE)
    for other in (model, tiny_models.small_unet(seed=5)):
        hits = cache.statistics()["hits"]
        torch.testing.assert_close(tiny_models.sample(fast(other), **SIZE), tiny_models.sample(other, **SIZE))
        assert cache.statistics()["hits"] - hits == before["hits"]
    assert cache.statistics()["compilations"] == before["compilations"]
