"""Advice in ComfyUI's own terms: its samplers, nodes, flags and file formats, none of which the engine knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.sentences import NOISE_UNSEEN, SENTENCES, counted

if TYPE_CHECKING:
    from ...core.reasons import Reason

NOISY = ("ancestral", "sde", "ddpm", "seeds", "sa_solver")
"""Parts of the names of samplers that add noise in each step."""

SENTENCES.update(
    cuda_malloc_async="ComfyUI has torch allocate with cudaMallocAsync: turn on CUDA graphs in the Accel tab, or set "
    "ACCEL_CUDA_GRAPHS=on, and restart",
    graphs_nowhere="no: they need an NVIDIA GPU, and ComfyUI uses none here",
    graphs_given="yes: torch uses its own allocator, as ComfyUI was started",
    graphs_on="yes: turned on here, so torch uses its own allocator",
    graphs_off="no: turn them on in the Accel tab, or set ACCEL_CUDA_GRAPHS=on, and restart ComfyUI",
    graphs_named_off="no: turned off by {variable}",
    graphs_kept_on="turned on, and so from ComfyUI's next start on, unless its flags or PYTORCH_CUDA_ALLOC_CONF say "
    "otherwise",
    graphs_unknown="yes, where they are turned on or ComfyUI was started with --disable-cuda-malloc",
    graphs_turned_on="turned on: restart ComfyUI",
    graphs_turned_off="turned off: restart ComfyUI",
    graphs_flag="no: ComfyUI was started with --cuda-malloc",
    graphs_configuration="no: PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF names another allocator",
    graphs_torch_loaded="no: another extension imports PyTorch before ComfyUI does",
    graphs_failed="no: the allocator could not be chosen, and ComfyUI's log says why",
    host_bound_without_graphs='{slow}. CUDA graphs save most of that: "Turn on CUDA graphs"',
    weights_streamed="not all of its weights can stay in VRAM beside a CUDA graph (dynamic VRAM, or loaded in part)",
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
