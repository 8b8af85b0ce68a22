"""The Speed Up node: what each quality does to a model, and the line that its run leaves on it."""

import copy

import comfy.samplers
import pytest
import torch
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui import models
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.config import QUALITIES
from comfy_accel.nodes import controlnet, speed_up
from comfy_accel.nodes.deep_cache import AccelDeepCache
from comfy_accel.nodes.speed_up import AccelSpeedUp
from comfy_extras import nodes_custom_sampler
from kit import real_prompts, tiny_models, tiny_vaes
from kit.blocks import heard
from kit.real_prompts import give, keep
from kit.tiny_models import sample

import nodes


@pytest.fixture(autouse=True)
def with_eager_graphs(monkeypatch):
    """Graphs that are traced and not compiled give the very same image, in a moment."""
    monkeypatch.setattr(speed_up, "CompileSettings", lambda **_: CompileSettings(backend="eager"))
    records.clear()


@pytest.fixture
def by_hand(monkeypatch):
    """The node is outside of a prompt, as number 7."""
    for module in (models.accelerate, models.deep_cache):
        monkeypatch.setattr(module, "find_upstream_node", lambda *_, **choices: "7")


@pytest.fixture
def prompts(monkeypatch, tmp_path):
    return real_prompts.prompts(monkeypatch, tmp_path)


def sped_up(model, quality):
    return AccelSpeedUp.execute(model, quality).args[0]


def said():
    return " · ".join(map(str, records.last().lines["7"]))


def test_exact_is_the_same_image_and_says_that_nothing_was_compiled(by_hand):
    model = tiny_models.small_unet()
    plain = sample(model, 64, 64, steps=4)
    assert torch.equal(sample(sped_up(model, "Exact"), 64, 64, steps=4), plain)
    assert said() == "Exact 64×64 · traced but uncompiled (backend eager)"


@pytest.mark.parametrize(("quality", "by_hand"), [("Balanced", {}), ("Fast", {"quality": "Fast"})])
def test_quality_is_that_of_deep_cache(quality, by_hand):
    model = tiny_models.small_unet()
    images = [
        sample(each, 64, 64, steps=16)
        for each in (AccelDeepCache.execute(model, **by_hand).args[0], sped_up(model, quality), model)
    ]
    assert torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])
    assert records.last().skipping.target_db == QUALITIES[quality].quality


def test_few_steps_are_said_to_be_too_few(by_hand):
    model = tiny_models.small_unet()
    plain = sample(model, 64, 64, steps=4)
    assert torch.equal(sample(sped_up(model, "Fast"), 64, 64, steps=4), plain)
    assert said().endswith("no step skipped: with so few, each changes too much")


def test_who_searches_for_speed_finds_this_node():
    aliases = getattr(AccelSpeedUp.define_schema(), "search_aliases", None)
    if aliases is None:
        pytest.skip("this core knows no aliases")
    words = {"faster", "speed up", "optimize", "performance", "compile", "torch compile", "teacache"}
    assert words | {"wavespeed", "first block cache", "easycache", "sage"} <= set(aliases)


def test_a_vae_goes_through_and_none_is_needed():
    vae = tiny_vaes.sd15()
    model, view = AccelSpeedUp.execute(tiny_models.small_unet(), "Exact", vae).args
    latent = torch.randn(1, 4, 8, 8)
    assert torch.equal(view.decode(latent), vae.decode(latent))
    assert AccelSpeedUp.execute(model, "Exact").args[1] is None


def test_a_vae_that_is_read_and_was_not_given_is_an_error_of_this_node_before_it_samples(prompts, monkeypatch):
    monkeypatch.delattr(real_prompts.Give, "IS_CHANGED")
    prompt = {
        "1": give("model"),
        "7": {"class_type": "AccelSpeedUp", "inputs": {"model": ["1", 0], "quality": "Exact"}},
        "9": keep("model", "7"),
    }
    things = {"model": tiny_models.small_unet()}
    prompts.run(copy.deepcopy(prompt), **things)  # core writes into it
    prompt["8"] = keep("vae", "7", 1)
    with pytest.raises(real_prompts.Failed, match="connect one to its input vae"):
        prompts.run(prompt, **things)
    (failure,) = [data for event, data in prompts.executor.status_messages if event == "execution_error"]
    assert failure["node_id"] == "7"


def sampler(latent, steps, model="7"):
    settings = {"seed": 1, "steps": steps, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    links = {"model": [model, 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": latent}
    return {"class_type": "KSampler", "inputs": {**settings, **links}}


def test_two_samplers_of_a_prompt_are_told_of_together(prompts):
    """A first pass and a hires fix, through core's executor."""
    prompt = {
        "1": give("model"),
        "2": give("conditioning"),
        "3": give("latent"),
        "7": {"class_type": "AccelSpeedUp", "inputs": {"model": ["1", 0], "quality": "Fast"}},
        "4": sampler(["3", 0], 14),
        "5": {
            "class_type": "LatentUpscale",
            "inputs": {
                "samples": ["4", 0],
                **{"upscale_method": "nearest-exact", "width": 96, "height": 64, "crop": "disabled"},
            },
        },
        "6": sampler(["5", 0], 3),
        "9": keep("latent", "6"),
    }
    things = {
        "model": tiny_models.small_unet(),
        "conditioning": tiny_models.conditioning(),
        "latent": {"samples": torch.zeros(1, 4, 8, 8)},
    }
    with heard("run_over") as told:
        prompts.run(prompt, **things)
    run = records.last()
    assert (run.samplings, run.steps, len(run.skipping.steps_taken), run.pixels) == (2, 17, 17, (96, 64))
    skipped = run.skipping.steps_taken.count("S")
    assert skipped and said().endswith(f"{skipped / 17:.0%} of the work skipped, planned for 35 dB")
    assert [list(over["run"].lines) for over in told] == [["7"], ["7"]] and told[-1]["run"].lines == run.lines
    assert records.last().skipping.steps_taken == run.skipping.steps_taken
    assert 0 < run.prepare_seconds < run.seconds
    prompts.run({**prompt, "4": sampler(["3", 0], 13)}, **things)
    assert records.last().steps == 16, "the next prompt is a run of its own"


@pytest.fixture
def lines(prompts, monkeypatch):
    """A prompt's nodes between the loader and the end → ids of the nodes that have a line after it."""
    monkeypatch.delattr(real_prompts.Give, "IS_CHANGED")
    things = {
        "model": tiny_models.small_unet(),
        "conditioning": tiny_models.conditioning(),
        "latent": {"samples": torch.zeros(1, 4, 8, 8)},
    }
    sources = {"1": give("model"), "2": give("conditioning"), "3": give("latent")}

    def run(graph, last):
        prompts.run({**sources, **graph, "9": keep("latent", last)}, **things)
        return list(records.last().lines)

    return run


def speed_up_node(quality="Exact", model="1"):
    return {"class_type": "AccelSpeedUp", "inputs": {"model": [model, 0], "quality": quality}}


def test_the_line_is_on_the_node_that_ran_whatever_number_it_had_before(lines):
    """Core hands the model of a node to each later one with equal inputs."""
    for steps, node in enumerate(("7", "12:7", "20:12:7", "31")):
        assert lines({node: speed_up_node(), "4": sampler(["3", 0], 1 + steps, node)}, "4") == [node]
    both = {"30": speed_up_node(), "31": speed_up_node()}
    first, second = sampler(["3", 0], 6, "30"), sampler(["4", 0], 6, "31")
    assert lines({**both, "4": first, "5": second}, "5") == ["30", "31"]


def test_a_list_of_choices_among_the_types_on_the_way_is_nothing_special(lines, monkeypatch):
    """As sampler selectors of packs give, of version 1."""

    class ChooseSampler:
        RETURN_TYPES, FUNCTION, CATEGORY = (comfy.samplers.KSampler.SAMPLERS,), "choose", ""

        @classmethod
        def INPUT_TYPES(cls):  # noqa: N802
            return {"required": {}}

        def choose(self):
            return ("euler",)

    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "ChooseSampler", ChooseSampler)
    asked = sampler(["3", 0], 1)
    asked["inputs"]["sampler_name"] = ["5", 0]
    assert lines({"5": {"class_type": "ChooseSampler", "inputs": {}}, "7": speed_up_node(), "4": asked}, "4") == ["7"]


def test_of_several_nodes_on_the_way_the_one_at_work_has_the_line(lines, monkeypatch):
    """An image goes through a sampler with one node into a guider with another, which has a third further up. That one
    skips, since the nearer one asks for nothing to be skipped, and compiles nothing."""
    for name in ("BasicGuider", "KSamplerSelect", "BasicScheduler", "DisableNoise", "SamplerCustomAdvanced"):
        node = getattr(nodes_custom_sampler, name)
        node.GET_SCHEMA()
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, name, node)
    graph = {
        "7": speed_up_node(),
        "4": sampler(["3", 0], 1),
        "8": speed_up_node("Fast"),
        "10": speed_up_node("Exact", "8"),
        "11": {"class_type": "BasicGuider", "inputs": {"model": ["10", 0], "conditioning": ["2", 0]}},
        "12": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "13": {
            "class_type": "BasicScheduler",
            "inputs": {"model": ["1", 0], "scheduler": "normal", "steps": 2, "denoise": 1.0},
        },
        "14": {"class_type": "DisableNoise", "inputs": {}},
        "15": {
            "class_type": "SamplerCustomAdvanced",
            "inputs": {
                **{"noise": ["14", 0], "guider": ["11", 0], "sampler": ["12", 0]},
                **{"sigmas": ["13", 0], "latent_image": ["4", 0]},
            },
        },
    }
    assert lines(graph, "15") == ["7", "10", "8"]
    said = {node: [part.code for part in line] for node, line in records.last().lines.items()}
    traced = ["line_image", "line_traced"]
    assert said == {"7": traced, "10": traced, "8": ["line_size", "line_none_skipped"]}


def test_two_controlnets_with_equal_inputs_each_know_their_node(prompts, monkeypatch):
    """Several may lead to one sampler, so there the number must be the node's own."""
    monkeypatch.delattr(real_prompts.Give, "IS_CHANGED")
    made = []
    monkeypatch.setattr(controlnet, "accelerate_control", lambda control, settings, node_id: made.append(node_id))
    how = {"shapes": "any size", "backend": "inductor", "on_trouble": "run eagerly"}
    prompt = {"1": give("control")}
    for node in ("7", "12:7"):
        prompt[node] = {"class_type": "AccelControlNet", "inputs": {"control_net": ["1", 0], **how}}
        prompt[f"9{node}"] = keep(node, node)
    prompts.run(prompt, control=object())
    assert sorted(made) == ["12:7", "7"]
