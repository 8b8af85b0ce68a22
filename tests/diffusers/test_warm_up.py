"""A warm-up: one call of the pipeline, after which nothing is compiled."""

import pytest

pytest.importorskip("diffusers.schedulers", reason="needs the package diffusers: tests/requirements.txt")

import torch  # noqa: E402
from comfy_accel.accel import accelerate_pipeline, warm_up  # noqa: E402
from kit import pipeline_zoo as zoo  # noqa: E402
from kit.compiled import graphs  # noqa: E402
from kit.thorough import thorough_except  # noqa: E402
from kit.tiny_pipelines import difference  # noqa: E402

TOLERANCE = 1e-4
"""Of the largest value: the graphs are run as they were captured."""


def inputs(pipe, size, steps=2, **given):
    """Arguments of a call at (width, height), the same for the same arguments."""
    kind = type(pipe).__name__
    picture = torch.rand(1, 3, size[1], size[0], generator=torch.Generator().manual_seed(7))
    made = {"width": size[0], "height": size[1], "num_inference_steps": steps}
    if "Img2Img" in kind:
        made = {"image": picture, "num_inference_steps": 2 * steps, "strength": 0.5}
    if "Inpaint" in kind:
        made |= {"image": picture, "mask_image": picture[:, :1].round()}
    if "ControlNet" in kind:
        nets = getattr(pipe.controlnet, "nets", None)
        made["control_image" if "Img2Img" in kind else "image"] = picture if nets is None else [picture] * len(nets)
    return {**made, "output_type": "pt", **zoo.prompt(pipe), **given}


def several_controlnets():
    pipe = zoo.pipeline("StableDiffusionPipeline")
    nets = [zoo.controlnet(pipe.unet, seed) for seed in (0, 1)]
    return zoo.pipeline("StableDiffusionControlNetPipeline", **{**pipe.components, "controlnet": nets})


# The second of the first two is the first and a ControlNet.
KINDS = [
    lambda: zoo.pipeline("StableDiffusionXLImg2ImgPipeline", "LCMScheduler"),
    lambda: zoo.pipeline("StableDiffusionXLControlNetImg2ImgPipeline", "LCMScheduler"),
    lambda: zoo.pipeline("StableDiffusionInpaintPipeline"),
    several_controlnets,
]


@pytest.mark.parametrize("make", thorough_except(KINDS, KINDS[1]))
@pytest.mark.parametrize("ignores", thorough_except([("vae",), ()], ("vae",)))
def test_no_size_or_batch_compiles_after_one_image(make, ignores):
    pipe = make()

    def images():
        calls = [((32, 64), 1), ((32, 64), 2), ((48, 80), 2), ((88, 40), 1)]
        made = [inputs(pipe, size, num_images_per_prompt=batch) for size, batch in calls]
        if "XL" in type(pipe).__name__:
            made.append(inputs(pipe, (48, 80), guidance_scale=1.0))
        return [pipe(**given, generator=torch.Generator().manual_seed(1))[0] for given in made]

    plain = images()
    accelerate_pipeline(pipe, ignores=ignores, backend="eager", stop_on_trouble=True)
    before = graphs()
    warmed = warm_up(pipe, **inputs(pipe, (64, 64)))
    assert warmed.compiled == graphs() - before
    before = graphs()
    for actual, expected in zip(images(), plain, strict=True):
        assert difference(actual, expected) < TOLERANCE
    assert graphs() == before


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
    seen, arguments = [], inputs(pipe, (64, 32))
    pipe.unet.register_forward_pre_hook(lambda unet, args, kwargs: seen.append(tuple(args[0].shape)), with_kwargs=True)
    before = torch.get_rng_state()
    left_out = {"num_inference_steps", "strength"}
    warmed = warm_up(pipe, **{name: value for name, value in arguments.items() if name not in left_out}, **given)
    assert seen == [(2, 4, 8, 16)] * steps  # guided: each image twice
    assert torch.equal(torch.get_rng_state(), before)
    assert str(warmed).startswith(f"Warm-up: {warmed.compiled} graph") and warmed.seconds > 0
    again = warm_up(pipe, **arguments)
    assert again.compiled == again.loaded == 0
