"""What an accelerated pipeline leaves behind: nothing, on whichever of its objects, however its calls end."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from comfy_accel.accel import DeepCacheSettings, accelerate_pipeline, accelerated, restore
from comfy_accel.accel.cache.graph_cache import shared
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.diffusers.component_call import call_of
from comfy_accel.accel.modules.substitution import StandIn
from diffusers import StableDiffusionImg2ImgPipeline
from kit import pipeline_zoo as zoo
from kit.blocks import raising
from kit.pipeline_zoo import compiled_image, eager_image, image
from kit.tiny_pipelines import difference

TOLERANCE = 1e-5
"""Of the largest value: the graphs are run as they were captured."""

FAST = {"ignores": ("vae",), "backend": "eager", "stop_on_trouble": True}


def state(pipe):
    """All that the pipeline, its models and every module in them hold, but for the values of tensors."""
    models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    parts = [pipe, *(part for model in models for part in model.modules())]
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(part).items()}
        for part in parts
    ]


def hits():
    return shared.statistics()["hits"]


@pytest.fixture(scope="module")
def models():
    """The components that the tests make pipelines of; compiled once."""
    pipe = zoo.pipeline("StableDiffusionPipeline")
    with accelerated(pipe, **FAST):
        image(pipe)
    return pipe.components


@pytest.fixture
def pipe(models):
    return zoo.pipeline("StableDiffusionPipeline", **models)


@pytest.fixture(autouse=True)
def models_are_plain_afterwards(models):
    yield
    for part in (models["unet"], *models["unet"].modules()):
        assert call_of(part) is None
        assert not isinstance(vars(part).get("forward"), StandIn)
    assert not shared._leases


@pytest.mark.parametrize("deep_cache", [None, DeepCacheSettings()])
def test_restored_pipeline_is_what_it_was_to_the_bit(pipe, tmp_path, deep_cache):
    plain, before = image(pipe), state(pipe)
    keys, forward = list(pipe.unet.state_dict()), pipe.unet.forward
    assert accelerate_pipeline(pipe, **FAST, deep_cache=deep_cache) is pipe
    compiled_image(pipe)
    assert list(pipe.unet.state_dict()) == keys and pipe.unet.forward == forward
    assert pipe.components.keys() == zoo.pipeline("StableDiffusionPipeline").components.keys()
    assert "accel" not in str(dict(pipe.config)) and "progress_bar" not in pipe.config
    assert restore(pipe) is pipe
    assert state(pipe) == before
    assert list(pipe.unet.state_dict()) == keys and pipe.unet.forward == forward
    assert torch.equal(eager_image(pipe), plain)
    assert restore(pipe) is pipe and state(pipe) == before  # once more does no harm


def test_context_leaves_the_pipeline_as_it_was_before_it(pipe):
    image(pipe)
    before = state(pipe)
    with pytest.raises(KeyboardInterrupt), accelerated(pipe, **FAST) as inside:
        assert inside is pipe
        with accelerated(pipe, ignores=("unet", "vae"), backend="eager"):
            eager_image(pipe)
        compiled_image(pipe)
        raise KeyboardInterrupt
    assert state(pipe) == before


class Stopped(BaseException):
    """As an interrupt from the keyboard, which is no Exception."""


@pytest.mark.parametrize("error", [Stopped, RuntimeError])
@pytest.mark.parametrize("where", ["callback", "block"])
def test_image_that_is_broken_off_leaves_nothing_on_the_models(pipe, error, where):
    plain, before, stop = image(pipe), state(pipe), raising(error)
    accelerate_pipeline(pipe, **FAST)
    fast = state(pipe)
    if where == "block":
        handle = pipe.unet.mid_block.register_forward_hook(stop)
    with pytest.raises(error):
        image(pipe, **({"callback_on_step_end": stop} if where == "callback" else {}))
    if where == "block":
        handle.remove()
    assert state(pipe) == fast
    assert not shared._leases
    assert difference(image(pipe), plain) < TOLERANCE
    restore(pipe)
    assert state(pipe) == before


def test_run_holds_its_graphs_from_the_first_step_to_the_last_and_no_longer(pipe):
    held = []

    def look(pipe, step, time, tensors):
        held.append([len(lease.keys) for lease in shared._leases])
        return tensors

    with accelerated(pipe, **FAST):
        image(pipe, callback_on_step_end=look)
        assert not shared._leases
        with torch.no_grad():  # a loop of somebody's own
            pipe.unet(torch.randn(1, 4, 8, 8), 1, zoo.prompt(pipe)["prompt_embeds"])
        assert not shared._leases
    assert len(held) == 2 and held[0] == held[1] and len(held[0]) == 1 and held[0][0] > 3


def test_pipelines_of_the_same_models_are_accelerated_and_restored_together(pipe, models):
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    given = {"image": picture, "num_inference_steps": 4, "strength": 0.5, "output_type": "latent", **zoo.prompt(pipe)}

    def start():
        return other(**given, generator=torch.Generator().manual_seed(1))[0]

    plain, before = start(), state(other)
    accelerate_pipeline(pipe, **FAST)
    used = hits()
    assert difference(start(), plain) < TOLERANCE
    assert hits() > used
    restore(other)
    used = hits()
    image(pipe)
    assert torch.equal(start(), plain)
    assert hits() == used
    restore(pipe)
    assert state(other) == before


def test_context_of_one_pipeline_leaves_another_of_the_same_models_accelerated(pipe):
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    accelerate_pipeline(pipe, **FAST)
    image(pipe)
    before = state(pipe)
    with accelerated(other, ignores=("unet", "vae"), backend="eager"):
        eager_image(pipe)  # the last call counts
    compiled_image(pipe)
    assert state(pipe) == before
    restore(pipe)


def test_model_put_in_the_place_of_another_is_followed(pipe):
    first, second = pipe.unet, copy.deepcopy(pipe.unet)
    with torch.no_grad():
        for weight in second.parameters():
            weight.mul_(0.5)
    pipe.unet = second
    expected = image(pipe)
    pipe.unet = first
    accelerate_pipeline(pipe, **FAST)
    image(pipe)
    pipe.unet = second
    assert difference(compiled_image(pipe), expected) < TOLERANCE
    assert call_of(first) is None
    restore(pipe)
    assert call_of(second) is None
    pipe.unet = first


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_of_an_accelerated_pipeline_and_of_its_models_are_plain(pipe, copy_of):
    plain = image(pipe)
    accelerate_pipeline(pipe, **FAST, deep_cache=DeepCacheSettings())
    copied = copy_of(pipe)
    restore(pipe)
    assert torch.equal(eager_image(copied), plain)
    assert accelerate_pipeline(copied, **FAST) is copied
    assert difference(compiled_image(copied), plain) < TOLERANCE


def test_accelerated_pipeline_that_is_let_go_of_is_gone(models):
    pipe = zoo.pipeline("StableDiffusionPipeline", **{**models, "unet": copy.deepcopy(models["unet"])})
    accelerate_pipeline(pipe, **FAST, deep_cache=DeepCacheSettings())
    image(pipe)
    kept = pipe.unet  # others may have it
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    used = hits()
    with torch.no_grad():
        kept(torch.randn(1, 4, 8, 8), 1, torch.randn(1, 5, zoo.WIDTH))
    assert hits() > used
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None


def test_two_threads_with_pipelines_of_the_same_models_get_their_own_images(pipe, models):
    pipes = [pipe, zoo.pipeline("StableDiffusionPipeline", **models)]
    pipes[1].scheduler = copy.deepcopy(pipe.scheduler)
    calls = [{"width": 32, "height": 32}, {"width": 48, "height": 24}]
    plain = [image(pipes[0], seed=index, steps=6, **size) for index, size in enumerate(calls)]
    for one in pipes:
        accelerate_pipeline(one, **FAST)
    before, made, together = state(pipe), [None, None], threading.Barrier(2)

    def work(index):
        together.wait(60)
        made[index] = image(pipes[index], seed=index, steps=6, **calls[index])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
    for out, expected in zip(made, plain, strict=True):
        assert difference(out, expected) < TOLERANCE
    assert state(pipe) == before
    assert fallbacks.rows() == []
    for one in pipes:
        restore(one)
