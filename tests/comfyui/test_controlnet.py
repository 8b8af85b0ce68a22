"""Accelerate ControlNet on every sort of control object of core: what `get_control` gives, and what it leaves alone."""

import copy
import gc
import logging
import weakref

import comfy.controlnet
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.controlnet import accelerate_control
from kit.blocks import heard
from kit.compiled import forwards_in_place, graphs
from kit.controls import CONTROLS, SMALL, TinyControl, adapter, image, unet_control
from kit.thorough import thorough_except
from kit.zoo import Noise, Size
from torch._dynamo.utils import counters

SIZES = [
    Size(height=16, width=16, batch=1),
    Size(height=10, width=15, batch=4, tokens=40),
    Size(height=12, width=22, batch=2, tokens=31),
    Size(height=20, width=18, batch=1),
]
"""A square first image of batch 1, then odd sizes, batches of cond and uncond, and a batch of 1 again."""

TOLERANCE = 1e-5  # of the largest value: a copy made contiguous is summed in another order

cache = GraphCache()
"""One for the file, as in a process: tracing is most of a test's time."""


def fast(control, cache=cache, **settings):
    return accelerate_control(control, CompileSettings(**{"backend": "eager", **settings}), cache)


def hint(seed: int = 4) -> torch.Tensor:
    return torch.rand(1, 3, 120, 96, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def residuals(control, specimen: TinyControl, size: Size, step: int = 0, end: bool = True) -> dict:
    """What a hinted control gives a sampler's model at one step."""
    latent, cond = specimen.inputs(size, Noise(step))
    model = specimen.model().model
    control.pre_run(model, model.model_sampling.percent_to_sigma)
    sigma = torch.full((len(latent),), float(model.model_sampling.percent_to_sigma(0.1 + 0.2 * step)))
    try:
        return control.get_control(latent, sigma, cond, 2 if len(latent) > 1 else 1, {})
    finally:
        if end:
            control.cleanup()


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for place in expected:
        assert len(actual[place]) == len(expected[place])
        for ours, theirs in zip(actual[place], expected[place], strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and theirs.isfinite().all()
                assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


TWICE = ("ControlNet in bf16", "ControlNet, fp16 cast to fp32", "ControlNet of three levels", "Union", "SD3")
TWICE += ("Flux XLabs", "Flux MistoLine", "Flux inpaint", "HunyuanDiT", "SD3.5", "Qwen-Image")
TWICE += ("Flux Union", "Control-LoRA", "T2I-Adapter XL", "T2I-Adapter light")
"""ControlNets of a class that another row has too, or of its blocks; HunyuanDiT's class is core's general one. A
Control-LoRA and two of Flux are compiled in test_controlnet_runs.py too."""


@pytest.mark.parametrize("name", thorough_except(CONTROLS, *(name for name in CONTROLS if name not in TWICE)))
def test_control_of_every_sort_gives_the_same_at_every_size_from_its_first_graphs(name):
    specimen, hits = CONTROLS[name], cache.statistics()["hits"]
    plain = specimen.build()
    given, accelerated = specimen.hinted(plain, hint()), specimen.hinted(fast(plain), hint())
    compiled = []
    with heard("survey") as found:
        for step, size in enumerate(SIZES):
            assert_same(residuals(accelerated, specimen, size, step), residuals(given, specimen, size, step))
            compiled.append(graphs())
    assert [fields["kinds"] for fields in found] == [specimen.kinds] * len(SIZES)  # one survey a run
    assert len(set(compiled)) == 1, compiled
    assert not counters["graph_break"] and fallbacks.rows() == []
    assert cache.statistics()["hits"] > hits


# The object


def test_given_control_is_unchanged_and_the_copy_is_of_its_very_class():
    plain = unet_control(**SMALL)
    before, weights = dict(vars(plain)), list(plain.control_model.state_dict())
    accelerated = fast(plain)
    residuals(accelerated.copy().set_cond_hint(hint()), CONTROLS["ControlNet"], SIZES[0])
    assert vars(plain) == before and type(accelerated) is type(plain) is comfy.controlnet.ControlNet
    assert accelerated.control_model is plain.control_model
    assert accelerated.get_models() == plain.get_models()
    assert list(plain.control_model.state_dict()) == weights and forwards_in_place(plain.control_model) == []


def first(name: str) -> tuple[TinyControl, Size]:
    return CONTROLS[name], SIZES[0]


def hits_of(control, specimen, size=SIZES[0]) -> int:
    """How many calls of blocks ran compiled in a step with the control."""
    before = cache.statistics()["hits"]
    residuals(control, specimen, size)
    return cache.statistics()["hits"] - before


def test_copies_of_copies_stay_accelerated_each_with_its_own_hint_and_strength():
    specimen, size = first("ControlNet")
    plain = specimen.build()
    one = specimen.hinted(fast(plain).copy(), hint(1), 0.3)
    two = specimen.hinted(one.copy(), hint(2), 0.9)
    assert_same(residuals(one, specimen, size), residuals(specimen.hinted(plain, hint(1), 0.3), specimen, size))
    assert_same(residuals(two, specimen, size), residuals(specimen.hinted(plain, hint(2), 0.9), specimen, size))
    assert hits_of(one, specimen) == hits_of(two, specimen) > 0


def test_accelerating_twice_stands_before_a_control_once():
    specimen, size = first("ControlNet")
    plain = specimen.build()
    once = specimen.hinted(fast(plain), hint())
    twice = specimen.hinted(fast(fast(plain)), hint())
    assert hits_of(twice, specimen) == hits_of(once, specimen)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_by_python_is_a_plain_control_of_its_own(copied):
    specimen, size = first("ControlNet")
    plain = specimen.build()
    original = specimen.hinted(fast(plain), hint(), 0.8)
    other = copied(original)
    other.strength = 0.2
    assert_same(residuals(other, specimen, size), residuals(specimen.hinted(plain, hint(), 0.2), specimen, size))
    assert_same(residuals(original, specimen, size), residuals(specimen.hinted(plain, hint(), 0.8), specimen, size))
    assert other.copy().strength == 0.2 and original.copy().strength == 0.8


def test_chain_with_a_plain_control_over_the_same_network_compiles_the_accelerated_one_alone():
    specimen, size = first("ControlNet")
    plain = specimen.build()

    def chained(last):
        return last.set_previous_controlnet(specimen.hinted(plain, hint(2), 0.5))

    alone = hits_of(specimen.hinted(fast(plain), hint()), specimen)
    chain = chained(specimen.hinted(fast(plain), hint()))
    assert_same(residuals(chain, specimen, size), residuals(chained(specimen.hinted(plain, hint())), specimen, size))
    assert hits_of(chain, specimen) == alone > 0


class WithOwnCalls(comfy.controlnet.ControlNet):
    """As extensions write theirs: calls put on the instance, and a network that is looked at."""

    def __init__(self, network):
        super().__init__(network, load_device=torch.device("cpu"))
        self.get_control = self.get_control_of_ours

    def get_control_of_ours(self, x_noisy, t, cond, batched_number, transformer_options):
        assert isinstance(self.control_model, torch.nn.Module) and self.control_model.dtype == torch.float32
        self.seen = tuple(x_noisy.shape)
        return super().get_control(x_noisy, t, cond, batched_number, transformer_options)

    def copy(self):
        copied = WithOwnCalls(self.control_model)
        self.copy_to(copied)
        return copied


def test_control_of_an_extension_keeps_its_own_calls():
    specimen, size = first("ControlNet")
    plain = WithOwnCalls(specimen.build().control_model)
    accelerated = specimen.hinted(fast(plain), hint())
    assert_same(residuals(accelerated, specimen, size), residuals(specimen.hinted(plain, hint()), specimen, size))
    assert accelerated.seen == (1, 4, 16, 16) and type(accelerated) is WithOwnCalls
    assert hits_of(accelerated, specimen) > 0


class WithoutNetwork(comfy.controlnet.ControlBase):
    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        return {"input": [], "middle": [torch.full_like(x_noisy, self.strength)], "output": []}

    def copy(self):
        copied = WithoutNetwork()
        self.copy_to(copied)
        return copied


def test_control_without_a_network_runs_as_it_is_and_says_so():
    specimen, size = first("ControlNet")
    given = residuals(specimen.hinted(fast(WithoutNetwork()), hint()), specimen, size)
    assert torch.equal(given["middle"][0], torch.full((1, 4, 16, 16), 0.8))
    assert [row["block"] for row in fallbacks.rows()] == ["WithoutNetwork"]


def test_what_is_no_control_comes_back_as_it_is(caplog):
    class Other:
        pass

    given = Other()
    with caplog.at_level(logging.WARNING):
        assert fast(given) is given
    assert "not a control object" in caplog.text


@pytest.mark.skipif(not hasattr(comfy.controlnet.ControlBase, "deepclone_multigpu"), reason="core has no such clones")
def test_clone_for_another_device_is_accelerated_over_a_network_of_its_own():
    specimen, size = first("ControlNet")
    original = specimen.hinted(fast(specimen.build()), hint())
    clone = original.deepclone_multigpu(torch.device("cpu"), autoregister=True)
    assert clone.control_model is not original.control_model
    assert_same(residuals(clone, specimen, size), residuals(original, specimen, size))
    assert hits_of(clone, specimen) > 0
    assert original.get_instance_for_device(torch.device("cpu")) is clone


# When something fails


def test_wrong_call_is_the_error_that_it_is_without_us_and_leaves_no_trace():
    specimen, size = first("ControlNet")
    plain = specimen.build()
    accelerated = specimen.hinted(fast(plain), hint())
    wrong = TinyControl(specimen.build, specimen.model, image(4, 512), 0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        residuals(accelerated, wrong, size)
    assert accelerated.control_model is plain.control_model and forwards_in_place(plain.control_model) == []
    assert_same(residuals(accelerated, specimen, size), residuals(specimen.hinted(plain, hint()), specimen, size))


def test_lease_of_a_run_that_was_broken_off_ends_with_the_next_or_with_the_control():
    specimen, own = CONTROLS["T2I-Adapter"], GraphCache()
    accelerated = specimen.hinted(fast(specimen.build(), own), hint())
    for _ in range(2):
        residuals(accelerated, specimen, SIZES[0], end=False)
        assert len(own._leases) == 1
    del accelerated
    gc.collect()
    residuals(specimen.hinted(fast(specimen.build(), own), hint()), specimen, SIZES[0])
    assert not own._leases


def test_network_that_is_gone_leaves_nothing_but_kernels():
    specimen = CONTROLS["ControlNet"]
    plain = specimen.build()
    residuals(specimen.hinted(fast(plain), hint()), specimen, SIZES[0])
    left = [weakref.ref(plain.control_model), *map(weakref.ref, plain.control_model.parameters())]
    del plain
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []


def test_adapter_computes_once_for_a_hint():
    specimen, calls = CONTROLS["T2I-Adapter"], []
    plain = adapter()
    plain.t2i_model.register_forward_hook(lambda *args: calls.append(None))
    accelerated = specimen.hinted(fast(plain), hint())
    for _ in range(3):
        residuals(accelerated, specimen, SIZES[0], end=False)
        assert len(calls) == 1
