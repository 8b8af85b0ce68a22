"""DeepCache with uniform steps and held features, against the reference implementation of its authors.

The reference divides the model at a branch; depth is the branch's number, plus 1. It finds the step in the
scheduler's list of timesteps, where second-order samplers and PNDM list some twice, and counts those as steps:
there it is on purpose that we differ, since what Heun lists from the second step on has odd places only,
and the reference at interval 2 never again runs in full. It understands sizes in multiples of 64 pixels.
"""

import pytest
import torch

for needed in ("diffusers.schedulers", "DeepCache"):
    pytest.importorskip(needed, reason="needs the packages diffusers and DeepCache: tests/requirements.txt")

from DeepCache import DeepCacheSDHelper  # noqa: E402
from kit import tiny_pipelines  # noqa: E402
from kit.tiny_pipelines import difference, pipeline, sample, sample_cached  # noqa: E402

TOLERANCE = 1e-5
"""Of the largest value. Measured: none at all."""


def sample_by_reference(pipe, interval, branch, **arguments):
    helper = DeepCacheSDHelper(pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=branch)
    helper.enable()
    try:
        return sample(pipe, **arguments)
    finally:
        helper.disable()


def assert_equals_reference(pipe, interval, branch, depth=None, **arguments):
    """Returns the latents of both, and our full and skipped steps."""
    cached, counts = sample_cached(pipe, interval, branch + 1 if depth is None else depth, **arguments)
    assert difference(cached, sample_by_reference(pipe, interval, branch, **arguments)) <= TOLERANCE
    return cached, counts


@pytest.fixture(scope="module")
def plain():
    return sample(pipeline())


@pytest.mark.parametrize("branch", [0, 2, 7])
@pytest.mark.parametrize("interval", [2, 3, 5])
def test_any_interval_and_branch(interval, branch, plain):
    cached, counts = assert_equals_reference(pipeline(), interval, branch)
    assert counts == [{2: (3, 3), 3: (2, 4), 5: (2, 4)}[interval]]
    assert difference(cached, plain) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("height", "width", "batch", "scheduler"),
    [
        (64, 64, 1, "EulerDiscreteScheduler"),
        (64, 64, 2, "DDIMScheduler"),
        (64, 128, 1, "DDIMScheduler"),
        (64, 128, 2, "EulerDiscreteScheduler"),
        (128, 64, 1, "EulerDiscreteScheduler"),
        (128, 64, 2, "DDIMScheduler"),
    ],
)
def test_sizes_batches_and_schedulers(height, width, batch, scheduler):
    assert_equals_reference(pipeline(scheduler), 3, 2, height=height, width=width, batch=batch)


@pytest.mark.parametrize(
    "scheduler",
    [
        "DPMSolverMultistepScheduler",
        "EulerAncestralDiscreteScheduler",
        "LCMScheduler",
        "UniPCMultistepScheduler",
    ],
)
def test_other_schedulers_of_one_evaluation_a_step(scheduler):
    assert_equals_reference(pipeline(scheduler), 3, 1)


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_layout_of_sdxl(depth):
    assert_equals_reference(pipeline(layout=tiny_pipelines.SDXL), 3, depth - 1)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_one_resnet_in_a_block(depth):
    block, layer = divmod(depth - 1, 2)
    assert_equals_reference(pipeline(layout=tiny_pipelines.ONE_RESNET), 3, 3 * block + layer, depth)


@pytest.mark.parametrize("branch", [0, 7])
def test_controlnet(branch):
    from diffusers import ControlNetModel

    unet = tiny_pipelines.unet()
    controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8, 16, 32)).eval()
    for parameter in controlnet.parameters():
        if not parameter.any():  # Its last layers are zero until they have learned.
            torch.nn.init.normal_(parameter, std=0.2)
    pipe = pipeline(kind="StableDiffusionControlNetPipeline", unet=unet, controlnet=controlnet)
    assert_equals_reference(pipe, 3, branch, image=torch.rand(1, 3, 64, 64))


@pytest.mark.parametrize("branch", [0, 2])
def test_freeu(branch):
    # In a block that FreeU changes, the reference has it change the remembered feature again on every skipped step.
    pipe = pipeline()
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    assert_equals_reference(pipe, 3, branch)


def test_image_to_image_counts_from_its_first_step():
    pipe = pipeline("EulerDiscreteScheduler", kind="StableDiffusionImg2ImgPipeline")
    image = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(7))
    _, counts = assert_equals_reference(pipe, 3, 1, steps=10, image=image, strength=0.7)
    assert counts == [(3, 4)]
