"""Warm Up Graphs, Clear Graph Cache, compile progress and the measured fall-back, on a real sampler."""

import gc
import time
import weakref

import comfy.samplers
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache, shared
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.warm_up import parse_numbers, parse_sizes, warm_up
from comfy_accel.accel.sizing.resolution import Size
from comfy_accel.nodes.clear_cache import AccelClearGraphCache
from comfy_accel.nodes.warm_up import AccelWarmUpGraphs
from kit import tiny_models
from kit.deep_cache import cached

EAGER = CompileSettings(backend="eager")


@pytest.fixture(scope="module")
def small():
    """One kind, so that compiling takes a moment only."""
    return tiny_models.res_blocks()


def test_warmed_up_model_compiles_nothing_for_the_first_image(small_unet, sample):
    cache = GraphCache()
    fast = accelerate(small_unet, EAGER, cache)
    runs, seconds = warm_up(fast, tiny_models.conditioning(), [Size(64, 64), Size(72, 120)], [1, 2], [77, 154])
    assert runs == 8 and seconds > 0
    compiled = cache.statistics()["compilations"]
    assert compiled > 0
    assert torch.equal(sample(fast, 128, 64, tokens=231), sample(small_unet, 128, 64, tokens=231))
    assert cache.statistics()["compilations"] == compiled


def test_nothing_is_said_of_steps_that_are_thrown_away(small_unet, caplog):
    caplog.set_level("INFO")
    warm_up(cached(small_unet), tiny_models.conditioning(), [Size(64, 64)], [1])
    assert [record.getMessage() for record in caplog.records if "DeepCache" in record.getMessage()] == []


def test_exact_sizes_are_warmed_up_one_by_one(sample):
    cache = GraphCache()
    model = tiny_models.small_unet(channel_mult=[1], num_res_blocks=[0], transformer_depth_output=[0])  # one block
    fast = accelerate(model, CompileSettings(backend="eager", any_size=False), cache)
    warm_up(fast, tiny_models.conditioning(), [Size(64, 64), Size(64, 96)], [1])
    compiled = cache.statistics()["compilations"]
    sample(fast, 64, 96)
    assert cache.statistics()["compilations"] == compiled
    sample(fast, 96, 96)
    assert cache.statistics()["compilations"] > compiled


def test_attention_mask_gets_the_prompts_length(small, monkeypatch):
    seen = []
    monkeypatch.setattr(
        comfy.samplers.KSampler, "sample", lambda self, noise, positive, *args, **kwargs: seen.append(positive[0])
    )
    mask = torch.arange(77)[None] < 70
    prompt = tiny_models.conditioning(attention_mask=mask, attention_mask_img_shape=(2, 3))
    warm_up(small, prompt, [Size(64, 64)], [1], [154, 20])
    for (text, extra), length in zip(seen, (154, 20), strict=True):
        assert text.shape[1] == length
        assert torch.equal(extra["attention_mask"], torch.cat([mask, mask], dim=1)[:, :length])
        assert extra["attention_mask_img_shape"] == (2, 3)
    assert prompt[0][1]["attention_mask"] is mask


def test_sizes_and_numbers_are_read_as_people_write_them():
    assert parse_sizes("1024x1024, 720 x 960;\n512×768,") == [Size(1024, 1024), Size(720, 960), Size(512, 768)]
    assert parse_numbers(" 1, 4 ", "batches") == [1, 4]


@pytest.mark.parametrize(("sizes", "batches", "said"), [("10x", "1", "720x960"), ("64x64", "0", "from 1 on")])
def test_wrong_lists_are_refused_with_what_would_be_right(sizes, batches, said):
    assert said in AccelWarmUpGraphs.validate_inputs(sizes=sizes, batches=batches)


def test_clearing_drops_graphs_and_frees_them(small, sample):
    sample(accelerate(small, EAGER), 64, 64)
    graphs = [weakref.ref(graph) for entry in shared._entries.values() for graph in entry.graphs]
    assert graphs
    report = AccelClearGraphCache.execute(anything="passes through").args
    assert report[0] == "passes through" and "dropped" in report[1]
    gc.collect()
    assert [graph for graph in graphs if graph() is not None] == []
    assert shared.statistics()["entries"] == 0


def test_checking_gain_costs_little_of_the_first_image(small, sample):
    """With the backend that compiles nothing, which makes the image shorter, and so the share larger."""
    cache = GraphCache()
    started = time.perf_counter()
    sample(accelerate(small, CompileSettings(backend="eager", measured=True), cache), 128, 128, steps=20)
    share = cache.statistics()["probe_seconds"] / (time.perf_counter() - started)
    print(f"comparing took {share:.2%} of the first image")
    assert 0 < share < 0.1  # 0.02 is the goal
