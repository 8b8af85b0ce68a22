"""A model of which more or less is on the device: one graph serves a block however it is split.

On the CPU the parts that are loaded and those that are not share a device, so what is moved is not seen here; what is
compiled, taken and patched is.
"""

import weakref

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import RunEagerly
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models import streamed
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from kit import streamed_weights as stand_in
from kit import tiny_models
from kit.compiled import graphs
from kit.families import DITS, FAMILIES
from kit.thorough import thorough_except
from kit.tiny_models import lora as lora_file

SHARES = (1, 0.995, 0.2)
"""All; all but a part of one block; the largest parts alone."""


LOAD = comfy.model_patcher.ModelPatcher.load


@pytest.fixture
def model():
    return tiny_models.res_blocks(model_channels=64)


def load(model, share: float) -> int:
    """Load this share of the weights; how many blocks are not loaded whole."""
    model.detach()
    model.load(torch.device("cpu"), lowvram_model_memory=int(model.model_size() * share), full_load=share == 1)
    blocks = [region.block for region in survey(model.model.diffusion_model).regions]
    return sum(any(hasattr(part, "prev_comfy_cast_weights") for part in block.modules()) for block in blocks)


def load_in_part(monkeypatch, share: float) -> None:
    """From here on core's sampling loads this share of a model's weights."""

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        LOAD(self, device_to, int(self.model_size() * share), force_patch_weights, full_load=False)

    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "load", load)


def run(model, cache, **settings) -> bool:
    """Whether a call of the accelerated model is as the plain one, bit for bit."""
    x, t, context = torch.randn(2, 4, 12, 15), torch.tensor([5.0, 5.0]), torch.randn(2, 77, tiny_models.CONTEXT_DIM)
    with torch.inference_mode():
        plain = model.model.apply_model(x, t, c_crossattn=context, transformer_options={})
        options = {"wrappers": accelerate(model, CompileSettings(backend="eager", **settings), cache).wrappers}
        return torch.equal(model.model.apply_model(x, t, c_crossattn=context, transformer_options=options), plain)


def test_one_graph_serves_a_block_however_it_is_split(model):
    cache = GraphCache()
    try:
        assert load(model, 1) == 0 and run(model, cache)
        whole = graphs()
        assert [load(model, share) > 0 and run(model, cache) for share in SHARES[1:]] == [True, True]
        assert load(model, 1) == 0 and run(model, cache)
        assert graphs() == whole > 0 and fallbacks.rows() == []
    finally:
        model.detach()


def test_module_that_counts_as_false_is_copied_without_what_core_keeps_on_it():
    class Empty(torch.nn.Module):
        def __len__(self):
            return 0

    block = torch.nn.Sequential(Empty())
    block[0].seed_key = "0"
    assert not hasattr(streamed.plain(block)[0], "seed_key") and hasattr(block[0], "seed_key")


def test_lora_is_added_to_weights_that_wait_as_core_adds_it(model):
    cache = GraphCache()
    for strength in (0.0, 1.0, 0.5):
        patched = comfy.sd.load_lora_for_models(model, None, lora_file(model, 1), strength, 0)[0] if strength else model
        try:
            assert load(patched, 0.2) and run(patched, cache)
        finally:
            patched.detach()
    assert graphs() == cache.statistics()["graphs"] > 0 and fallbacks.rows() == []


@pytest.mark.parametrize("name", thorough_except(DITS, "Flux"))
@pytest.mark.parametrize("stored", thorough_except([torch.bfloat16, torch.float16], torch.bfloat16))
def test_transformers_whose_angles_are_float32_run_compiled_with_lora_on_weights_that_wait(name, stored, monkeypatch):
    """Beside tokens of the model's own type, their blocks take angles in float32."""
    cache, made, file = GraphCache(), [], lora_file(DITS[name].family.load(stored), 1)
    for share, strength, size in ((0.6, 0.0, 0), (0.6, 1.0, 0), (0.2, 0.5, 1), (0.9, 1.0, 1)):
        load_in_part(monkeypatch, share)
        model = DITS[name].family.load(stored)
        patched = comfy.sd.load_lora_for_models(model, None, file, strength, 0)[0] if strength else model
        expected = DITS[name].sample(patched, size, steps=2)
        added = [part.weight_function for part in model.model.modules() if getattr(part, "weight_function", ())]
        assert model.model.model_lowvram and bool(added) == bool(strength)
        fast = accelerate(patched, CompileSettings(backend="eager"), cache)
        assert torch.equal(DITS[name].sample(fast, size, steps=2), expected) and expected.isfinite().all()
        made.append(graphs())
        assert fallbacks.rows() == []
        model.detach()
    assert made[0] > 0 and len(set(made)) == 1


def test_lora_on_quantised_weights_that_wait_is_added_by_core_within_compiled_blocks(monkeypatch):
    """Core adds it to what it makes of fp8, and never rounds the sum."""
    cache, made = GraphCache(), []
    for share, strength in ((0.2, 1.0), (0.2, 0.5), (1.0, 0.0), (0.2, 0.3)):
        load_in_part(monkeypatch, share)
        model = FAMILIES["Flux"].load(stored=torch.float8_e4m3fn)
        patched = comfy.sd.load_lora_for_models(model, None, lora_file(model, 1), strength, 0)[0] if strength else model
        (expected,) = FAMILIES["Flux"].sample(patched)
        fast = accelerate(patched, CompileSettings(backend="eager"), cache)
        assert torch.equal(FAMILIES["Flux"].sample(fast)[0], expected)
        assert fallbacks.rows() == []
        made.append(graphs())
        model.detach()
    assert made[0] == made[1] > 0 and made[3] == made[2]


def test_weights_that_cannot_be_taken_leave_the_block_as_it_is(model, monkeypatch):
    def failing(self, inputs):
        raise RuntimeError("no room")

    cache = GraphCache()
    try:
        load(model, 0.2)
        with monkeypatch.context() as patched:
            patched.setattr(streamed.WaitingWeights, "_all", failing)
            assert run(model, cache)
        assert any("no room" in row["reason"] for row in fallbacks.rows())
        fallbacks.clear()
        assert run(model, cache) and fallbacks.rows() == []
    finally:
        model.detach()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_weights_elsewhere_are_brought_unless_they_are_too_many(model, monkeypatch, share):
    """Where devices differ; here "meta" has the weights' places, and the copy to it is what is looked at."""
    monkeypatch.setattr(streamed, "LARGEST_SHARE", share)
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device: 1 << 30)
    try:
        load(model, 0.2)
        region = next(region for region in survey(model.model.diffusion_model).regions if streamed.weights_of(region))
        source = streamed.weights_of(region)
        if not share:
            with pytest.raises(RunEagerly, match="too much for the device"):
                source.take([torch.empty(2, 2, device="meta")])
            return
        races: list[str] = []
        stream = stand_in.Stream(races)
        monkeypatch.setattr(comfy.model_management, "get_offload_stream", lambda device: stream.begin())
        monkeypatch.setattr(comfy.model_management, "sync_stream", lambda device, stream: stream and stream.sync())
        taken = source.take([torch.empty(2, 2, device="meta")])
        assert stream.is_used and stream.is_read
        assert source.take([]) is taken
        waiting = {
            id(w) for m in region.block.modules() if hasattr(m, "prev_comfy_cast_weights") for w in m.parameters()
        }
        own = dict(region.block.named_parameters())
        moved = [tensor.device.type == "meta" for tensor in taken]
        assert moved == [id(own[name]) in waiting for name in region.kind.weights] and any(moved)
        source.release()
        assert not stream.is_used and races == []
        assert source.take([torch.empty(2, 2)])[0] is next(iter(own.values()))
    finally:
        model.detach()


@pytest.mark.parametrize("settings", [{"measured": True}, {}], ids=["while it is compared", "after its graph failed"])
def test_block_that_runs_eagerly_has_no_other_copy_of_its_weights_on_the_device(model, monkeypatch, settings):
    patched = comfy.sd.load_lora_for_models(model, None, lora_file(model, 1), 1.0, 0)[0]
    take, add = streamed.WaitingWeights._all, comfy.model_patcher.LowVramPatch.__call__
    taken, left, is_taking = [], [], []

    def taking(self, inputs):
        is_taking.append(True)
        try:
            made = take(self, inputs)
        finally:
            is_taking.pop()
        own = {id(weight) for weight in model.model.parameters()}
        taken.extend(weakref.ref(tensor) for tensor in made if id(tensor) not in own)
        return made

    def adding(self, weight):
        if not is_taking:  # a layer brings its own
            left.append(sum(tensor() is not None for tensor in taken))
        return add(self, weight)

    cache = GraphCache()
    try:
        assert load(patched, 0.2) and run(patched, cache)
        for entry in () if settings else cache._entries.values():
            for graph in entry.graphs:
                monkeypatch.setattr(graph, "run", lambda tensors: 1 / 0)
        monkeypatch.setattr(streamed.WaitingWeights, "_all", taking)
        monkeypatch.setattr(comfy.model_patcher.LowVramPatch, "__call__", adding)
        with torch.inference_mode():
            assert run(patched, cache, **settings)
        assert taken and left and not any(left)
    finally:
        patched.detach()
