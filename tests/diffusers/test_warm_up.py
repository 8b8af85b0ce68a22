"""A warm-up over sizes and batches: nothing is compiled after it, and nothing is changed by it."""

import random

import pytest

pytest.importorskip("diffusers.schedulers", reason="needs the package diffusers: tests/requirements.txt")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from comfy_accel.accel import accelerate_pipeline, accelerated, restore, warm_up  # noqa: E402
from kit import pipeline_zoo as zoo  # noqa: E402
from kit.compiled import graphs  # noqa: E402
from kit.thorough import thorough_except  # noqa: E402
from kit.tiny_pipelines import difference  # noqa: E402

from dev.bench.session_plan import latent_side  # noqa: E402

TOLERANCE = 1e-4
"""Of the largest value: the graphs are run as they were captured."""


def pixels(width, height):
    """The size of an image whose latent is odd and even where that of the full size is."""
    return 4 * latent_side(width, 6), 4 * latent_side(height, 6)


WARMED = [pixels(1024, 1024), pixels(512, 2048), pixels(2048, 512)]
OTHERS = [pixels(720, 960), pixels(896, 768), pixels(1280, 720)]


def image(size, channels=3):
    return torch.rand(1, channels, size[1], size[0], generator=torch.Generator().manual_seed(7))


def inputs(pipe, size, **given):
    """Arguments of a call at (width, height), the same for the same arguments."""
    kind = type(pipe).__name__
    made = {"num_inference_steps": 2, "output_type": "pt", "generator": torch.Generator().manual_seed(1)}
    if "Img2Img" in kind or "Inpaint" in kind:
        made |= {"image": image(size), "num_inference_steps": 4, "strength": 0.5}
    else:
        made |= {"width": size[0], "height": size[1]}
    if "ControlNet" in kind:
        made["control_image" if "Img2Img" in kind else "image"] = image(size)
    if "Inpaint" in kind:
        made |= {"mask_image": image(size, 1).round(), "width": size[0], "height": size[1]}
    return {**made, **zoo.prompt(pipe), **given}


def output(pipe, size, **given):
    return pipe(**inputs(pipe, size, **given))[0]


# The second is the first and a ControlNet.
@pytest.mark.parametrize(
    "kind",
    thorough_except(
        ["StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLControlNetImg2ImgPipeline"],
        "StableDiffusionXLControlNetImg2ImgPipeline",
    ),
)
@pytest.mark.parametrize("ignores", thorough_except([("vae",), ()], ("vae",)))
def test_no_size_or_batch_compiles_after_three_sizes(kind, ignores):
    pipe = zoo.pipeline(kind, "LCMScheduler")
    calls = [(size, images) for size in WARMED[:1] + OTHERS for images in (1, 2)]
    plain = [output(pipe, size, num_images_per_prompt=images) for size, images in calls]
    unguided = output(pipe, OTHERS[0], guidance_scale=1.0)

    accelerate_pipeline(pipe, ignores=ignores, backend="eager", stop_on_trouble=True)
    before = graphs()
    warmed = warm_up(pipe, sizes=WARMED, batches=(1, 2), **zoo.prompt(pipe))
    assert len(warmed.compiled) == graphs() - before
    assert warmed.runs == [(*size, images) for size in WARMED for images in (1, 2)]
    before = graphs()
    for (size, images), expected in zip(calls, plain, strict=True):
        assert difference(output(pipe, size, num_images_per_prompt=images), expected) < TOLERANCE
    assert difference(output(pipe, OTHERS[0], guidance_scale=1.0), unguided) < TOLERANCE
    assert graphs() == before


def test_masks_are_made_up():
    pipe = zoo.pipeline("StableDiffusionInpaintPipeline")
    plain = output(pipe, (48, 80), num_images_per_prompt=2)
    with accelerated(pipe, ignores=("vae",), backend="eager", stop_on_trouble=True):
        warm_up(pipe, sizes=[(64, 32)], **zoo.prompt(pipe))
        before = graphs()
        assert difference(output(pipe, (48, 80), num_images_per_prompt=2), plain) < TOLERANCE
        assert graphs() == before


def test_prompts_and_images_for_several_controlnets_are_made_up(tmp_path):
    tokenizer = zoo.tokenizer(tmp_path)
    pipe = zoo.pipeline("StableDiffusionPipeline", tokenizer=tokenizer, text_encoder=zoo.text_encoder(len(tokenizer)))
    nets = [zoo.controlnet(pipe.unet, seed) for seed in (0, 1)]
    several = zoo.pipeline("StableDiffusionControlNetPipeline", **{**pipe.components, "controlnet": nets})
    accelerate_pipeline(several, ignores=("vae",), backend="eager", stop_on_trouble=True)
    warm_up(several, sizes=[(32, 64)], batches=(1, 2))
    before = graphs()
    assert len(several("two words", image=[image((64, 48))] * 2, num_inference_steps=2, output_type="pt")[0]) == 1
    assert graphs() == before


def test_width_comes_first_and_batches_count_images():
    pipe = zoo.pipeline("StableDiffusionPipeline")
    accelerate_pipeline(pipe, backend="eager")
    seen = []
    pipe.unet.register_forward_pre_hook(lambda unet, args, kwargs: seen.append(tuple(args[0].shape)), with_kwargs=True)
    warm_up(pipe, sizes=[(64, 32)], batches=(3,), **zoo.prompt(pipe))
    assert seen == [(6, 4, 8, 16)]  # guided: each image twice


class Everything:
    """What a warm-up may change nothing of."""

    def __init__(self, pipe, generator):
        self.pipe, self.generator = pipe, generator
        self.attributes = dict(vars(pipe))
        self.scheduler = dict(vars(pipe.scheduler))
        self.states = self.random_states()
        self.modules = {module: dict(vars(module)) for module in (pipe.unet, pipe.vae)}

    def random_states(self):
        own = (self.generator.get_state(), torch.get_rng_state())
        return [*(state.tolist() for state in own), random.getstate(), np.random.get_state()[1].tolist()]

    def check(self):
        assert vars(self.pipe) == self.attributes
        assert all(vars(self.pipe)[name] is value for name, value in self.attributes.items())
        assert all(vars(self.pipe.scheduler)[name] is value for name, value in self.scheduler.items())
        assert self.random_states() == self.states
        assert all(vars(module) == state for module, state in self.modules.items())
        assert self.pipe.vae.dtype == torch.float16


@pytest.mark.parametrize("interrupted", [None, "unet", "vae.decoder"])
def test_everything_is_left_as_it_was_when_it_ends_and_when_it_is_interrupted(interrupted):
    pipe = zoo.pipeline("StableDiffusionXLPipeline", "EulerAncestralDiscreteScheduler")
    pipe.vae.half()  # such a VAE decodes in float32, as SDXL's own has it
    generator = torch.Generator().manual_seed(5)
    output(pipe, (32, 32), generator=generator)
    pipe.scheduler.set_timesteps(7)
    accelerate_pipeline(pipe, backend="eager")
    calls = []

    def stop(*_):
        calls.append(pipe.vae.dtype)
        if len(calls) == 2:
            raise KeyboardInterrupt

    if interrupted:
        hook = pipe.unet if interrupted == "unet" else pipe.vae.decoder
        hook.register_forward_pre_hook(stop)
    before = Everything(pipe, generator)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            warm_up(pipe, sizes=[(32, 48), (48, 32)], **zoo.prompt(pipe))
        assert calls == [torch.float16 if interrupted == "unet" else torch.float32] * 2
    else:
        warm_up(pipe, sizes=[(32, 48)], **zoo.prompt(pipe))
    before.check()


def test_what_it_did_is_shown_and_told(capsys):
    pipe = zoo.pipeline("StableDiffusionPipeline")
    accelerate_pipeline(pipe, backend="eager")
    quiet = warm_up(pipe, sizes=[(32, 32)], **zoo.prompt(pipe))
    assert capsys.readouterr().err == ""
    pipe.set_progress_bar_config()
    shown = warm_up(pipe, sizes=[(32, 32), (32, 32), (48, 32)], **zoo.prompt(pipe))
    said = capsys.readouterr().err
    assert "warm-up" in said and "2/2" in said and "0 graphs compiled" in said
    assert "1/1" not in said  # the pipeline's own bar
    assert shown.compiled == shown.loaded == shown.failed == [] and shown.seconds > 0
    assert str(shown).startswith("Warm-up: 0 graphs compiled, 0 loaded, in 2 runs and ")
    assert quiet.runs == [(32, 32, 1)] and quiet.seconds > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sizes": (64, 64)}, r"takes \(width, height\) pairs"),
        ({"sizes": [(64, 0)]}, r"takes \(width, height\) pairs"),
        ({"sizes": [(64.0, 64)]}, r"takes \(width, height\) pairs"),
        ({"sizes": []}, r"takes \(width, height\) pairs"),
        ({"batches": 2}, "takes whole numbers"),
        ({"batches": (1, -1)}, "takes whole numbers"),
        ({"height": 64}, "takes no height: sizes=... says it here"),
        ({"num_images_per_prompt": 2}, "batches=... says it here"),
        ({"generator": torch.Generator()}, "leaves yours alone"),
        ({"steps": 3}, "has no argument steps; it has prompt, "),
        ({"sizes": [(66, 32)]}, r"cannot be called at 66x32 \(width x height\), batch 1: .*divisible by"),
        ({"prompt_embeds": None}, "needs prompt_embeds and negative_prompt_embeds"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_to_pass(arguments, sentence):
    pipe = accelerate_pipeline(zoo.pipeline("StableDiffusionPipeline"), backend="eager")
    given = {**zoo.prompt(pipe), "sizes": [(32, 32)], **arguments}
    if "prompt_embeds" in arguments:
        given = {"sizes": [(32, 32)]}
    before = dict(vars(pipe))
    with pytest.raises(ValueError, match=sentence):
        warm_up(pipe, **given)
    assert vars(pipe) == before


def test_pipeline_that_is_not_accelerated_is_refused():
    pipe = zoo.pipeline("StableDiffusionPipeline")
    for plain in (pipe, restore(accelerate_pipeline(pipe, backend="eager"))):
        with pytest.raises(ValueError, match="call accelerate_pipeline"):
            warm_up(plain, sizes=[(32, 32)], **zoo.prompt(pipe))


def test_argument_that_nobody_could_make_up_is_asked_for():
    import diffusers

    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, out_channels=4, num_layers=2, sample_size=8
    )
    pipe = diffusers.DiTPipeline(transformer, zoo.vae(), diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    accelerate_pipeline(pipe, ignores=("vae",), backend="eager")
    with pytest.raises(ValueError, match=r"DiTPipeline needs class_labels: pass it .* warm_up\(pipe, class_labels=..."):
        warm_up(pipe, sizes=[(32, 32)])
    with pytest.raises(ValueError, match="makes one image of each prompt"):
        warm_up(pipe, sizes=[(32, 32)], batches=(2,), class_labels=[1])
