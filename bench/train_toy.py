"""Train the small test network: ComfyUI's own UNet class, SD1.5's noise schedule, the pictures of `toy_data`.

    .venv/bin/python -m bench.train_toy

One thread, about an hour. The same seed on the same machine gives the same weights. Interrupted, it goes on from its
last checkpoint.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import WORK, Problem, command
from .inprocess import boot

STEPS = 11000
BATCH = 16
SEED = 0
PEAK_LEARNING_RATE = 1e-3
WARM_UP = 300
DESCENT = 0.5
"""The last part of all steps: the learning rate falls, and high noise levels count more."""
WEIGHT_DECAY = 0.01
DROPPED_PROMPTS = 0.1
EMA_DECAY = 0.998
SNR_LIMIT = 5.0
"""Min-SNR weighting (Hang et al., arXiv 2303.09556): nearly noiseless steps count no more than at this SNR."""
CHECKPOINT_EVERY = 500


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    boot(cpu=True)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    from . import toy

    options.work.mkdir(parents=True, exist_ok=True)
    training = Training(options.steps, options.batch, options.seed)
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.is_file():
        training.restore(torch.load(checkpoint, weights_only=True))
    while training.step < training.steps:
        training.advance()
        if training.step % CHECKPOINT_EVERY == 0 or training.step == training.steps:
            _replace(checkpoint, lambda path: torch.save(training.state(), path))
            print(json.dumps(training.report()), flush=True)
    training.export(options.out or toy.FILE)


class Training:
    """AdamW with warm-up and descent, gradients clipped, and a moving average of the weights, which is the result."""

    def __init__(self, steps: int, batch: int, seed: int):
        from . import toy

        self.steps, self.batch, self.seed = steps, batch, seed
        self.step = 0
        self.seconds = 0.0
        model = toy.new_model()
        self.net = model.diffusion_model
        initialize(self.net, seed)
        self.net.requires_grad_(True).train()
        self.average = {name: value.detach().clone() for name, value in self.net.named_parameters()}
        self.sigmas = model.model_sampling.sigmas
        self.tokens = toy.class_tokens()
        self.sizes = toy.SIZES
        self.random = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY, foreach=True
        )
        self._losses: list[float] = []

    def advance(self) -> None:
        """One step of the optimizer on one batch of one size."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * learning_rate(self.step, self.steps)
        loss = self._loss()
        self.optimizer.zero_grad(set_to_none=True)
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

    def state(self) -> dict:
        return {
            "settings": self._settings(),
            "step": self.step,
            "seconds": self.seconds,
            "net": self.net.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
        }

    def restore(self, state: dict) -> None:
        """Raises Problem for the state of a training with other settings, whose result this one would not repeat."""
        if state["settings"] != self._settings():
            raise Problem(f"The checkpoint is of {state['settings']}, not {self._settings()}: give another --work.")
        self.step, self.seconds = state["step"], state["seconds"]
        self.net.load_state_dict(state["net"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"])

    def export(self, file: Path) -> None:
        """The averaged weights in half precision."""
        import safetensors.torch

        weights = {name: value.half().contiguous() for name, value in self.average.items()}
        _replace(file, lambda path: safetensors.torch.save_file(weights, path))

    def _settings(self) -> dict[str, int]:
        return {"steps": self.steps, "batch": self.batch, "seed": self.seed}

    def _loss(self) -> torch.Tensor:
        """Of the predicted noise, as core's EPS models predict it."""
        from . import toy_data

        size = self.sizes[int(torch.randint(len(self.sizes), (), generator=self.random))]
        classes = torch.randint(len(toy_data.CLASSES), (self.batch,), generator=self.random)
        latent = toy_data.pictures(classes, *size, self.random)
        noise = torch.randn(latent.shape, generator=self.random)
        # One timestep of each of `batch` equal spans: all noise levels in every batch.
        spread = (torch.arange(self.batch) + torch.rand(self.batch, generator=self.random)) / self.batch
        timesteps = (spread * len(self.sigmas)).long()
        sigma = self.sigmas[timesteps][:, None, None, None]
        dropped = torch.rand(self.batch, generator=self.random) < DROPPED_PROMPTS
        context = self.tokens[torch.where(dropped, len(toy_data.CLASSES), classes)]
        scaled = (latent + sigma * noise) / (sigma**2 + 1).sqrt()
        # Attention written out is faster than the fused kind here, with 20 to 80 tokens and their gradients.
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            predicted = self.net(scaled, timesteps.float(), context)
        weight = (sigma**2 * SNR_LIMIT).clamp(max=1)
        if self.step >= self.steps * (1 - DESCENT):
            # A small error in the noise is a large one in the picture's light and hue there: they set the samples'.
            weight = weight * (1 + sigma**2 / 4).sqrt()
        return (weight * (predicted.float() - noise) ** 2).mean()


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak: a line up, level for the most part, then half a cosine down to a hundredth.

    Level, so that a checkpoint from before the descent is the same whatever number of steps is chosen in the end.
    """
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    descent = steps * DESCENT
    done = max(0.0, (step - (steps - descent)) / descent)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def initialize(net: torch.nn.Module, seed: int) -> None:
    """As guided diffusion does: every block begins as the identity, the network's output as zero."""
    from .tiny_models import randomize

    randomize(net, seed)
    with torch.no_grad():
        for name, module in net.named_modules():
            if name.endswith((".out_layers.3", ".proj_out")) or name == "out.2":
                for parameter in module.parameters():
                    parameter.zero_()


def _replace(file: Path, save) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".part")
    save(temporary)
    temporary.replace(file)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.train_toy", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the optimizer (default: {STEPS})")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"pictures a step (default: {BATCH})")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=WORK / "toy", help="folder of the checkpoint to go on from")
    parser.add_argument("--out", type=Path, help="file of the weights (default: bench/data/toy_unet.safetensors)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))
