"""A warm-up: one call of the pipeline, after which nothing is compiled."""

import pytest
import torch
from comfy_accel.accel import accelerate_pipeline, warm_up
from kit import pipeline_zoo as zoo
from kit.compiled import graphs
from kit.tiny_pipelines import difference

TOLERANCE = 1e-4
"""Of the largest value: the graphs are run as they were captured."""


KINDS = {
    "SDXL, from an image": lambda: zoo.pipeline("StableDiffusionXLImg2ImgPipeline", "LCMScheduler"),
    "inpainting": lambda: zoo.pipeline("StableDiffusionInpaintPipeline"),
    "two ControlNets": zoo.several_controlnets,
    "Wan": lambda: zoo.pipeline("WanPipeline"),
}


@pytest.mark.parametrize("name", KINDS)
def test_no_size_or_batch_compiles_after_one_image(name):
    pipe = KINDS[name]()

    def images():
        odd = (96, 48) if name == "Wan" else (88, 40)
        made = [zoo.image(pipe, *size, batch=batch) for size, batch in (((32, 64), 1), ((32, 64), 2), ((48, 80), 2))]
        made.append(zoo.image(pipe, *odd))
        return made + ([zoo.image(pipe, 48, 80, guidance_scale=1.0)] if "SDXL" in name else [])

    plain = images()
    accelerate_pipeline(pipe, ignores=("vae",), backend="eager", stop_on_trouble=True)
    before = graphs()
    warmed = warm_up(pipe, **zoo.arguments(pipe, 64, 64))
    assert warmed.compiled == graphs() - before
    before = graphs()
    for actual, expected in zip(images(), plain, strict=True):
        assert difference(actual, expected) < TOLERANCE
    assert graphs() - before == (name == "Wan")  # its positions have no rows for images: anew for a larger batch


@pytest.mark.parametrize(
    ("kind", "given", "steps"),
    [
        ("StableDiffusionPipeline", {}, 1),
        ("StableDiffusionPipeline", {"num_inference_steps": 3}, 3),
        ("StableDiffusionImg2ImgPipeline", {"strength": 0.3}, 1),
        ("StableDiffusionImg2ImgPipeline", {}, 1),
    ],
)
def test_warm_up_is_one_step_and_changes_no_later_image(kind, given, steps):
    pipe = zoo.pipeline(kind, "EulerAncestralDiscreteScheduler")
    accelerate_pipeline(pipe, backend="eager")
    seen, arguments = [], zoo.arguments(pipe, 64, 32)
    pipe.unet.register_forward_pre_hook(lambda unet, args, kwargs: seen.append(tuple(args[0].shape)), with_kwargs=True)
    before = torch.get_rng_state()
    left_out = {"num_inference_steps", "strength"}
    warmed = warm_up(pipe, **{name: value for name, value in arguments.items() if name not in left_out}, **given)
    assert seen == [(2, 4, 8, 16)] * steps  # guided: each image twice
    assert torch.equal(torch.get_rng_state(), before)
    assert str(warmed).startswith(f"Warm-up: {warmed.compiled} graph") and warmed.seconds > 0
    again = warm_up(pipe, **arguments)
    assert again.compiled == again.loaded == 0
