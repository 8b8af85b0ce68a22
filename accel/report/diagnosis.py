"""Why there is little or no gain, in sentences, and what to change first. Pure: facts in, words out."""

from __future__ import annotations

from collections.abc import Callable

from .diagnosis_facts import Facts
from .diagnosis_machine import (
    comfyui_too_old,
    cpp_compiler_missing,
    gpu_is_shared,
    no_gpu,
    partly_loaded,
    saves_memory,
    torch_too_old,
    triton_missing,
    weights_are_streamed,
)

FEW_STEPS = 12
"""Of a sampler: below it neighbouring steps differ too much for DeepCache's defaults to skip many."""

_CACHE_FULL = ("cache_entries_full", "cache_bytes_full")
_PATCHES = ("patched", "attention_replaced", "attention_override")
_TOO_FEW = "too_few_blocks"


def no_run(facts: Facts) -> str | None:
    if facts.run is not None:
        return None
    if facts.nodes.get("AccelModel") or facts.nodes.get("AccelDeepCache"):
        return (
            "No image was sampled with these nodes yet: connect the image to `anything` of this node, so that the "
            "report is made after it."
        )
    return (
        "No model ran with Accelerate Model or DeepCache since ComfyUI started: put one between the loaders and the "
        "sampler."
    )


def run_failed(facts: Facts) -> str | None:
    if not (facts.run or {}).get("failed"):
        return None
    return "The last run ended with an error or was stopped, so its figures are not those of a whole image."


def no_compiling_node(facts: Facts) -> str | None:
    if not facts.nodes or facts.compiling or facts.nodes.get("AccelModel"):
        return None
    return "Accelerate Model is not in this workflow, so no block is compiled."


def whole_model_compiled_too(facts: Facts) -> str | None:
    if not facts.nodes.get("TorchCompileModel") or not (facts.nodes.get("AccelModel") or facts.caching):
        return None
    return (
        "TorchCompileModel is in this workflow too: it compiles the whole model again for new sizes and keeps "
        "this pack's nodes from their work. Take it out."
    )


def backend_compiles_nothing(facts: Facts) -> str | None:
    if facts.compiling.get("backend") != "eager":
        return None
    return "The backend is eager, which captures blocks without compiling them and is no faster: choose inductor."


def cache_is_off(facts: Facts) -> str | None:
    if not facts.compiling or 0 not in (facts.cache.get("max_bytes"), facts.cache.get("max_entries")):
        return None
    return "The graph cache may hold nothing, so nothing is compiled: raise its budget (cache_mb, or Accel's settings)."


def cache_too_small(facts: Facts) -> str | None:
    if cache_is_off(facts) or not facts.compiling:
        return None
    refused = any(row["code"] in _CACHE_FULL for row in facts.reasons())
    evicted = facts.run.get("evicted", 0) if facts.run.get("compilations") else 0
    if not refused and not evicted:
        return None
    what = "did not hold all graphs of this run" if refused else f"dropped {evicted} graphs to make room in this run"
    return (
        f"The graph cache ({facts.cache.get('max_bytes', 0) / (1 << 20):.0f} MB, {facts.cache.get('max_entries', 0)} "
        f"kinds) {what}: raise its budget (cache_mb, or Accel's settings)."
    )


def sizes_were_cold(facts: Facts) -> str | None:
    run = facts.run or {}
    count = run.get("compilations", 0)
    if not count:
        return None
    told = (
        f"The graphs were not warm: {count} were compiled in this very run, which took {run['compile_seconds']:.1f} of "
        f"its {run['seconds']:.1f} s."
    )
    if facts.compiling.get("shapes") == "exact size":
        return f"{told} With exact size every new size, batch and prompt length compiles again: choose any size."
    return f"{told} The next image pays nothing of this, whatever its size: judge by that one, or use Warm Up Graphs."


def exact_size(facts: Facts) -> str | None:
    if facts.compiling.get("shapes") != "exact size" or sizes_were_cold(facts):
        return None
    return "shapes is exact size: each new size, batch and prompt length will be compiled anew. any size never is."


def loading_took_long(facts: Facts) -> str | None:
    run = facts.run or {}
    seconds = run.get("load_seconds", 0.0)
    if not run.get("loaded") or seconds < 0.1 * run["seconds"]:
        return None
    return (
        f"{run['loaded']} graphs were loaded from the disk in this run ({seconds:.1f} of its {run['seconds']:.1f} s), "
        "once after a restart: the next image has them in memory."
    )


def few_repetitions_left_out(facts: Facts) -> str | None:
    wanted = facts.compiling.get("min_repetitions", 1)
    left = sum(row["blocks"] for row in facts.left_eager() if row["code"] == _TOO_FEW)
    if wanted <= 1 or not left:
        return None
    return f"min_repetitions {wanted} keeps {left} blocks uncompiled: 1 compiles them too."


def blocks_fell_back(facts: Facts) -> str | None:
    run = facts.run or {}
    eager, reasons = run.get("eager_calls", 0), facts.reasons()
    if not eager or not reasons or not facts.compiling:
        return None
    code, reason = reasons[0]["code"], reasons[0]["reason"]
    total = eager + run.get("compiled_calls", 0)
    told = f"{eager} of {total} block calls ran uncompiled, most of them because: {reason.rstrip('.')}."
    if code in _PATCHES:
        return f"{told} Another node patches these blocks (attention, IP-Adapter): without it they run compiled."
    if code == "slower":
        return f"{told} That is not wrong: on this machine they are faster so."
    if code in ("gradients", "autocast"):
        return f"{told} No graph is made for that."
    return told


def not_captured(facts: Facts) -> str | None:
    run = facts.run or {}
    calls, replays = run.get("model_calls", 0), run.get("replays", 0)
    if 2 * replays >= calls:
        return None
    told = f"{calls - replays} of {calls} calls of the model were no replays of a CUDA graph"
    reasons = facts.reasons_not_captured()
    if reasons:
        return (
            f"{told}, most of them because: {reasons[0]['reason'].rstrip('.')}. The blocks ran compiled all the same."
        )
    return f"{told}, since a size is captured at its third or a later call: the next image of this size replays."


def blocks_left_out(facts: Facts) -> str | None:
    run = facts.run or {}
    left = [row for row in facts.left_eager() if row["code"] != _TOO_FEW]
    if not left or not facts.compiling:
        return None
    most = max(left, key=lambda row: row["blocks"])
    blocks = most["blocks"] + run.get("blocks", 0)
    return f"{most['blocks']} of {blocks} blocks cannot be compiled: {most['reason'].rstrip('.')}."


def nothing_measured(facts: Facts) -> str | None:
    if facts.compiling.get("backend") != "inductor" or facts.compiling.get("check_gain", True):
        return None
    return "check_gain is off, so nobody knows what compiling gains here: turn it on to have it measured."


def gain_is_small(facts: Facts) -> str | None:
    run = facts.run or {}
    saved = (run.get("by_compiling") or {}).get("seconds")
    if saved is None or sizes_were_cold(facts) or saved > 0.05 * run["seconds"]:
        return None
    return (
        f"Compiled blocks saved {max(saved, 0):.2f} of {run['seconds'] + max(saved, 0):.2f} s: what takes the time "
        "here is work that compiling cannot shorten, such as large matrix products."
    )


def deep_cache_is_off(facts: Facts) -> str | None:
    for inputs in facts.nodes.get("AccelDeepCache", ()):
        if inputs.get("interval") == 1:
            return "DeepCache's interval is 1, which switches it off: 3 is the default."
        if inputs.get("start_percent", 0.0) == inputs.get("end_percent", 1.0):
            return "DeepCache's start_percent and end_percent are equal, which leaves it no step to skip."
        if inputs.get("schedule") == "adaptive" and inputs.get("threshold") == 0:
            return "DeepCache's threshold is 0, with which it skips nothing: 0.05 is the default."
    return None


def deep_cache_found_no_place(facts: Facts) -> str | None:
    if not facts.nodes.get("AccelDeepCache") or facts.caching or facts.run is None or deep_cache_is_off(facts):
        return None
    return "DeepCache did not take part in the last run: the model is not one that it can cut, and the log says why."


def deep_cache_skipped_nothing(facts: Facts) -> str | None:
    run = facts.run or {}
    if not facts.caching or "S" in run.get("steps_taken", "") or deep_cache_is_off(facts):
        return None
    steps, sampler = run.get("steps") or len(run.get("steps_taken", "")), run.get("sampler") or "this sampler"
    if steps < FEW_STEPS:
        return (
            f"DeepCache skipped none of {steps} steps, since at so few too much changes from one to the next: it pays "
            "from about 20 steps on."
        )
    if "ancestral" in sampler or "sde" in sampler or sampler == "lcm":
        return (
            f"DeepCache skipped none of {steps} steps: {sampler} adds new noise in each, so that little stays alike. "
            "Use euler or dpmpp_2m, or a higher threshold."
        )
    return (
        f"DeepCache skipped none of {steps} steps with {sampler}: a higher threshold or the uniform schedule lets it."
    )


def vae_is_left_alone(facts: Facts) -> str | None:
    if not any(inputs.get("policy", "skip") == "skip" for inputs in facts.nodes.get("AccelVAESkipCompile", ())):
        return None
    return (
        "VAE Skip Compile leaves the VAE uncompiled, which is right for most: it runs once an image. Its policy auto "
        "compiles the decoder once many images of one size have come."
    )


CAUSES: tuple[Callable[[Facts], str | None], ...] = (
    *(no_run, run_failed, torch_too_old, triton_missing, cpp_compiler_missing, backend_compiles_nothing, cache_is_off),
    *(partly_loaded, cache_too_small, sizes_were_cold, whole_model_compiled_too, no_compiling_node),
    *(deep_cache_is_off, deep_cache_found_no_place, deep_cache_skipped_nothing, blocks_fell_back, blocks_left_out),
    *(not_captured, few_repetitions_left_out, exact_size, loading_took_long, gpu_is_shared, saves_memory, no_gpu),
    *(weights_are_streamed, nothing_measured, gain_is_small, comfyui_too_old, vae_is_left_alone),
)
"""What may stand in the way; what costs most, or is easiest to change, first."""


def diagnose(facts: Facts) -> list[str]:
    """One sentence or two for each thing that stands in the way, what to change first at the beginning."""
    return [sentence for sentence in (cause(facts) for cause in CAUSES) if sentence is not None]
