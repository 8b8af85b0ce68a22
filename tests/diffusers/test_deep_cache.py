"""DeepCache in diffusers' pipelines: which steps it skips, what a skipped one computes and costs."""

from contextlib import contextmanager
from types import SimpleNamespace

import diffusers
import pytest
import torch
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.splits.unet import has_down_up_layout
from kit import deep_transformers
from kit import tiny_pipelines as tiny
from kit.deep_transformers import pipeline, sample, sample_cached
from kit.step_cache import every
from torch.utils.flop_counter import FlopCounterMode

TRUNKS = ("blocks", "layers", "transformer_blocks", "joint_transformer_blocks", "single_transformer_blocks")


def trunks(model):
    """The model's lists of blocks, in the order in which they run, by name."""
    return {name: getattr(model, name) for name in TRUNKS if hasattr(model, name)}


@contextmanager
def blocks_called(model):
    """For each call of the model the numbers of the blocks that were computed, all lists counted through."""
    calls, hooks = [], [model.register_forward_pre_hook(lambda *_: calls.append([]))]
    for number, block in enumerate(block for blocks in trunks(model).values() for block in blocks):
        # The block's own forward, since what stands in for it is called as it is.
        part = next(part for part in block.modules() if isinstance(part, torch.nn.Linear))
        hooks.append(part.register_forward_pre_hook(lambda *_, number=number: calls[-1].append(number)))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def flat(latents):
    return torch.stack(latents) if isinstance(latents, list) else latents


# What a skipped step computes


class Held(torch.nn.Module):
    """In the place of blocks, one after another in a list: what they added to their streams when it was told."""

    context_pre_only = False

    def __init__(self, names):
        super().__init__()
        self.names, self.before, self.added = names, None, None

    def forward(self, *args, **kwargs):
        given = {**dict(zip(("hidden_states", "encoder_hidden_states"), args, strict=False)), **kwargs}
        streams = [given[name] for name in self.names]
        if self.added is not None:
            streams = [
                stream + (0 if added is None else added) for stream, added in zip(streams, self.added, strict=True)
            ]
        return tuple(streams) if len(streams) > 1 else streams[0]


@contextmanager
def by_hand(model, streams, interval, calls=1):
    """Uniform steps and held residuals: on skipped steps the model's lists of blocks are shorter.

    streams: what a block returns, by the names of its arguments. calls: of the model, within a step.
    """
    own, lists, count = model.forward, trunks(model), 0
    held = [{name: Held(streams) for name in lists} for _ in range(calls)]

    def remember(block, which):
        def note(_, args, kwargs):
            given = {**dict(zip(("hidden_states", "encoder_hidden_states"), args, strict=False)), **kwargs}
            which.before = [given[name].clone() for name in streams]

        def subtract(_, args, kwargs, out):
            out = out if isinstance(out, tuple) else (out,)
            given = zip(out, which.before, strict=True)
            which.added = [None if after is None else after - now for after, now in given]

        return note, subtract

    def forward(*args, **kwargs):
        nonlocal count
        step, call = divmod(count, calls)
        count += 1
        hooks = []
        for name, blocks in lists.items():
            which = held[call][name]
            if step % interval:
                setattr(model, name, torch.nn.ModuleList([which]))
            else:
                note, subtract = remember(blocks, which)
                hooks.append(blocks[0].register_forward_pre_hook(note, with_kwargs=True))
                hooks.append(blocks[-1].register_forward_hook(subtract, with_kwargs=True))
        try:
            return own(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            for name, blocks in lists.items():
                setattr(model, name, blocks)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


TEXT_AND_IMAGE = ("encoder_hidden_states", "hidden_states")


@pytest.mark.parametrize(
    ("kind", "streams", "calls", "arguments"),
    [
        ("StableDiffusion3Pipeline", TEXT_AND_IMAGE, 1, {"height": 80, "width": 112, "batch": 2}),
        ("FluxPipeline", TEXT_AND_IMAGE, 2, {"true_cfg_scale": 3.0, "width": 176}),
        ("FluxPipeline", TEXT_AND_IMAGE, 1, {"height": 112}),
        ("WanPipeline", ("hidden_states",), 2, {"height": 80, "width": 48}),
        ("QwenImagePipeline", TEXT_AND_IMAGE, 2, {"height": 80}),
        ("HunyuanVideoPipeline", TEXT_AND_IMAGE[::-1], 1, {"width": 80}),
        ("LTXPipeline", ("hidden_states",), 1, {}),
    ],
)
def test_image_is_that_of_shorter_lists_of_blocks(kind, streams, calls, arguments):
    pipe = pipeline(kind)
    plain = sample(pipe, **arguments)
    for interval in (2, 3):
        with by_hand(pipe.transformer, streams, interval, calls):
            expected = sample(pipe, **arguments)
        cached, counts = sample_cached(pipe, every(interval), **arguments)
        assert counts == [(6 // interval, 6 - 6 // interval)]
        assert (cached - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (cached - plain).abs().max() > 1e-3 * plain.abs().max()
    assert torch.equal(sample(pipe, **arguments), plain)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("StableDiffusion3Pipeline", {}),
        ("FluxPipeline", {}),
        ("WanPipeline", {}),
        ("PixArtAlphaPipeline", {}),
        ("AuraFlowPipeline", {}),
        ("Lumina2Pipeline", {}),
        ("ZImagePipeline", {}),
        ("QwenImagePipeline", {"texts": (5, 9)}),
        ("HunyuanVideoPipeline", {}),
        ("LTXPipeline", {}),
    ],
)
def test_skipped_step_runs_no_block(kind, arguments):
    pipe = pipeline(kind)
    total = sum(len(blocks) for blocks in trunks(pipe.transformer).values())
    with FlopCounterMode(display=False) as flops, blocks_called(pipe.transformer) as calls:
        cached, counts = sample_cached(pipe, **arguments)
    assert counts == [(2, 4)]
    each = len(calls) // 6
    assert [len(call) < total for call in calls[::each]] == [False, True, True] * 2
    assert all(call in ([], list(range(total))) for call in calls)
    with FlopCounterMode(display=False) as plain_flops, deep_cache(pipe, every(1)):
        plain = sample(pipe, **arguments)
    full_step = plain_flops.get_total_flops() / 6
    share = (flops.get_total_flops() - 2 * full_step) / 4 / full_step
    assert share < 0.25, share  # its other layers: of the small Z-Image, blocks that refine noise and text
    assert not torch.equal(flat(cached), flat(plain))


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_settings_that_skip_nothing_change_nothing(kind):
    pipe, sampled = (pipeline("FluxPipeline"), sample) if kind == "dit" else (tiny.pipeline(), tiny.sample)
    plain, before = sampled(pipe), dict(vars(pipe))
    for settings in (every(1), DeepCacheSettings(start_percent=0.5, end_percent=0.5)):
        with deep_cache(pipe, settings):
            assert vars(pipe) == before
            assert torch.equal(sampled(pipe), plain)
    # Every step is in full, and remembered.
    cached, counts = sample_cached(pipe, DeepCacheSettings(300.0), sampled)
    assert counts == [(6, 0)] and torch.equal(cached, plain)


# Which step it is


def test_many_steps_are_skipped_in_part_and_few_not_at_all():
    pipe = pipeline("StableDiffusion3Pipeline")
    for steps, least, most in ((4, 0, 0), (24, 4, 17)):
        cached, [(full, skipped)] = sample_cached(pipe, DeepCacheSettings(30.0), steps=steps)
        plain = sample(pipe, steps=steps)
        assert full + skipped == steps and least <= skipped <= most
        assert (cached - plain).abs().max() < 0.05 * plain.abs().max()


@pytest.mark.parametrize("kind", ["FluxPipeline", "ZImagePipeline"])
def test_timesteps_rounded_to_half_precision_are_found(kind):
    pipe = pipeline(kind).to(torch.bfloat16)
    assert sample_cached(pipe, steps=30, dtype=torch.bfloat16, height=32, width=32)[1] == [(10, 20)]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (lambda: diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0), (2, 4)),
        (lambda: diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True), (2, 4)),
        (lambda: diffusers.FlowMatchLCMScheduler(shift=3.0), (2, 4)),
        (lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True), (2, 4)),
        (lambda: diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), (2, 4)),
    ],
)
def test_schedulers_of_flows(scheduler, expected):
    pipe = pipeline("StableDiffusion3Pipeline", scheduler())
    assert sample_cached(pipe)[1] == [expected]


@pytest.mark.parametrize("kind", ["FluxImg2ImgPipeline", "FluxInpaintPipeline"])
def test_image_to_image_counts_from_its_first_step(kind):
    pipe = pipeline(kind, transformer=deep_transformers.transformer("Flux", in_channels=64))
    arguments = {"image": torch.randn(1, 16, 8, 12), "strength": 0.6, "steps": 10}
    if "Inpaint" in kind:
        arguments |= {"mask_image": torch.ones(1, 1, 64, 96), "masked_image_latents": torch.randn(1, 16, 8, 12)}
    with blocks_called(pipe.transformer) as calls:
        assert sample_cached(pipe, **arguments)[1] == [(2, 4)]
    assert [len(call) for call in calls] == [9, 0, 0] * 2


def test_two_transformers_have_a_part_of_the_schedule_each():
    pipe = pipeline(
        "WanPipeline", transformer_2=deep_transformers.transformer("Wan", 1, num_layers=9), boundary_ratio=0.6
    )
    plain = sample(pipe, steps=8)
    with blocks_called(pipe.transformer) as first, blocks_called(pipe.transformer_2) as second:
        cached, counts = sample_cached(pipe, every(3), steps=8)
    assert [len(call) for call in first[::2] + second[::2]] == [8, 0, 0, 8, 9, 0, 0, 9]
    assert counts == [(2, 2), (2, 2)]
    assert not torch.equal(cached, plain) and torch.equal(sample(pipe, steps=8), plain)


def test_timesteps_for_each_token():
    pipe = pipeline("WanPipeline", expand_timesteps=True)
    assert sample_cached(pipe)[1] == [(2, 4)]


# Calls of one step


def test_skipped_layer_guidance_is_a_stream_of_its_own():
    pipe = pipeline("StableDiffusion3Pipeline")
    guided = {"skip_layer_guidance_start": 0.1, "skip_layer_guidance_stop": 0.9}
    for layer in (4, 1, 6, 0, 7):
        with blocks_called(pipe.transformer) as calls:
            _, counts = sample_cached(pipe, every(3), skip_guidance_layers=[layer], **guided)
        assert counts == [(2, 4)]
        without = [number for number in range(8) if number != layer]
        everything, last = list(range(8)), without if layer in (0, 7) else []
        # Guided from step 1 on, which is skipped; there it has nothing yet. Step 3 is in full for all.
        expected = [everything, [], without, [], last, everything, without, [], last, [], last]
        assert calls == expected


def test_guidance_that_begins_late_is_computed_in_full_once():
    pipe = pipeline("FluxPipeline")
    with blocks_called(pipe.transformer) as calls:
        with deep_cache(pipe, every(5)), pipe_loop(pipe, 5) as loop:
            for step in loop:
                ask(pipe, step)
                if step > 1:
                    ask(pipe, step, texts=6)
    assert [len(call) for call in calls] == [9, 0, 0, 9, 0, 0, 0, 0]


@contextmanager
def pipe_loop(pipe, steps):
    """A denoising loop by hand, with a latent that stays as it is."""
    pipe.scheduler.set_timesteps(steps)
    with pipe.progress_bar(total=steps):

        def loop():
            for step, time in enumerate(pipe.scheduler.timesteps):
                yield step
                pipe.scheduler.step(torch.zeros(1), time, torch.zeros(1))

        yield loop()


def ask(pipe, step, texts=5, fill=0.5, **arguments):
    """One call of Flux, or of SD3, on a latent full of one value."""
    is_flux = "Flux" in type(pipe).__name__
    time = pipe.scheduler.timesteps[step].expand(1)
    random = torch.Generator().manual_seed(5)
    text, pooled = (torch.randn(1, *size, 16, generator=random) for size in ((texts,), ()))
    given = {"encoder_hidden_states": text, "pooled_projections": pooled, "return_dict": False}
    if is_flux:
        x = torch.full((1, 12, 16), fill)
        given |= {"txt_ids": torch.zeros(texts, 3), "img_ids": torch.zeros(12, 3), "guidance": torch.full([1], 3.5)}
    else:
        x = torch.full((1, 4, 10, 6), fill)
    with torch.no_grad():
        return pipe.transformer(hidden_states=x, timestep=time / 1000 if is_flux else time, **given, **arguments)[0]


# ControlNets


def residuals(count, seed, tokens):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(1, tokens, 16, generator=random) for _ in range(count)]


@pytest.mark.parametrize("kind", ["FluxPipeline", "StableDiffusion3Pipeline"])
def test_residuals_of_a_controlnet_are_held(kind):
    pipe = pipeline(kind)
    is_flux = kind == "FluxPipeline"

    def control(seed, cut=False):
        if not is_flux:  # the last block takes none
            return {} if cut else {"block_controlnet_hidden_states": residuals(8, seed, 15)}
        doubles, singles = residuals(3, seed, 12), residuals(6, seed + 1, 12)
        if cut:  # the last one in the place of the blocks left out
            doubles, singles = doubles[-1:], singles[-1:]
        return {"controlnet_block_samples": doubles, "controlnet_single_block_samples": singles}

    def images(made):
        with pipe_loop(pipe, 3) as loop:
            return [ask(pipe, step, **made(step)) for step in loop]

    with deep_cache(pipe, every(3)):
        cached = images(lambda step: control(step * 10))
    with by_hand(pipe.transformer, TEXT_AND_IMAGE, 3):
        expected = images(lambda step: control(step * 10, cut=step > 0))
    for own, other in zip(cached, expected, strict=True):
        assert (own - other).abs().max() <= 1e-5 * other.abs().max()
    with deep_cache(pipe, every(3)):
        stale = images(lambda step: control(0))
    assert torch.equal(stale[0], cached[0]) and torch.allclose(stale[1], cached[1]) != is_flux


def test_controlnet_that_ends_has_no_say_in_what_follows():
    pipe = pipeline("FluxPipeline")
    control = {"controlnet_block_samples": residuals(3, 0, 12)}
    with blocks_called(pipe.transformer) as calls, deep_cache(pipe, every(6)), pipe_loop(pipe, 6) as loop:
        outs = [ask(pipe, step, **(control if step < 2 else {})) for step in loop]
    assert [len(call) for call in calls] == [9, 0, 9, 0, 0, 0]
    pipe.scheduler.set_timesteps(6)
    assert torch.equal(outs[2], ask(pipe, 2)) and not torch.equal(outs[1], ask(pipe, 1))


# UNets


@pytest.mark.parametrize(("layout", "height", "width"), [(tiny.SD, 72, 96), (tiny.SDXL, 104, 72)])
def test_sizes_whose_halves_are_odd(layout, height, width):
    pipe = tiny.pipeline(layout=layout)
    plain = tiny.sample(pipe, height, width, steps=3)
    cached, counts = tiny.sample_cached(pipe, 3, height=height, width=width, steps=3)
    assert counts == [(1, 2)]
    assert 0 < tiny.difference(cached, plain) < 0.2


F, S = False, True


@pytest.mark.parametrize(
    ("scheduler", "skipped"),
    [
        # From the second step on, the first call of a level ends the step before and is decided with its own.
        ("HeunDiscreteScheduler", [F, S, S, S, S, F, F, S, S]),
        ("KDPM2DiscreteScheduler", [F, F, S, S, S, S, F, F, S]),
        ("PNDMScheduler", [F, S, S, S, F]),
    ],
)
def test_steps_are_counted_where_schedulers_call_more_often(scheduler, skipped):
    pipe = tiny.pipeline(scheduler)
    ran, found = [], []
    pipe.unet.mid_block.resnets[0].norm1.register_forward_pre_hook(lambda *_: ran.append(True))
    pipe.unet.register_forward_hook(lambda *_: found.append(not ran) or ran.clear())
    _, counts = tiny.sample_cached(pipe, 3, steps=5 if scheduler != "PNDMScheduler" else 4)
    assert found == skipped
    assert counts


@pytest.mark.parametrize(("prefix", "is_divided"), [("", True), ("Skip", False)])
def test_unconditional_models_are_divided_where_their_skips_are_laid_out_so(prefix, is_divided):
    model = diffusers.UNet2DModel(
        down_block_types=(f"{prefix}DownBlock2D", f"Attn{prefix}DownBlock2D"),
        up_block_types=(f"Attn{prefix}UpBlock2D", f"{prefix}UpBlock2D"),
        block_out_channels=(32, 32),
        norm_num_groups=8,
    )
    assert has_down_up_layout(model) == is_divided


# What cannot be divided


def test_shallow_and_unknown_models_run_in_full_and_say_so(caplog):
    video = diffusers.UNet3DConditionModel(
        block_out_channels=(4, 8),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=4,
        layers_per_block=1,
        cross_attention_dim=16,
    )
    for model, reason in (
        (deep_transformers.transformer("StableDiffusion3", num_layers=2), "it has 2 blocks"),
        (video, "it is "),
    ):
        pipe = SimpleNamespace(transformer=model, progress_bar=lambda: None)
        before = dict(vars(pipe))
        with deep_cache(pipe, every(3)):
            assert vars(pipe) == before
        assert f"cannot divide {type(model).__name__}: {reason}" in caplog.text
