"""Pipelines whose weights accelerate or diffusers move about, and models that somebody else compiles."""

import accelerate
import pytest
import torch
from comfy_accel.accel import accelerate_pipeline, accelerated, restore
from comfy_accel.accel.cache.graph_cache import shared
from comfy_accel.accel.core.fallbacks import fallbacks
from kit import pipeline_zoo as zoo
from kit.pipeline_zoo import compiled_image, eager_image, image
from kit.tiny_pipelines import difference

TOLERANCE = 1e-5
"""Of the largest value: the graphs are run as they were captured."""

FAST = {"ignores": ("vae",), "backend": "eager"}
MOVED = "its weights are moved to the device part by part (sequential CPU offload, group offloading)"


def hits():
    return shared.statistics()["hits"]


@pytest.fixture
def pipe():
    return zoo.pipeline("StableDiffusionPipeline")


@pytest.fixture(scope="module")
def plain():
    return image(zoo.pipeline("StableDiffusionPipeline"))


def reasons():
    return [(row["block"], row["reason"]) for row in fallbacks.rows()]


@pytest.mark.parametrize("offloaded_first", [True, False])
def test_whole_models_that_are_moved_in_their_calls_run_compiled(pipe, plain, offloaded_first):
    forward = pipe.unet.forward
    if offloaded_first:
        pipe.enable_model_cpu_offload(device="cpu")
    accelerate_pipeline(pipe, **FAST, stop_on_trouble=True)
    if not offloaded_first:
        pipe.enable_model_cpu_offload(device="cpu")
    for _ in range(2):  # after an image all hooks are new
        assert difference(compiled_image(pipe), plain) < TOLERANCE
    restore(pipe)
    assert torch.equal(eager_image(pipe), plain)
    pipe.remove_all_hooks()
    assert pipe.unet.forward == forward
    assert reasons() == []


class Arrives(accelerate.hooks.CpuOffload):
    """Brings the weights in another type, as a device would be another."""

    def pre_forward(self, module, *args, **kwargs):
        module.to(torch.float32)
        return args, kwargs


def test_blocks_are_looked_at_where_their_weights_arrive(pipe):
    latent, prompt = torch.randn(2, 4, 8, 8), torch.randn(2, 5, zoo.WIDTH)
    with torch.no_grad(), accelerated(pipe, **FAST, stop_on_trouble=True):
        image(pipe)
        expected = pipe.unet(latent, 1, prompt).sample
        before = shared.statistics()["graphs"]
        pipe.unet.to(torch.float64)
        accelerate.hooks.add_hook_to_module(pipe.unet, Arrives(torch.device("cpu")))
        assert torch.equal(pipe.unet(latent, 1, prompt).sample, expected)
        assert shared.statistics()["graphs"] == before


@pytest.mark.parametrize("offloaded_first", [True, False])
def test_weights_that_are_moved_layer_by_layer_run_as_they_are_with_the_reason(pipe, offloaded_first):
    unet, latent, prompt = pipe.unet, torch.randn(2, 4, 8, 8), torch.randn(2, 5, zoo.WIDTH)
    with torch.no_grad():
        plain = unet(latent, 1, prompt).sample
        if offloaded_first:
            accelerate.cpu_offload(unet, torch.device("cpu"))
        accelerate_pipeline(pipe, **FAST)
        if not offloaded_first:
            accelerate.cpu_offload(unet, torch.device("cpu"))
        assert next(unet.parameters()).is_meta
        used = hits()
        assert torch.equal(unet(latent, 1, prompt).sample, plain)
        assert hits() == used
    assert reasons() == [("UNet2DConditionModel", MOVED)]


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_weights_that_are_moved_group_by_group_run_as_they_are_with_the_reason(pipe, plain, level):
    accelerate_pipeline(pipe, **FAST)
    here = torch.device("cpu")
    given = {"num_blocks_per_group": 1} if level == "block_level" else {}
    pipe.unet.enable_group_offload(onload_device=here, offload_device=here, offload_type=level, **given)
    assert difference(eager_image(pipe), plain) < TOLERANCE
    assert reasons() == [("UNet2DConditionModel", MOVED)]


def test_layers_that_are_stored_in_another_type_run_as_they_are_and_blocks_of_convolutions_uncompiled(pipe):
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    expected = image(pipe)
    with accelerated(pipe, **FAST):
        assert difference(image(pipe), expected) < TOLERANCE
    assert {block for block, _ in reasons()} == {"ResnetBlock2D"}


def as_a_whole(pipe):
    pipe.unet = torch.compile(pipe.unet, backend="eager")


def in_place(pipe):
    pipe.unet.compile(backend="eager")


def block_by_block(pipe):
    for block in pipe.unet.mid_block.resnets:
        block.compile(backend="eager")


@pytest.mark.parametrize("compile_it", [as_a_whole, in_place, block_by_block])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_models_that_somebody_else_compiles_are_left_to_them(pipe, plain, compile_it, compiled_first):
    if compiled_first:
        compile_it(pipe)
    accelerate_pipeline(pipe, **FAST)
    if not compiled_first:
        compile_it(pipe)
    theirs = pipe.unet.__dict__.get("_compiled_call_impl")
    # Compiling is not the question here: with this, what they compiled runs as it is.
    with torch.compiler.set_stance("force_eager"):
        assert difference(eager_image(pipe), plain) < TOLERANCE
    if compiled_first or compile_it is not in_place:
        assert len(reasons()) == 1 and "already compiled as a whole" in reasons()[0][1]
    restore(pipe)
    if compile_it is in_place:
        assert pipe.unet.__dict__["_compiled_call_impl"] is theirs


def test_autocast_and_gradients_run_as_they_are(pipe):
    unet, prompt = pipe.unet, zoo.prompt(pipe)["prompt_embeds"]
    latent = torch.randn(1, 4, 8, 8)
    with accelerated(pipe, **FAST):
        used = hits()
        unet(latent, 1, prompt).sample.sum().backward()
        assert unet.conv_in.weight.grad is not None and hits() == used
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            unet(latent, 1, prompt)
        assert hits() == used
    assert {reason.split(",")[0] for _, reason in reasons()} == {"autocast is on", "gradients are requested"}
