"""Two oracles for DeepCache in a real sampler run, each sharp enough for `torch.equal`.

`reference` is DeepCache written the slow way: every step computes the whole UNet, and on a skipped step what the deep
part came to is thrown away for what it came to at the last full step. Whatever else acts on the model (residuals,
patches, hooks) acts in it as core has it, so it shows what is right of each in DeepCache's company.

`still_answers` stops time: the model is asked the same thing on every step, so that a skipped step must give the full
one's answer, and a feature of another stream, or a patch too many or too few, shows.

Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import comfy.sample
import comfy.samplers
import tiny_models
import torch
from comfy.patcher_extension import WrappersMP
from deep_cache_runs import cached, counts

SMALL = {
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1] * 4,
}
"""Changes of `tiny_models.unet` that leave it two levels: depths 1 to 3."""

Streams = Callable[[int, dict], list[Hashable]]
"""From a call's place in its step and its transformer_options to one key for each conditioning chunk of its batch."""

LEVEL = 3.0
"""The noise level at which a stopped model answers."""


def held(model, interval=3, depth=2):
    """The model with DeepCache of the simple sort: full every `interval` steps, the feature held in between."""
    return cached(model, interval, depth)


class Slow:
    """The state of one run of `reference`; its wrappers are `begin` and `call`."""

    def __init__(self, interval: int, depth: int, streams: Streams):
        self.interval, self.depth, self.streams = interval, depth, streams
        self.step = self.calls = -1
        self.features: dict[Hashable, torch.Tensor] = {}

    @property
    def skipping(self) -> bool:
        return self.step % self.interval != 0

    def begin(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.step, self.calls = self.step + 1, -1
        if not self.skipping:
            self.features.clear()
        return executor(*args, **kwargs)

    def call(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        streams = self.streams(self.calls, args[-1])
        unet = executor.class_obj

        def hold(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            chunks = zip(streams, output.chunk(len(streams)), strict=True)
            return torch.cat([self.features.setdefault(stream, chunk.clone()) for stream, chunk in chunks])

        last_deep_block = unet.output_blocks[len(unet.input_blocks) - self.depth - 1]
        hook = list(last_deep_block)[-1].register_forward_hook(hold)
        try:
            return executor(*args, **kwargs)
        finally:
            hook.remove()


def by_place(call: int, options: dict) -> list[Hashable]:
    """Streams told apart by the call's place in its step, and theirs in it: for runs that ask alike on every step."""
    return [(call, chunk) for chunk in range(len(options["uuids"]))]


def by_uuid(call: int, options: dict) -> list[Hashable]:
    """Streams told apart by conditioning and context window: for runs whose calls come and go."""
    window = options.get("context_window")
    frames = None if window is None else tuple(window.index_list)
    return [(uuid, frames) for uuid in options["uuids"]]


def reference(model, interval=3, depth=2, streams: Streams = by_place):
    """A clone that samples with the slow DeepCache, for one run of a sampler that asks once a step."""
    clone, slow = model.clone(), Slow(interval, depth, streams)
    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "slow", slow.begin)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "slow", slow.call)
    clone.set_attachments("slow", slow)
    return clone


def assert_as_reference(
    model,
    interval=3,
    depth=2,
    steps=4,
    sample=tiny_models.sample,
    expected=None,
    other_order=None,
    slow=reference,
    **run,
):
    """The run is the plain one at interval 1, and the reference's at `interval`; the plain model stays as it was.

    model: with its company. expected: full and skipped steps. other_order: the same model, from a depth, its company
    added after DeepCache. slow: the reference, from model, interval and depth. Returns the cached image.
    """
    off = sample(held(model, 1), steps=steps, **run)
    out = sample(held(model, interval, depth), steps=steps, **run)
    full = -(-steps // interval)
    assert counts() == (expected or (full, steps - full))
    assert torch.equal(out, sample(slow(model, interval, depth), steps=steps, **run))
    if other_order is not None:
        assert torch.equal(out, sample(other_order(depth), steps=steps, **run))
        assert counts() == (expected or (full, steps - full))
    assert not any("forward" in part.__dict__ for part in model.model.diffusion_model.modules())
    plain = sample(model, steps=steps, **run)
    assert torch.equal(plain, off)
    assert out.isfinite().all() and not torch.equal(out, plain)
    return out


# Time stopped


def stopped(model):
    """A clone whose model takes every noise level for `LEVEL`."""

    class Stopped(type(model.get_model_object("model_sampling"))):
        def timestep(self, sigma):
            return super().timestep(torch.full_like(sigma, LEVEL))

        def calculate_input(self, sigma, noise):
            return super().calculate_input(torch.full_like(sigma, LEVEL), noise)

        def calculate_denoised(self, sigma, model_output, model_input):
            return super().calculate_denoised(torch.full_like(sigma, LEVEL), model_output, model_input)

        def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
            return super().noise_scaling(torch.full_like(sigma, LEVEL), noise, latent_image, max_denoise)

    clone = model.clone()
    clone.add_object_patch("model_sampling", Stopped(model.model.model_config))
    return clone


def still_answers(model, steps=3, width=128, height=128, batch=1, cfg=5.0, latent=None, noise_mask=None, **conds):
    """The denoised latent of every step of a run in which no step's input differs from the first one's."""
    answers = []

    def ask_the_same(guider, x, sigmas, extra_args=None, callback=None, disable=None):
        for sigma in sigmas[:-1]:
            answers.append(guider(x.clone(), sigma * x.new_ones(x.shape[0]), **extra_args))
        return answers[-1]

    channels = model.get_model_object("latent_format").latent_channels
    latent = torch.zeros(batch, channels, height // 8, width // 8) if latent is None else latent
    comfy.sample.sample_custom(
        stopped(model),
        comfy.sample.prepare_noise(latent, 0),
        cfg,
        comfy.samplers.KSAMPLER(ask_the_same),
        torch.linspace(10.0, 0.0, steps + 1),
        conds.get("positive") or tiny_models.conditioning(seed=1),
        conds.get("negative") or tiny_models.conditioning(seed=2),
        latent,
        noise_mask=noise_mask,
        disable_pbar=True,
        seed=0,
    )
    return answers


def assert_skipped_is_full(model, depth=2, width=128, height=128, unlike=None, **run):
    """With time stopped, two skipped steps give the plain model's answer bit by bit.

    unlike: a model, or changes of the run, without what is tested; it must make a difference.
    """
    run |= {"width": width, "height": height}
    (plain,) = still_answers(model, steps=1, **run)
    answers = still_answers(held(model, 3, depth), **run)
    assert counts() == (1, 2)
    assert [torch.equal(answer, plain) for answer in answers] == [True] * 3
    if unlike is not None:
        (without,) = still_answers(**({"model": model} | run | unlike), steps=1)
        assert not torch.equal(without, plain)
