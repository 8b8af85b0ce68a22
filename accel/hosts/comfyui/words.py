"""Advice in ComfyUI's own terms: its samplers, nodes, flags and file formats, none of which the engine knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.sentences import LOADED_IN_PART, OF_THE_MACHINE, SENTENCES

if TYPE_CHECKING:
    from ...core.reasons import Reason
    from ...report.facts import Fact

NOISY = ("ancestral", "sde", "ddpm", "seeds", "sa_solver")
"""Parts of the names of samplers that add noise in each step."""

SENTENCES.update(
    cuda_malloc_async="ComfyUI has torch allocate with cudaMallocAsync: turn on CUDA graphs in the Accel tab, or set "
    "ACCEL_CUDA_GRAPHS=on, and restart",
    graphs_nowhere="no: they need an NVIDIA GPU",
    graphs_given="yes: torch uses its own allocator, as ComfyUI was started",
    graphs_on="on",
    graphs_off="off: turn them on in the Accel tab, or set ACCEL_CUDA_GRAPHS=on, then restart ComfyUI",
    graphs_unknown="yes, where they are turned on or ComfyUI was started with --disable-cuda-malloc",
    graphs_restart="changed: restart ComfyUI",
    graphs_blocked="no: --cuda-malloc, PYTORCH_CUDA_ALLOC_CONF or an extension that imports PyTorch early has chosen "
    "another allocator; where they are turned on, ComfyUI's log says which",
    versions="Python {python}, PyTorch {torch}, {platform}",
    versions_with_core="{versions}, ComfyUI {core}",
    core_is_old="{versions} (update it: Accel is tested with {oldest} and later)",
    device="{name}",
    device_cpu="CPU only",
    compiles="yes",
    compiles_with="yes, with Triton {triton}",
    compiles_on_cpu="yes, with {compiler}; on a CPU it gains little",
    compiles_not="no: {why}",
    attention_compiled="compiled with the blocks",
    attention_called="{name}, called from compiled blocks; no CUDA graphs with it",
    sage_unused="SageAttention is installed and not in use: try --use-sage-attention (images differ; no CUDA graphs)",
    flash_unused="FlashAttention is installed and not in use: try --use-flash-attention (no CUDA graphs)",
    sage_missing='SageAttention is not installed: try "{python}" -m pip install sageattention and --use-sage-attention '
    "(images differ; no CUDA graphs)",
    bits_fp8="{model} is loaded in 16 bits: an fp8 form of it takes half the memory on this card (images differ)",
    bits_fp4="{model} is loaded in 16 bits: an fp4 form of it takes a third of the memory on this card (images differ)",
    host_bound_without_graphs='{slow}. CUDA graphs save most of that: "Turn on CUDA graphs"',
    weights_streamed="not all of its weights can stay in VRAM beside a CUDA graph (dynamic VRAM, or loaded in part)",
)

_ADVICE = {
    "line_traced": "Choose the backend inductor.",
    LOADED_IN_PART: "A smaller or quantized model, a smaller batch, or closing other programs helps most.",
    "few_steps": "It pays from about 20 steps on.",
    "steps_differ": "Sample more steps, or choose Fast.",
    **dict.fromkeys(
        ("cache_entries_full", "cache_bytes_full"), "Raise the graph cache's limits in the settings, under Accel."
    ),
    **dict.fromkeys(("patched", "attention_replaced"), "Without that patch they run compiled."),
    **dict.fromkeys(("compiled_around", *OF_THE_MACHINE), ""),
}
"""By the code of a reason, or by the reason itself; empty where it says what to do by itself."""


def advice(why: Reason | str | None, sampler: str | None = None) -> str | None:
    """What to do about it; None where there is nothing to do. sampler: its name in core."""
    code: Any = getattr(why, "code", why)
    if code == "steps_differ" and sampler and any(part in sampler for part in (*NOISY, "lcm")):
        return f"{sampler} adds new noise in each: use euler or dpmpp_2m, or plan for fewer dB."
    return _ADVICE.get(code)


def add_advice(fact: Fact, sampler: str | None = None) -> str:
    """The fact's sentence, with advice at the end of its first line. sampler: as for `advice`."""
    first, *details = fact.sentence.split("\n")
    return "\n".join([f"{first} {advice(fact.why, sampler) or ''}".rstrip(), *details])
