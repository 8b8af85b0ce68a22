"""The trained test networks under schedulers of diffusers, in the least that is a pipeline.

Imported by tests that have booted ComfyUI and made sure that diffusers is there.
"""

from contextlib import contextmanager

import diffusers
import torch

from dev.bench import toy

_NOISE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
SCHEDULERS = {
    "unet": {
        "Euler, Karras": lambda: diffusers.EulerDiscreteScheduler(**_NOISE, use_karras_sigmas=True),
        "DPM-Solver++ 2M, Karras": lambda: diffusers.DPMSolverMultistepScheduler(**_NOISE, use_karras_sigmas=True),
        "UniPC": lambda: diffusers.UniPCMultistepScheduler(**_NOISE),
    },
    "dit": {
        "Euler": diffusers.FlowMatchEulerDiscreteScheduler,
        "DPM-Solver++ 2M": lambda: diffusers.DPMSolverMultistepScheduler(**_FLOW),
        "UniPC": lambda: diffusers.UniPCMultistepScheduler(**_FLOW),
    },
}
"""Network and name → makes the scheduler."""


class ToyPipeline:
    """Makes pictures of the trained network of that name."""

    guidance_scale = toy.CFG

    def __init__(self, name, scheduler):
        self.model, self.is_flow, self.scheduler = toy.load(name).model.diffusion_model, name == "dit", scheduler
        setattr(self, "transformer" if self.is_flow else "unet", self.model)

    @contextmanager
    def progress_bar(self):
        yield

    @torch.inference_mode()
    def __call__(self, steps, seed):
        """A latent [1, 4, 16, 16] of the class that belongs to the seed."""
        self.scheduler.set_timesteps(steps)
        latent = torch.randn(1, toy.CHANNELS, 16, 16, generator=torch.Generator().manual_seed(seed))
        latent = latent if self.is_flow else latent * self.scheduler.init_noise_sigma
        tokens = toy.class_tokens()[[seed % toy.CLASSES, toy.NULL_CLASS]]
        pooled = {"y": toy.pooled(tokens)} if self.is_flow else {}
        with self.progress_bar():
            for time in self.scheduler.timesteps:
                both = torch.cat([latent, latent])
                both = both if self.is_flow else self.scheduler.scale_model_input(both, time)
                asked = (time / 1000 if self.is_flow else time).expand(2)
                cond, uncond = self.model(both, asked, context=tokens, **pooled).chunk(2)
                output = uncond + self.guidance_scale * (cond - uncond)
                latent = self.scheduler.step(output, time, latent, return_dict=False)[0]
        return latent
