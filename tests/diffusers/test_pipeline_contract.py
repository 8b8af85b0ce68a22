"""What diffusers promises of its pipelines (its own pipeline tests say it), of pipelines that are accelerated."""

import diffusers
import pytest
import torch
from comfy_accel.accel import accelerate_pipeline, restore
from diffusers.schedulers import KarrasDiffusionSchedulers
from kit import pipeline_zoo as zoo
from kit.compiled import graphs
from kit.tiny_pipelines import difference

KINDS = ["StableDiffusionPipeline", "StableDiffusionControlNetPipeline", "FluxPipeline"]
"""Those of SDXL, SD3 and Wan run compiled in the tests of adapters and of the warm-up."""
TOLERANCE = 1e-4
"""Of the largest value: the graphs are run as they were captured."""

STEPS = 3


def accelerate(pipe):
    # Blocks of Wan's VAE write to a list that they are given, and run as they are.
    return accelerate_pipeline(pipe, ignores=("vae",), backend="eager", stop_on_trouble=True)


@pytest.fixture(scope="module", params=KINDS)
def pipes(request):
    """A pipeline, plain, and one of the same weights that is accelerated and warmed up at another size."""
    plain, fast = zoo.pipeline(request.param), accelerate(zoo.pipeline(request.param))
    call(fast, width=64, height=32)
    return plain, fast


@pytest.fixture
def compiles_nothing(pipes):
    before = graphs()
    yield
    assert graphs() == before


warmed = pytest.mark.usefixtures("compiles_nothing")


def call(pipe, batch=1, **given):
    """What one call returns, for `batch` prompts, of which each has noise of its own; the same every time."""
    made = zoo.arguments(pipe, 32, 48, STEPS, batch)
    if "ControlNet" in type(pipe).__name__:
        made["image"] = torch.rand(batch, 3, 48, 32, generator=torch.Generator().manual_seed(7))
    return pipe(**{**made, "generator": [torch.Generator().manual_seed(number) for number in range(batch)], **given})


@warmed
def test_one_image_a_batch_and_a_tuple_are_as_without(pipes):
    plain, fast = pipes
    expected = call(plain, batch=2)[0]
    assert difference(call(fast, batch=2)[0], expected) < TOLERANCE
    alone = call(fast, prompt_embeds=zoo.prompt(fast, 2)["prompt_embeds"][:1], **first_rows(fast))
    assert difference(alone[0], expected[:1]) < TOLERANCE
    as_tuple = call(fast, batch=2, return_dict=False)
    assert type(as_tuple) is tuple and torch.equal(as_tuple[0], call(fast, batch=2)[0])


def first_rows(pipe):
    """All that stands for the first of two prompts, beside its own features."""
    rows = {name: value[:1] for name, value in zoo.prompt(pipe, 2).items() if name != "prompt_embeds"}
    if "ControlNet" in type(pipe).__name__:
        rows["image"] = torch.rand(2, 3, 48, 32, generator=torch.Generator().manual_seed(7))[:1]
    return rows


@warmed
def test_saved_and_loaded_it_is_the_same_pipeline_and_plain(pipes, tmp_path):
    plain, fast = pipes
    keys = {name: list(part.state_dict()) for name, part in models(plain).items()}
    assert {name: list(part.state_dict()) for name, part in models(fast).items()} == keys
    fast.save_pretrained(tmp_path)
    absent = {name: None for name, part in fast.components.items() if part is None}
    loaded = type(fast).from_pretrained(tmp_path, **absent)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(plain) and set(loaded.components) == set(plain.components)
    expected = call(loaded)[0]
    assert difference(call(plain)[0], expected) < 1e-5  # weights from a file lie otherwise in memory
    assert difference(call(accelerate(loaded))[0], expected) < TOLERANCE
    assert torch.equal(call(restore(loaded))[0], expected)


def models(pipe):
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def test_weights_of_another_type_are_used_from_the_next_image_on():
    plain, fast = zoo.pipeline(KINDS[0]), accelerate(zoo.pipeline(KINDS[0]))
    before = call(fast)[0]
    assert fast.to(torch.bfloat16) is fast
    assert all(part.dtype == torch.bfloat16 for part in models(fast).values())
    out, expected = call(fast)[0], call(plain.to(torch.bfloat16))[0]
    assert out.dtype == torch.bfloat16 and difference(out, expected) < 0.1
    fast.to(torch.float32)
    assert 0 < difference(call(fast)[0], before) < 0.1  # the weights have been rounded


def test_every_scheduler_of_its_family_takes_its_place():
    plain, fast = zoo.pipeline(KINDS[0]), accelerate(zoo.pipeline(KINDS[0]))
    config = dict(fast.scheduler.config, skip_prk_steps=True)
    call(fast, width=64)
    before = graphs()
    for scheduler in KarrasDiffusionSchedulers:
        made = []
        for pipe in (fast, plain):
            pipe.scheduler = getattr(diffusers, scheduler.name).from_config(config)
            torch.manual_seed(0)  # one of them takes noise of its own
            made.append(call(pipe, output_type="latent", num_inference_steps=2)[0])
        assert difference(*made) < 1e-3, scheduler.name
    assert graphs() == before
