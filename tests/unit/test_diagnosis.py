"""Each sentence about a missing gain: when it is said, and that it says what to do."""

import pytest
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.hosts.comfyui.server.diagnosis import CAUSES, Facts, diagnose, nodes_of
from comfy_accel.accel.report.savings import Saving
from kit.run_facts import run_of

WARM = {
    "model": "SDXL",
    "latent": (1, 4, 128, 128),
    "steps": 30,
    "sampler": "euler",
    "compiling": {"backend": "inductor", "shapes": "any size", "check_gain": True},
    "seconds": 10.0,
    "compiled_calls": 1000,
    "blocks": 70,
    "kinds": 9,
    "loaded_share": 1.0,
}
GIB = 1 << 30


def facts(run=None, **changes):
    """A machine with a GPU on which all is well, and the run `WARM` with changes."""
    well = {
        "run": run_of(**{**WARM, **(run or {})}),
        "cache": {"max_bytes": 2 << 30, "max_entries": 512},
        "device": "cuda",
        "torch": "2.11.0",
        "comfyui": "0.3.75",
        "oldest_comfyui": (0, 3, 75),
        "memory_total": 24 * GIB,
        "memory_of_others": GIB,
    }
    return Facts(**{**well, **changes})


def compiling(**changes):
    return {"compiling": {**WARM["compiling"], **changes}}


def skipping(**run):
    return {"caching": {"interval": 3}, "compiling": None, "steps_taken": "F" * run.get("steps", 30), **run}


def rows(*reasons, calls=10):
    return {("Block", reason): calls for reason in reasons}


def test_where_all_is_well_nothing_is_said():
    assert diagnose(facts()) == []


SAID = [
    (Facts(), "between the loaders and the sampler"),
    (Facts(nodes={"AccelModel": [{}]}), "connect the image to `anything`"),
    (facts({"failed": True}), "not those of a whole image"),
    (facts(torch="2.7.1", compiles=False), "2.11 or later"),
    (facts(tool_missing="torch needs Triton"), "Nothing is compiled: torch needs Triton."),
    (facts(comfyui="0.3.74"), "update it"),
    (facts({"compiling": None}, nodes={"KSampler": [{}]}), "put Speed Up between"),
    (facts(nodes={"KSampler": [{}]}), "of an earlier workflow"),
    (facts(nodes={"TorchCompileModel": [{}], "AccelModel": [{}]}), "Take it out"),
    (facts(compiling(backend="eager")), "choose inductor"),
    (facts(cache={"max_bytes": 0, "max_entries": 9}), "raise its limits"),
    (facts(cache={"max_bytes": 9, "max_entries": 0}), "raise its limits"),
    (facts({"evicted": 3, "compilations": 3, "compile_seconds": 1.0}), "dropped 3 graphs"),
    (facts({"fallbacks": rows(Reason("cache_bytes_full", megabytes="2"))}), "did not hold"),
    (facts({"compilations": 9, "compile_seconds": 8.0}), "8.0 of its 10.0 s"),
    (
        facts({**compiling(shapes="exact size"), "compilations": 9, "compile_seconds": 8.0}),
        "choose any size",
    ),
    (facts(compiling(shapes="exact size")), "With any size none does"),
    (facts({"loaded": 9, "load_seconds": 2.0}), "once after a restart"),
    (
        facts({"eager_calls": 66, "fallbacks": rows(Reason("patched", patch="attn2_patch"))}),
        "66 of 1066 block calls",
    ),
    (
        facts({"eager_calls": 1, "fallbacks": rows(Reason("slower", compiled="2", eager="1"))}),
        "run faster uncompiled",
    ),
    (
        facts({"eager_calls": 1, "fallbacks": rows(Reason("autocast"))}),
        "always run uncompiled",
    ),
    (
        facts({"model_calls": 30, "fallbacks": rows(Reason("not_captured", why=Reason("weights_streamed")))}),
        "30 of 30 model calls did not replay a CUDA graph, mostly because: not all of its weights",
    ),
    (facts({"model_calls": 4, "replays": 1}), "the next image of this size replays"),
    (
        facts({"left_eager": {Reason("indescribable", what="a lock"): 10}}),
        "10 of 80 blocks",
    ),
    (facts(compiling(check_gain=False)), "turn it on"),
    (facts({"by_compiling": Saving(0.1, Reason("compiling_saved"))}), "matrix products"),
    (
        facts(nodes={"AccelDeepCache": [{"start_percent": 0.5, "end_percent": 0.5}]}),
        "no step to skip",
    ),
    (
        facts({"prompt": "a"}, nodes={"AccelDeepCache": [{"quality": "Fast"}]}, prompt="a"),
        "the log says why",
    ),
    (
        facts(skipping(steps=4, why_full="the noise levels of this run go up and down")),
        "DeepCache skipped none of 4 steps: the noise levels",
    ),
    (facts(skipping(steps=6)), "about 20 steps on"),
    (facts(skipping(sampler="euler_ancestral")), "Use euler"),
    (facts(skipping()), "choose Fast"),
    (facts(device="cpu"), "on the CPU"),
    (facts({"loaded_share": 0.4}), "Only 40%"),
    (facts(low_vram="lowvram"), "mode lowvram"),
    (facts(streams_weights=True), "dynamic VRAM"),
    (facts(memory_of_others=11 * GIB), "hold 11.0 of the GPU's 24 GB"),
]


@pytest.mark.parametrize(("given", "said"), SAID, ids=[said for _, said in SAID])
def test_cause_is_told_with_what_to_do(given, said):
    (sentence,) = [sentence for sentence in diagnose(given) if said in sentence]
    assert sentence.endswith(".") and len(sentence) < 400 and "\n" not in sentence


@pytest.mark.parametrize("cause", CAUSES, ids=[cause.__name__ for cause in CAUSES])
def test_cause_lives_without_facts(cause):
    assert all(isinstance(sentence, str) for sentence in cause(Facts()))


def test_figures_of_an_earlier_workflow_bring_no_advice():
    given = facts(skipping(steps=6), device="cpu", nodes={"KSampler": [{}]})
    (sentence,) = diagnose(given)
    assert "of an earlier workflow" in sentence
    of_this = facts({"prompt": "a"}, nodes={"KSampler": [{}]}, prompt="a")
    assert diagnose(of_this) == [], "nodes that another node made are in no workflow"


def test_speed_up_that_should_skip_is_told_where_it_cannot():
    balanced, exact = ({"AccelSpeedUp": [{"quality": quality}]} for quality in ("Balanced", "Exact"))
    assert "it cannot split this model" in diagnose(facts({"prompt": "a"}, nodes=balanced, prompt="a"))[0]
    assert diagnose(facts({"prompt": "a"}, nodes=exact, prompt="a")) == []
    assert diagnose(facts({"prompt": "a"}, nodes=balanced, prompt="b")) == [], "of an earlier workflow"


def test_blocks_are_not_called_compiled_where_none_are():
    run = {"model_calls": 12, "fallbacks": rows(Reason("not_captured", why=Reason("weights_streamed")))}
    compiled, not_compiled = (diagnose(facts({**run, "compiled_calls": calls}))[0] for calls in (48, 0))
    assert "compiled all the same" in compiled and "compiled all the same" not in not_compiled


def test_a_card_that_is_busy_without_cuda_graphs_is_nothing_to_change():
    run = {"model_calls": 12, "fallbacks": rows(Reason("not_captured", why=Reason("device_busy")))}
    assert diagnose(facts({**run, "compiled_calls": 48})) == []


def test_what_stops_all_comes_before_what_costs_little():
    cold = {"compilations": 1, "compile_seconds": 0.1}
    given = facts(cold, tool_missing="torch needs Triton", memory_of_others=12 * GIB)
    told = diagnose(given)
    assert "Triton" in told[0] and "Other programs" in told[-1] and len(told) == 3


def test_compiled_in_this_run_is_not_called_a_small_gain():
    small = {"by_compiling": Saving(0.1, Reason("compiling_saved"))}
    assert len(diagnose(facts({**small, "compilations": 1, "compile_seconds": 1.0}))) == 1


def test_workflow_is_read_by_class_without_links():
    prompt = {
        "1": {"class_type": "AccelDeepCache", "inputs": {"model": ["4", 0], "interval": 1}},
        "2": {"class_type": "AccelDeepCache", "inputs": {"interval": 3}},
        "3": "no node",
    }
    assert nodes_of(prompt) == {"AccelDeepCache": [{"interval": 1}, {"interval": 3}]}
    assert nodes_of(None) == {}
