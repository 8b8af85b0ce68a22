"""LoRA through PEFT on an accelerated pipeline: the eager images, compiled blocks, and no compilation for it."""

import copy
import functools
from contextlib import contextmanager

import peft
import pytest
import torch
import transformers
from comfy_accel.accel import accelerate_pipeline, accelerated, restore
from comfy_accel.accel.cache.graph_cache import GraphCache, shared
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch.block_runner import BlockRunner, BlocksRun
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.diffusers.peft import PeftLayers
from diffusers.models.attention import BasicTransformerBlock
from kit import pipeline_zoo
from kit.thorough import thorough_except
from peft.utils import get_peft_model_state_dict
from torch._dynamo.utils import counters, get_compilation_metrics

image = functools.partial(pipeline_zoo.image, width=48)

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
CONVOLUTION = ("conv1", "conv2", "time_emb_proj", "proj_in", "downsamplers.0.conv")


def lora(model, seed, targets=ATTENTION, rank=4, **config):
    """An adapter's weights as PEFT names them, from a copy of the model."""
    torch.manual_seed(seed)
    made = copy.deepcopy(model)
    made.add_adapter(peft.LoraConfig(r=rank, init_lora_weights=False, target_modules=list(targets), **config))
    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(made).items()}


def named(weights, prefix):
    """As `save_lora_weights` writes them."""
    return {f"{prefix}.{name}": tensor for name, tensor in weights.items()}


def as_kohya(weights, alpha):
    """As most files for Stable Diffusion have them."""
    made = {}
    for name, tensor in weights.items():
        path, _, side = name.removesuffix(".weight").rpartition(".lora_")
        made[f"lora_unet_{path.replace('.', '_')}.lora_{'down' if side == 'A' else 'up'}.weight"] = tensor
        made[f"lora_unet_{path.replace('.', '_')}.alpha"] = torch.tensor(float(alpha))
    return made


def difference(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


class Pair:
    """The same pipeline twice, one of them accelerated; what is done to it is done to both."""

    def __init__(self, kind, **parts):
        self.plain, self.pipe = (pipeline_zoo.pipeline(kind, **copy.deepcopy(parts)) for _ in range(2))
        accelerate_pipeline(self.pipe, ignores=("vae",), backend="eager")
        self.part = "unet" if hasattr(self.pipe, "unet") else "transformer"
        self.base = self.plain_image = image(self.plain)
        assert difference(image(self.pipe), self.base) < 1e-5
        self.calls = self._hits()
        image(self.pipe)
        self.calls = self._hits() - self.calls

    def _hits(self):
        return shared.statistics()["hits"]

    @property
    def model(self):
        return getattr(self.plain, self.part)

    def both(self, do):
        for pipe in (self.plain, self.pipe):
            do(pipe)

    def check(self, do=lambda pipe: None, same_as=None, steps=2, **arguments):
        """Nothing is compiled, all blocks run compiled, and the image is the eager one; another than before, or
        `same_as`."""
        hits, graphs = self._hits(), compiled()
        self.both(do)
        expected = image(self.plain, steps=steps, **arguments)
        assert difference(image(self.pipe, steps=steps, **arguments), expected) < 1e-5
        assert compiled() == graphs
        assert self._hits() - hits == self.calls * steps // 2 and not fallbacks.rows()
        if same_as is None:
            assert difference(expected, self.plain_image) > 1e-3  # it shows in the image
        else:
            assert difference(expected, same_as) < 1e-5
        self.plain_image = expected


def compiled():
    return counters["stats"]["unique_graphs"], len(get_compilation_metrics()), shared.statistics()["compilations"]


@pytest.fixture(scope="module")
def sdxl():
    pair = Pair("StableDiffusionXLPipeline")
    yield pair
    restore(pair.pipe)


@contextmanager
def loaded(pair, weights, name="one"):
    pair.both(lambda pipe: pipe.load_lora_weights(dict(weights), adapter_name=name))
    try:
        yield
    finally:
        pair.both(lambda pipe: pipe.unload_lora_weights())


def test_session_of_adapters_compiles_nothing(sdxl):
    check, unet = sdxl.check, sdxl.model
    one = named(lora(unet, 1, (*ATTENTION, *CONVOLUTION)), "unet")
    two = as_kohya(lora(unet, 2, rank=8), alpha=4)
    three = named(lora(unet, 3, (*ATTENTION, *CONVOLUTION)), "unet")
    check(lambda pipe: pipe.load_lora_weights(dict(one), adapter_name="one"))
    check(lambda pipe: pipe.set_adapters("one", 0.8))
    check(lambda pipe: pipe.set_adapters("one", 0.3))
    check(lambda pipe: pipe.set_adapters("one", {"unet": {"down": 1.5, "mid": 0.2, "up": 0.7}}))
    check(lambda pipe: pipe.load_lora_weights(dict(two), adapter_name="two"))
    check(lambda pipe: pipe.set_adapters(["one", "two"], [0.5, 0.9]))
    check(lambda pipe: pipe.disable_lora(), same_as=sdxl.base)
    check(lambda pipe: pipe.enable_lora())
    check(lambda pipe: pipe.load_lora_weights(dict(three), adapter_name="one", hotswap=True))
    before = sdxl.plain_image
    check(lambda pipe: pipe.fuse_lora(adapter_names=["one"]))
    check(lambda pipe: pipe.unfuse_lora(), same_as=before)
    check(cross_attention_kwargs={"scale": 0.4})
    check(
        lambda pipe: pipe.set_adapters(["one", "two"], [0.6, 1.0]),
        cross_attention_kwargs={"scale": 0.0},
        same_as=sdxl.base,
    )
    check(lambda pipe: pipe.delete_adapters("one"))
    check(lambda pipe: pipe.unload_lora_weights(), same_as=sdxl.base)
    assert not any("lora" in name for name, _ in sdxl.pipe.unet.named_modules())


def test_strength_that_a_callback_changes_at_every_step_counts(sdxl):
    def fade(pipe, step, timestep, values):
        pipe.set_adapters("one", 1 - step / 10)
        return values

    with loaded(sdxl, named(lora(sdxl.model, 1), "unet")):
        sdxl.check(steps=10)
        sdxl.check(steps=10, callback_on_step_end=fade)
    sdxl.check(same_as=sdxl.base)


def test_hotswap_that_is_announced_pads_ranks_and_keeps_strength_in_tensors(sdxl):
    one, two = (named(lora(sdxl.model, rank, rank=rank), "unet") for rank in (2, 8))
    sdxl.both(lambda pipe: pipe.enable_lora_hotswap(target_rank=8))
    with loaded(sdxl, one):
        sdxl.check()
        sdxl.check(lambda pipe: pipe.load_lora_weights(dict(two), adapter_name="one", hotswap=True))


@pytest.mark.parametrize(
    "kind", thorough_except(["FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline"], "StableDiffusion3Pipeline")
)
def test_transformers_too(kind):
    pair = Pair(kind)
    targets = ATTENTION if kind != "FluxPipeline" else (*ATTENTION, "proj_mlp", "proj_out", "norm.linear")
    one = named(lora(pair.model, 1, targets, rank=6), "transformer")
    pair.check(lambda pipe: pipe.load_lora_weights(dict(one), adapter_name="one"))
    pair.check(lambda pipe: pipe.set_adapters("one", 0.3))
    pair.check(**{"joint_attention_kwargs" if kind != "WanPipeline" else "attention_kwargs": {"scale": 3.0}})
    pair.check(lambda pipe: pipe.unload_lora_weights(), same_as=pair.base)
    restore(pair.pipe)


def text_encoder():
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=99
    )
    return transformers.CLIPTextModel(config).eval()


def test_text_encoder_too():
    encoder = text_encoder()
    pipe = pipeline_zoo.pipeline("StableDiffusionPipeline", text_encoder=encoder)
    tokens = torch.arange(12)[None]
    targets = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")

    def same():
        with torch.no_grad():
            out = pipe.text_encoder(tokens).last_hidden_state
            with accelerated(pipe, ignores=("unet", "vae"), backend="eager"):
                hits = shared.statistics()["hits"]
                assert difference(pipe.text_encoder(tokens).last_hidden_state, out) < 1e-5
                assert shared.statistics()["hits"] - hits == 2
        return out

    with torch.no_grad():
        plain = pipe.text_encoder(tokens).last_hidden_state
    pipe.load_lora_weights(named(lora(encoder, 1, targets), "text_encoder"), adapter_name="one")
    strong = same()  # compiled with the adapter in it, and right without
    graphs = compiled()
    pipe.set_adapters("one", 0.3)
    weak = same()
    assert difference(strong, plain) > 5e-3 < difference(strong, weak)
    pipe.unload_lora_weights()
    assert torch.equal(same(), plain)
    assert compiled() == graphs


def dora(unet):
    return unet.add_adapter(peft.LoraConfig(r=2, use_dora=True, init_lora_weights=False, target_modules=["to_q"]))


def lokr(unet):
    config = peft.LoKrConfig(r=2, alpha=2, init_weights=False, target_modules=["to_q"])
    peft.inject_adapter_in_model(config, unet, adapter_name="default")


def in_groups(unet):
    for block in unet.mid_block.resnets:
        block.conv1 = torch.nn.Conv2d(block.in_channels, block.out_channels, 3, padding=1, groups=4)
    unet.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["conv1"]))


def hooked(unet):
    unet.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q"]))
    for name, part in unet.named_modules():
        if name.endswith("lora_A.default"):
            part.register_forward_hook(lambda module, args, out: out * 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(dora, "another type"), (lokr, "lokr"), (in_groups, "not a plain one"), (hooked, "another extension changes")],
)
def test_adapter_that_is_no_sum_of_weights_runs_as_it_is_with_the_reason(sdxl, change, reason):
    kept = copy.deepcopy(sdxl.model)
    with accelerated(
        pipeline_zoo.pipeline("StableDiffusionXLPipeline", unet=kept), ignores=("vae",), backend="eager"
    ) as pipe:
        torch.manual_seed(0)
        change(pipe.unet)
        fast = image(pipe)
    assert reason in " ".join(row["reason"] for row in fallbacks.rows())
    assert difference(fast, image(pipe)) < 1e-5 < 1e-3 < difference(fast, sdxl.base)


def test_half_precision_is_as_near_the_truth_as_eager():
    torch.manual_seed(0)
    model = torch.nn.Module()
    block = BasicTransformerBlock(64, 4, 16, cross_attention_dim=32).eval().requires_grad_(False)
    model.blocks = torch.nn.ModuleList([block])
    config = peft.LoraConfig(r=8, init_lora_weights=False, target_modules=list(ATTENTION))
    peft.inject_adapter_in_model(config, model)
    call = torch.randn(2, 40, 64), None, torch.randn(2, 7, 32)
    half = copy.deepcopy(model).half()
    (region,) = survey(half, wraps=PeftLayers()).regions
    stand_in = BlockRunner(region, BlocksRun(GraphCache(), CompileSettings(backend="eager", stop_on_trouble=True)))
    with torch.no_grad():
        truth = block(*call)
        call = [value if value is None else value.half() for value in call]
        eager, fast = region.block(*call), stand_in(region.block.forward, *call)
    eager, fast = ((out - truth).square().mean().sqrt() / truth.std() for out in (eager, fast))
    print(eager, fast)
    assert fast < 1.25 * eager < 0.02
