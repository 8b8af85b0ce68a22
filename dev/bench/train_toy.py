"""Train a small test network: a class of ComfyUI's own, its noise schedule or flow, the pictures of `toy_data`.

    .venv/bin/python -m dev.bench.train_toy --network dit

One thread, about an hour. The same machine and torch give the same weights.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dev.tools import command
from dev.tools.inprocess import boot

STEPS = {"unet": 11000, "dit": 3000, "mmdit": 9000, "vpred": 5000}
BATCH = 16
SEED = 0
PEAK_LEARNING_RATE = {"unet": 1e-3, "dit": 2e-3, "mmdit": 1e-3, "vpred": 1e-3}
WARM_UP = 300
DESCENT = {"unet": 0.5, "dit": 0.4, "mmdit": 0.4, "vpred": 0.5}
"""The last part of all steps: the learning rate falls, and high noise levels count more."""
WEIGHT_DECAY = 0.01
DROPPED_PROMPTS = 0.1
EMA_DECAY = 0.998
SNR_LIMIT = 5.0
"""Min-SNR weighting (Hang et al., arXiv 2303.09556): nearly noiseless steps count no more than at this SNR."""
REPORT_EVERY = 250


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.bench.train_toy", description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=STEPS, default="unet")
    parser.add_argument("--steps", type=int, help=f"of the optimizer (default: {STEPS})")
    parser.add_argument(
        "--out", type=Path, help="file of the weights (default: dev/bench/data/toy_NETWORK.safetensors)"
    )
    options = parser.parse_args(arguments)
    boot(cpu=True)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    from . import toy

    network = toy.NETWORKS[options.network]
    training = Training(network, options.steps or STEPS[options.network], BATCH, SEED)
    while training.step < training.steps:
        training.advance()
        if training.step % REPORT_EVERY == 0 or training.step == training.steps:
            print(json.dumps(training.report()), flush=True)
    training.export(options.out or network.file)


@contextmanager
def _core_in_training() -> Iterator[None]:
    """Newer cores take kernels that have no gradient otherwise, as for rotary embeddings."""
    import comfy.model_management as management

    before = getattr(management, "in_training", False)
    management.in_training = True
    try:
        yield
    finally:
        management.in_training = before


class Training:
    """AdamW with warm-up and descent, gradients clipped, and a moving average of the weights, which is the result."""

    def __init__(self, network, steps: int, batch: int, seed: int):
        """network: one of `toy.NETWORKS`."""
        from . import toy

        self.network, self.steps, self.batch, self.seed = network, steps, batch, seed
        self.peak = PEAK_LEARNING_RATE[network.family.name]
        self.descent = DESCENT[network.family.name]
        self.step = 0
        self.seconds = 0.0
        model = network.build(torch.float32)
        self.net = model.diffusion_model
        initialize(self.net, network.begins_as_zero, seed)
        self.net.requires_grad_(True).train()
        for module in self.net.modules():
            if isinstance(module, torch.nn.LayerNorm):
                # Flux's blocks add to their input in place, which the gradient of its norm still needs.
                module.register_forward_pre_hook(lambda _, args: (args[0].clone(), *args[1:]))
        self.average = {name: value.detach().clone() for name, value in self.net.named_parameters()}
        self.sampling = model.model_sampling
        self.is_flow, self.predicts_v = toy.is_flow(self.sampling), toy.predicts_v(self.sampling)
        self.tokens = toy.class_tokens()
        self.sizes = toy.SIZES
        self.random = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=self.peak, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY, foreach=True
        )
        self._losses: list[float] = []

    def advance(self) -> None:
        """One step of the optimizer on one batch of one size."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * learning_rate(self.step, self.steps, self.descent)
        self.optimizer.zero_grad(set_to_none=True)
        with _core_in_training():
            loss = self._loss()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        decay = min(EMA_DECAY, self.step / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.net.parameters()), 1 - decay)
        self._losses.append(loss.item())
        self.seconds += time.perf_counter() - started

    def report(self) -> dict[str, float]:
        """Steps, seconds, and the mean loss since the last report."""
        loss = sum(self._losses) / max(1, len(self._losses))
        self._losses.clear()
        return {"step": self.step, "seconds": round(self.seconds), "loss": round(loss, 5)}

    def export(self, file: Path) -> None:
        """The averaged weights, and buffers, in half precision."""
        import safetensors.torch

        weights = {name: value.half().contiguous() for name, value in {**self.net.state_dict(), **self.average}.items()}
        safetensors.torch.save_file(weights, file)

    def _loss(self) -> torch.Tensor:
        """Of the predicted noise, of v, or of a flow's velocity from picture to noise."""
        from . import toy, toy_data

        size = self.sizes[int(torch.randint(len(self.sizes), (), generator=self.random))]
        classes = torch.randint(len(toy_data.CLASSES), (self.batch,), generator=self.random)
        latent = self.network.pictures(classes, *size, self.random)
        noise = torch.randn(latent.shape, generator=self.random)
        # One noise level of each of `batch` equal spans of their distribution: all of them in every batch.
        spread = (torch.arange(self.batch) + torch.rand(self.batch, generator=self.random)) / self.batch
        sigma = self._noise_levels(spread)
        dropped = torch.rand(self.batch, generator=self.random) < DROPPED_PROMPTS
        tokens = self.tokens[torch.where(dropped, len(toy_data.CLASSES), classes)]
        scaled = self.sampling.calculate_input(sigma, self.sampling.noise_scaling(sigma, noise, latent))
        more = {"y": toy.pooled(tokens)} if self.network.family.pooled_dim else {}
        # Attention written out is faster than the fused kind here, with 20 to 80 tokens and their gradients.
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            predicted = self.net(scaled, self.sampling.timestep(sigma).float(), tokens, **more)
        if self.is_flow:
            return (predicted.float() - (noise - latent)).square().mean()
        sigma = sigma[:, None, None, None]
        if self.predicts_v:
            return (predicted.float() - (noise - sigma * latent) / (sigma**2 + 1).sqrt()).square().mean()
        weight = (sigma**2 * SNR_LIMIT).clamp(max=1)
        if self.step >= self._descends_at(self.steps):
            # A small error in the noise is a large one in the picture's light and hue there: they set the samples'.
            weight = weight * (1 + sigma**2 / 4).sqrt()
        return (weight * (predicted.float() - noise) ** 2).mean()

    def _descends_at(self, steps: int) -> float:
        """The step, of so many, at which the learning rate begins to fall."""
        return steps * (1 - self.descent)

    def _noise_levels(self, spread: torch.Tensor) -> torch.Tensor:
        """Sigmas at these places, 0 to 1, of their distribution: each timestep alike; of a flow, logit-normal.

        Logit-normal as in Esser et al., "Scaling rectified flow transformers", arXiv 2403.03206.
        """
        if self.is_flow:
            return torch.sigmoid(torch.special.ndtri(spread))
        return self.sampling.sigmas[(spread * len(self.sampling.sigmas)).long()]


def learning_rate(step: int, steps: int, descent: float) -> float:
    """Share of the peak: a line up, level for the most part, then half a cosine down to a hundredth.

    Level, so that a checkpoint from before the descent is the same whatever number of steps is chosen in the end.
    """
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = max(0.0, 1 - (steps - step) / (steps * descent))
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def initialize(net: torch.nn.Module, begins_as_zero: tuple[str, ...], seed: int) -> None:
    """As guided diffusion does: every block begins as the identity, the network's output as zero."""
    from kit.tiny_models import randomize

    randomize(net, seed)
    with torch.no_grad():
        for name, module in net.named_modules():
            if name.endswith(begins_as_zero):
                for parameter in module.parameters():
                    parameter.zero_()


if __name__ == "__main__":
    sys.exit(command.run(main))
