"""Text Encoder on core's encoders: the same conditioning, and nothing compiled after the first prompt."""

import copy

import comfy.ldm.modules.attention
import comfy.lora
import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.text_encoder import accelerate_clip
from kit import streamed_weights as stand_in
from kit.compiled import forwards_in_place, graphs
from kit.thorough import thorough_except
from kit.tiny_encoders import ENCODERS, missing

GRAPHS = {"SD1.5": 1, "SDXL": 2, "SD3": 5, "Flux": 4, "Wan": 3, "HunyuanVideo": 2, "HunyuanDiT": 4} | {
    name: 1 for name in ("Flux.2", "Qwen-Image", "Z-Image", "Lumina 2", "NewBie", "OmniGen 2", "Krea 2", "ERNIE-Image")
}
"""Of each, by block type. A T5's are its attention, with positions of its own and with those handed on, and its MLP."""

PROMPTS = [{"length": 20}, {"length": 33}, {"length": 9, "parts": 2}, {"length": 60, "parts": 3, "weight": 1.3}]


class Encoder:
    """An encoder, and it accelerated, with a backend that captures graphs and runs them as they are."""

    def __init__(self, name="SD1.5", dtype=torch.float32):
        self.name, self.cache = name, GraphCache()
        self.clip = ENCODERS[name].load(dtype)
        self.fast = self.accelerated(self.clip)

    def accelerated(self, clip):
        return accelerate_clip(clip, CompileSettings(backend="eager"), self.cache)

    def encode(self, clip, **prompt):
        with torch.inference_mode():
            return clip.encode_from_tokens(ENCODERS[self.name].tokens(**prompt), return_dict=True)

    def runs_compiled_alike(self, fast=None, plain=None, **prompt) -> bool:
        """Whether graphs ran in the accelerated CLIP, which gives what the plain one does, bit for bit."""
        before = self.cache.statistics()["hits"]
        actual = self.encode(self.fast if fast is None else fast, **prompt)
        ran = self.cache.statistics()["hits"] - before
        expected = self.encode(self.clip if plain is None else plain, **prompt)
        assert self.cache.statistics()["hits"] - before == ran, "the given one runs compiled"
        assert actual.keys() == expected.keys()
        tensors = [key for key, value in expected.items() if isinstance(value, torch.Tensor)]
        assert tensors and all(torch.equal(actual[key], expected[key]) for key in tensors)
        return ran > 0


@pytest.fixture
def sd15():
    return Encoder()


KNOWN = [name for name in ENCODERS if missing(name) is None]


@pytest.mark.parametrize("name", thorough_except(KNOWN, "SD3", "Qwen-Image"))  # SD3's are SDXL's and a T5
def test_prompts_of_every_length_batch_and_weight_are_encoded_alike_by_the_graphs_of_the_first(name):
    encoder = Encoder(name)
    for prompt in PROMPTS:
        assert encoder.runs_compiled_alike(**prompt), prompt
        assert GRAPHS[name] <= graphs() <= 2 * GRAPHS[name]  # positions have no rows for prompts
    assert fallbacks.rows() == []
    lengths = {77} if all(part.startswith("clip_") for part in ENCODERS[name].configs) else {22, 62}
    assert {use.context for entry in encoder.cache.entries() for use in entry.uses} >= lengths


def test_prompts_beyond_a_sliding_window_have_one_more_graph_at_most():
    encoder = Encoder("NewBie")
    for length in (20, 1030, 1100, 30):
        assert encoder.runs_compiled_alike(length=length)
        assert graphs() <= (1 if length == 20 else 2)
    assert fallbacks.rows() == []


def test_given_clip_is_unchanged_and_clones_of_the_view_run_compiled(sd15):
    before, clip = dict(vars(sd15.clip)), sd15.clip
    assert isinstance(sd15.fast, comfy.sd.CLIP) and type(sd15.fast).__name__ == "CLIP"
    assert sd15.runs_compiled_alike()
    assert vars(clip) == before and type(clip) is comfy.sd.CLIP and forwards_in_place(clip.cond_stage_model) == []
    for change in (lambda clip: clip.clip_layer(-2), lambda clip: clip.patcher.set_model_unet_function_wrapper(id)):
        plain, changed = clip.clone(), sd15.fast.clone()
        change(plain)
        change(changed)
        assert sd15.runs_compiled_alike(changed, plain)
    assert sd15.runs_compiled_alike(copy.copy(sd15.fast)) and sd15.runs_compiled_alike(sd15.accelerated(sd15.fast))
    comfy.model_management.unload_all_models()
    assert sd15.runs_compiled_alike() and graphs() == 1


def test_lora_and_its_strength_compile_nothing():
    encoder = Encoder("HunyuanVideo")
    assert encoder.runs_compiled_alike()
    compiled = graphs()
    for strength in (1.0, -0.5, 0.0):
        assert encoder.runs_compiled_alike(lora_on(encoder.fast, strength), lora_on(encoder.clip, strength))
    assert graphs() == compiled and fallbacks.rows() == []


def lora_on(clip, strength: float):
    """A clone with a LoRA on every linear layer, as core's loader makes it."""
    file = {}
    generator = torch.Generator().manual_seed(1)
    keys = {key.removesuffix(".weight"): key for key in clip.cond_stage_model.state_dict() if key.endswith(".weight")}
    for name, module in clip.cond_stage_model.named_modules():
        if isinstance(module, torch.nn.Linear):
            file[f"{name}.lora_up.weight"] = torch.randn(module.out_features, 4, generator=generator)
            file[f"{name}.lora_down.weight"] = torch.randn(4, module.in_features, generator=generator) * 0.02
    made = clip.clone()
    assert made.add_patches(comfy.lora.load_lora(file, keys), strength)
    return made


@pytest.mark.parametrize(("name", "dtype"), [("SD1.5", torch.float16), ("Wan", torch.float8_e4m3fn)])
def test_stored_weights_are_cast_in_the_graph(name, dtype):
    assert Encoder(name, dtype).runs_compiled_alike() and fallbacks.rows() == []


@pytest.mark.skipif(stand_in.why_not() is not None, reason=str(stand_in.why_not()))
def test_streamed_weights_have_one_graph_wherever_they_are():
    encoder = Encoder("Wan")
    with stand_in.streaming() as card:
        streamed = encoder.clip.clone()
        streamed.patcher = card.streamed(encoder.clip.patcher)
        streamed.cond_stage_model = streamed.patcher.model
        for capacity in (card.capacity, 20_000):
            card.capacity = capacity
            assert encoder.runs_compiled_alike(encoder.accelerated(streamed))
            assert graphs() == GRAPHS["Wan"]
    assert fallbacks.rows() == []


def test_attention_that_is_replaced_in_core_is_the_one_that_runs(sd15, monkeypatch):
    """Other packs and newer cores do so; the graph stays."""
    cores, calls = comfy.ldm.modules.attention.attention_pytorch, []
    assert sd15.runs_compiled_alike()

    def attention_pytorch(*args, **kwargs):
        calls.append(kwargs)
        return cores(*args, **kwargs) * 0.5

    attention_pytorch.__module__ = cores.__module__
    monkeypatch.setattr(comfy.ldm.modules.attention, "attention_pytorch", attention_pytorch)
    assert sd15.runs_compiled_alike() and graphs() == 1
    assert len(calls) == 2 * 4  # by both, in each layer


def test_text_that_is_written_while_a_prompt_is_encoded_runs_uncompiled(sd15, monkeypatch):
    """ACE-Step 1.5 has its language model write the audio's codes so, with what it keeps of the words before."""
    clip = sd15.clip.cond_stage_model.clip_l
    forward, words = type(clip.transformer).forward, torch.arange(77)[None]
    monkeypatch.setattr(type(clip.transformer), "forward", lambda self, ids, past_key_values: forward(self, ids))
    write = lambda tokens: clip.transformer(words, past_key_values=[])[::2]  # noqa: E731
    monkeypatch.setattr(sd15.clip.cond_stage_model, "encode_token_weights", write, raising=False)
    assert not sd15.runs_compiled_alike() and graphs() == 0 and fallbacks.rows() == []


def test_attention_of_another_pack_runs_uncompiled_with_a_reason(sd15, monkeypatch):
    cores = comfy.ldm.modules.attention.attention_pytorch
    sage = lambda *args, **kwargs: cores(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr("comfy.clip_model.optimized_attention_for_device", lambda *args, **kwargs: sage)
    assert not sd15.runs_compiled_alike()
    assert [row["code"] for row in fallbacks.rows()] == ["unsupported_argument"]


def test_what_is_no_clip_is_returned_as_it_is_and_an_error_leaves_nothing_behind(sd15):
    elsewhere = sd15.clip.clone()
    elsewhere.cond_stage_model = object()  # of a pack that encodes in another process, say
    assert sd15.accelerated(None) is None and sd15.accelerated(elsewhere) is elsewhere
    with pytest.raises(KeyError):
        sd15.fast.encode_from_tokens({})
    assert forwards_in_place(sd15.clip.cond_stage_model) == [] and "_accel_active" not in vars(sd15.fast)
    assert sd15.runs_compiled_alike()
