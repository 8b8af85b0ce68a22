"""Pipelines that are accelerated: which of their models and blocks run compiled, whatever people do to them."""

import copy
import functools

import diffusers
import pytest
import torch
from comfy_accel.accel import accelerate_pipeline, accelerated, restore
from comfy_accel.accel.cache.graph_cache import shared
from comfy_accel.accel.core.fallbacks import fallbacks
from kit import pipeline_zoo as zoo
from kit.compiled import graphs
from kit.tiny_pipelines import difference

image = functools.partial(zoo.image, output_type="pt")

TOLERANCE = 1e-5
"""Of the largest value: the graphs are run as they were captured."""


@pytest.fixture(scope="module")
def sd():
    """A pipeline for those tests that leave it as it was; its models are accelerated in each."""
    return zoo.pipeline("StableDiffusionPipeline")


def test_text_encoder_runs_compiled_and_a_block_with_hooks_in_it_as_it_is():
    encoder = zoo.text_encoder(99)
    pipe = zoo.pipeline("StableDiffusionPipeline", text_encoder=encoder)
    tokens = [torch.randint(99, shape, generator=torch.Generator().manual_seed(1)) for shape in ((1, 77), (3, 20))]
    with torch.no_grad():
        plain = [encoder(ids)[0] for ids in tokens]
        with accelerated(pipe, ignores=("unet", "vae"), backend="eager"):
            before, used = graphs(), shared.statistics()["hits"]
            assert [difference(encoder(ids)[0], out) < TOLERANCE for ids, out in zip(tokens, plain, strict=True)]
            assert (graphs() - before, shared.statistics()["hits"] - used) == (1, 4)
            handle = encoder.encoder.layers[0].self_attn.register_forward_hook(lambda *_: None)
            assert torch.equal(encoder(tokens[0])[0], plain[0])
            handle.remove()
    assert [(row["block"], row["reason"]) for row in fallbacks.rows()] == [
        ("CLIPEncoderLayer", "another extension has changed a part of it, and it cannot be compiled around that")
    ]


def test_text_encoder_that_is_asked_for_hidden_states_as_sdxl_asks_runs_compiled():
    encoder = zoo.text_encoder(99)
    pipe = zoo.pipeline("StableDiffusionPipeline", text_encoder=encoder)
    ids = torch.randint(99, (1, 77), generator=torch.Generator().manual_seed(1))

    def asked(what):
        with torch.no_grad():
            return encoder(ids, **{f"output_{what}": True})[what]

    encoder.set_attn_implementation("eager")  # the only one that has attention weights to hand out
    plain = {what: asked(what) for what in ("hidden_states", "attentions")}
    hooks = [len(part._forward_hooks) for part in encoder.modules()]
    with accelerated(pipe, ignores=("unet", "vae"), backend="eager"):
        for _ in range(2):
            used = shared.statistics()["hits"]
            for out, expected in zip(asked("hidden_states"), plain["hidden_states"], strict=True):
                assert difference(out, expected) < TOLERANCE
            assert shared.statistics()["hits"] - used == len(encoder.encoder.layers)
            assert fallbacks.rows() == []
        attentions = asked("attentions")
        assert len(attentions) == len(plain["attentions"]) > 0
        assert all(map(torch.equal, attentions, plain["attentions"]))
    assert ["attention weights" in row["reason"] for row in fallbacks.rows()] == [True]
    assert [len(part._forward_hooks) for part in encoder.modules()] == hooks


def test_components_are_left_out_by_name(sd):
    def hits(ignores):
        with accelerated(sd, ignores=ignores, backend="eager"):
            before = shared.statistics()["hits"]
            image(sd)
            return shared.statistics()["hits"] - before

    everything = hits(())
    assert hits(("vae.encoder",)) == everything  # it has no part in this
    assert 0 < hits("unet") < everything
    assert hits(("vae",)) + hits(("unet",)) == everything
    assert hits(("unet", "vae.decoder")) == 0


def test_what_cannot_be_meant_is_refused_and_changes_nothing(sd):
    def refused(error, sentence, **arguments):
        with pytest.raises(error, match=sentence):
            accelerate_pipeline(sd, **{"backend": "eager", **arguments})

    before = [dict(vars(part)) for part in (sd, sd.unet, sd.vae.decoder)]
    refused(ValueError, "no component 'unte' to ignore; it has vae, vae.decoder, vae.encoder, unet.", ignores=("unte",))
    refused(ValueError, "backend is 'cuda'; it must be one of: inductor, eager", backend="cuda")
    refused(ValueError, "shapes is 'all'; it must be one of: any, exact", shapes="all")
    refused(ValueError, "min_repetitions is 0; it must be 1 or more", min_repetitions=0)
    refused(TypeError, "deep_cache is a int; it must be DeepCacheSettings", deep_cache=3)
    with pytest.raises(TypeError, match="expected a diffusers pipeline, not a UNet2DConditionModel"):
        accelerate_pipeline(sd.unet)
    assert [dict(vars(part)) for part in (sd, sd.unet, sd.vae.decoder)] == before


def test_model_whose_weights_are_not_loaded_is_refused_by_name(sd):
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel.from_config(sd.unet.config)
    pipe = zoo.pipeline("StableDiffusionPipeline", unet=unet, vae=sd.vae)
    with pytest.raises(ValueError, match="unet is not loaded: its .*weight is on the meta device"):
        accelerate_pipeline(pipe, backend="eager")
    assert accelerate_pipeline(pipe, ignores=("unet",), backend="eager") is pipe
    restore(pipe)


def test_exact_shapes_compile_for_each_size(sd):
    with accelerated(sd, ignores=("vae",), backend="eager", shapes="exact", min_repetitions=4):
        image(sd)
        before = graphs()
        image(sd)
        assert graphs() == before
        image(sd, 40, 24)
        assert graphs() > before


def freeu(pipe):
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return pipe.disable_freeu


def tiles(pipe):
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    return lambda: (pipe.vae.disable_tiling(), pipe.vae.disable_slicing())


# Other attention, put in and taken out, is tested in test_swapped_code.py, other strides in tests/unit.
@pytest.mark.parametrize("change", [freeu, tiles])
def test_what_is_turned_on_in_between_is_on_and_then_off_again(sd, change):
    plain = image(sd, 48, 40)
    undo = change(sd)
    changed = image(sd, 48, 40)
    undo()
    with accelerated(sd, ignores=("vae.encoder",), backend="eager", stop_on_trouble=True):
        assert difference(image(sd, 48, 40), plain) < TOLERANCE
        undo = change(sd)
        used = shared.statistics()["hits"]
        assert difference(image(sd, 48, 40), changed) < TOLERANCE
        assert shared.statistics()["hits"] > used
        undo()
        before = graphs()
        assert difference(image(sd, 48, 40), plain) < TOLERANCE
        assert graphs() == before


def test_model_that_changes_at_every_step_is_given_up_with_the_reason(sd):
    block = sd.unet.mid_block.attentions[0].transformer_blocks[0]

    def replace_a_part(pipe, step, time, tensors):
        block.norm1 = copy.deepcopy(block.norm1)
        return tensors

    plain = image(sd, steps=12)
    with accelerated(sd, ignores=("vae",), backend="eager"):
        out = image(sd, steps=12, callback_on_step_end=replace_a_part)
        assert difference(out, plain) < TOLERANCE
    assert ("UNet2DConditionModel", "its settings change on every call") in {
        (row["block"], row["reason"]) for row in fallbacks.rows()
    }


def test_flux_makes_several_images_of_a_prompt_in_one_row_with_the_graphs_of_one():
    """Its pipeline repeats no features that it is given."""
    pipe = zoo.pipeline("FluxPipeline")
    plain = image(pipe, num_images_per_prompt=2)
    with accelerated(pipe, ignores=("vae",), backend="eager"):
        image(pipe)
        made = graphs()
        assert difference(image(pipe, num_images_per_prompt=2), plain) < TOLERANCE
        assert graphs() == made
