"""Accelerate Text Encoder on core's encoders: the same conditioning, and nothing compiled after the first prompt."""

import copy
import functools

import comfy.ldm.modules.attention
import comfy.lora
import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings, Trouble
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


def accelerated(clip, cache=None, **settings):
    """With a backend that captures graphs and runs them as they are: same bits, in seconds."""
    return accelerate_clip(clip, CompileSettings(**{"backend": "eager", **settings}), cache or GraphCache())


def encode(clip, of="SD1.5", **prompt):
    with torch.inference_mode():
        return clip.encode_from_tokens(ENCODERS[of].tokens(**prompt), return_dict=True)


def same(one, other) -> bool:
    tensors = [name for name, value in one.items() if isinstance(value, torch.Tensor)]
    return tensors != [] and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in tensors)


def hits(cache) -> int:
    """How often a graph of the cache ran."""
    return cache.statistics()["hits"]


@pytest.fixture(scope="module")
def sd15():
    return ENCODERS["SD1.5"].load()


@pytest.mark.parametrize("name", thorough_except(ENCODERS, "SD3", "Qwen-Image"))  # SD3's are SDXL's and a T5
def test_prompts_of_every_length_batch_and_weight_are_encoded_alike_by_the_graphs_of_the_first(name):
    if (module := missing(name)) is not None:
        pytest.skip(f"this core has no {module}")
    clip, cache = ENCODERS[name].load(), GraphCache()
    fast = accelerated(clip, cache)
    for prompt in PROMPTS:
        assert same(encode(fast, name, **prompt), encode(clip, name, **prompt)), prompt
        assert GRAPHS[name] <= graphs() <= 2 * GRAPHS[name]  # positions have no rows for prompts
    assert hits(cache) > 0 and fallbacks.rows() == []
    lengths = {77} if all(part.startswith("clip_") for part in ENCODERS[name].configs) else {22, 62}
    assert {use.context for entry in cache.entries() for use in entry.uses} >= lengths


def test_prompts_beyond_a_sliding_window_have_one_more_graph_at_most():
    clip = ENCODERS["NewBie"].load()
    fast = accelerated(clip)
    for length in (20, 1030, 1100, 30):
        assert same(encode(fast, "NewBie", length=length), encode(clip, "NewBie", length=length))
        assert graphs() <= (1 if length == 20 else 2)
    assert fallbacks.rows() == []


def test_given_clip_is_unchanged_and_stays_uncompiled(sd15):
    before, cache = dict(vars(sd15)), GraphCache()
    fast = accelerated(sd15, cache)
    assert isinstance(fast, comfy.sd.CLIP) and type(fast).__name__ == "CLIP"
    expected = encode(sd15)
    assert same(encode(fast), expected)
    ran = hits(cache)
    assert ran > 0
    assert same(encode(sd15), expected) and hits(cache) == ran
    assert vars(sd15) == before and type(sd15) is comfy.sd.CLIP
    assert forwards_in_place(sd15.cond_stage_model) == []


def test_nodes_after_it_work_on_clones_that_run_compiled(sd15):
    cache = GraphCache()
    fast = accelerated(sd15, cache)
    encode(fast)
    for change in (lambda clip: clip.clip_layer(-2), lambda clip: clip.patcher.set_model_unet_function_wrapper(id)):
        plain, changed = sd15.clone(), fast.clone()
        change(plain)
        change(changed)
        ran = hits(cache)
        assert same(encode(changed), encode(plain)) and hits(cache) > ran
    ran = hits(cache)
    assert same(encode(copy.copy(fast)), encode(sd15)) and hits(cache) > ran
    assert graphs() == 1


def test_two_nodes_in_a_row_are_like_the_last(sd15):
    first, last = GraphCache(), GraphCache()
    assert same(encode(accelerated(accelerated(sd15, first), last)), encode(sd15))
    assert hits(first) == 0 and hits(last) > 0


def test_lora_and_its_strength_compile_nothing():
    clip, cache = ENCODERS["HunyuanVideo"].load(), GraphCache()
    fast = accelerated(clip, cache)
    plain = encode(clip, "HunyuanVideo")
    assert same(encode(fast, "HunyuanVideo"), plain)
    compiled = graphs()
    for strength in (1.0, -0.5):
        with_lora = [lora_on(each, strength) for each in (clip, fast)]
        ran = hits(cache)
        expected, actual = (encode(each, "HunyuanVideo") for each in with_lora)
        assert same(actual, expected) and not same(expected, plain) and hits(cache) > ran
    assert same(encode(fast, "HunyuanVideo"), plain)
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


def test_unloaded_and_loaded_again_it_compiles_nothing(sd15):
    fast = accelerated(sd15)
    expected = encode(sd15)
    encode(fast)
    comfy.model_management.unload_all_models()
    assert same(encode(fast), expected) and graphs() == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("SD1.5", torch.float16),
        ("Wan", torch.float8_e4m3fn),
        pytest.param("SD1.5", torch.float8_e4m3fn, marks=pytest.mark.thorough),
        pytest.param("Wan", torch.float16, marks=pytest.mark.thorough),
    ],
)
def test_stored_weights_are_cast_in_the_graph(name, dtype):
    clip, cache = ENCODERS[name].load(dtype), GraphCache()
    assert same(encode(accelerated(clip, cache), name), encode(clip, name))
    assert hits(cache) > 0 and fallbacks.rows() == []


@pytest.mark.skipif(stand_in.why_not() is not None, reason=str(stand_in.why_not()))
def test_streamed_weights_have_one_graph_wherever_they_are():
    clip, cache = ENCODERS["Wan"].load(), GraphCache()
    expected = encode(clip, "Wan")
    with stand_in.streaming() as card:
        streamed = clip.clone()
        streamed.patcher = card.streamed(clip.patcher)
        streamed.cond_stage_model = streamed.patcher.model
        for capacity in (card.capacity, 20_000):
            card.capacity = capacity
            ran = hits(cache)
            assert same(encode(accelerated(streamed, cache), "Wan"), expected) and hits(cache) > ran
            assert graphs() == GRAPHS["Wan"]
    assert fallbacks.rows() == []


def test_scheduled_encoding_runs_compiled(sd15):
    cache = GraphCache()
    tokens = ENCODERS["SD1.5"].tokens()
    with torch.inference_mode():
        ((actual, extra),) = accelerated(sd15, cache).encode_from_tokens_scheduled(tokens)
        ((expected, plain),) = sd15.encode_from_tokens_scheduled(tokens)
    assert torch.equal(actual, expected) and torch.equal(extra["pooled_output"], plain["pooled_output"])
    assert hits(cache) > 0


def test_attention_that_is_replaced_in_core_is_the_one_that_runs(sd15, monkeypatch):
    """Other packs and newer cores do so; the graph stays."""
    fast, cores = accelerated(sd15), comfy.ldm.modules.attention.attention_pytorch
    encode(fast)
    calls = []

    def attention_pytorch(*args, **kwargs):
        calls.append(kwargs)
        return cores(*args, **kwargs) * 0.5

    attention_pytorch.__module__ = cores.__module__
    monkeypatch.setattr(comfy.ldm.modules.attention, "attention_pytorch", attention_pytorch)
    expected, plain = encode(sd15), len(calls)
    assert same(encode(fast), expected) and len(calls) == 2 * plain > 0
    assert graphs() == 1


def test_attention_of_another_pack_runs_uncompiled_with_a_reason(sd15, monkeypatch):
    def sage(*args, **kwargs):
        return cores(*args, **kwargs)

    cores, cache = comfy.ldm.modules.attention.attention_pytorch, GraphCache()
    monkeypatch.setattr("comfy.clip_model.optimized_attention_for_device", lambda *args, **kwargs: sage)
    assert same(encode(accelerated(sd15, cache)), encode(sd15)) and hits(cache) == 0
    assert [row["code"] for row in fallbacks.rows()] == ["unsupported_argument"]


def test_text_that_is_generated_is_the_same_and_not_compiled(sd15):
    """By a stand-in where core's CLIP has no `generate`; with the cache of earlier words that encoders are given."""

    class Generating(comfy.sd.CLIP):
        def clone(self):
            cloned = super().clone()
            cloned.__class__ = Generating
            return cloned

        def generate(self, tokens):
            return self.cond_stage_model.clip_l.transformer(torch.tensor(tokens), past_key_values=[])

    cache, given = GraphCache(), sd15.clone()
    given.__class__ = Generating
    forward = type(sd15.cond_stage_model.clip_l.transformer).forward
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(
            type(sd15.cond_stage_model.clip_l.transformer),
            "forward",
            lambda self, ids, past_key_values=None, **kwargs: forward(self, ids, **kwargs),
        )
        tokens = [[7] * 77]
        actual, expected = accelerated(given, cache).generate(tokens), given.generate(tokens)
    assert torch.equal(actual[0], expected[0]) and hits(cache) == 0 and graphs() == 0
    assert [row["code"] for row in fallbacks.rows()] == ["generates_text"]


@pytest.mark.skipif(not hasattr(comfy.sd.CLIP, "generate"), reason="this core generates no text")
def test_core_generates_the_same_text():
    clip = ENCODERS["Z-Image"].load()
    options = {"do_sample": False, "max_length": 4}
    tokens = ENCODERS["Z-Image"].tokens()
    with torch.inference_mode():
        assert accelerated(clip).generate(tokens, **options) == clip.generate(tokens, **options)
    assert [row["code"] for row in fallbacks.rows()] == ["generates_text"] and graphs() == 0


def test_encoder_that_cannot_be_compiled_says_so_once(sd15):
    cache = GraphCache()
    blocks = sd15.cond_stage_model.clip_l.transformer.text_model.encoder.layers
    for block in blocks:
        block.forward = functools.partial(type(block).forward, block)  # of another program
    try:
        assert same(encode(accelerated(sd15, cache)), encode(sd15)) and hits(cache) == 0
        assert fallbacks.rows() != []
        with pytest.raises(Trouble, match="CLIPTextModel cannot run compiled"):
            encode(accelerated(sd15, stop_on_trouble=True))
    finally:
        for block in blocks:
            del block.forward
    assert forwards_in_place(sd15.cond_stage_model) == []


def test_what_is_no_clip_is_returned_as_it_is(sd15):
    assert accelerated(None) is None
    elsewhere = sd15.clone()
    elsewhere.cond_stage_model = object()  # of a pack that encodes in another process, say
    assert accelerated(elsewhere) is elsewhere


def test_error_leaves_nothing_behind(sd15):
    fast = accelerated(sd15)
    with pytest.raises(KeyError):
        fast.encode_from_tokens({})
    assert forwards_in_place(sd15.cond_stage_model) == [] and "_accel_active" not in vars(fast)
    assert same(encode(fast), encode(sd15))
