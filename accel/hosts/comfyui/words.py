"""Advice in ComfyUI's own terms: its samplers, nodes, flags and file formats, none of which the engine knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.sentences import NOISE_UNSEEN, SENTENCES, counted

if TYPE_CHECKING:
    from ...core.reasons import Reason

NOISY = ("ancestral", "sde", "ddpm", "seeds", "sa_solver")
"""Parts of the names of samplers that add noise in each step."""

SENTENCES.update(
    cuda_malloc_async="torch allocates with cudaMallocAsync: start ComfyUI with --disable-cuda-malloc for CUDA graphs",
    weights_streamed="its weights are streamed (dynamic VRAM), and not all on the device at once",
)


def none_skipped(why: Reason, steps: int, sampler: str | None) -> str:
    """Why DeepCache skipped none of all `steps`, and what to do about it.

    why: as `headline.why_none_skipped` has it. sampler: its name in core.
    """
    begin = f"DeepCache skipped none of {counted(steps, 'step')}"
    if why.code == "line_few_steps":
        return f"{begin}: with so few, each changes too much. It pays from about 20 steps on."
    if why.code == "line_all_full":
        why_full = dict(why.fields)["why"]
        return f"{begin}: {why_full}.{' Use euler or dpmpp_2m.' if why_full == NOISE_UNSEEN else ''}"
    if sampler and any(part in sampler for part in (*NOISY, "lcm")):
        return f"{begin}: {sampler} adds new noise in each. Use euler or dpmpp_2m, or plan for fewer dB."
    return f"{begin}: too much changed between them. Sample more steps, or choose Fast."
