"""The memory of captured calls is ComfyUI's to ask back, by every way in which it asks for a model's."""

import gc
import logging
import sys
import threading
import weakref

import comfy.model_management as core
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import shared
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.settings import DEFAULT_MAX_BYTES, DEFAULT_MAX_ENTRIES, Settings
from comfy_accel.accel.hosts.comfyui import preferences
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.capture_memory import CapturedCalls, room_for_captures
from kit import tiny_models
from kit.captures import EAGER_BLOCKS, capturing_cache, left, reasons
from kit.deep_cache import SMALL

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clean():
    core.unload_all_models()
    yield
    core.unload_all_models()


def unet(**changes):
    return tiny_models.unet(**SMALL, **changes)


def image(model, **changes):
    return tiny_models.sample(model, **({"width": 64, "height": 96, "steps": 5} | changes))


def fast(model, cache):
    return accelerate(model, EAGER_BLOCKS, cache, graphs=True)


def standing():
    return [entry for entry in core.current_loaded_models if isinstance(entry.model.model, CapturedCalls)]


def loaded_weights():
    return [entry.model.model for entry in core.current_loaded_models if entry not in standing()]


def test_captures_stand_among_loaded_models_with_their_bytes_and_are_not_handed_around(cache):
    model = unet()
    assert standing() == []
    image(fast(model, cache))
    (entry,) = standing()
    assert entry.model_memory() == entry.model_loaded_memory() == cache.captures.nbytes > 0
    assert entry.device == CPU and not entry.is_dead()
    assert entry.model not in core.loaded_models(only_currently_used=True)
    image(fast(model, cache), width=128)
    assert standing() == [entry] and entry.model_memory() == cache.captures.nbytes


def test_captures_go_before_any_weights_even_those_of_a_model_loaded_in_part(cache, capturer, caplog):
    model, partly, whole = unet(), unet(seed=2), unet(seed=3)
    core.load_models_gpu([partly, whole])
    partly.partially_unload(CPU, partly.model_size() // 2)
    image(fast(model, cache))
    image(fast(model, cache), width=128)
    assert left(capturer) == 2 and len(core.current_loaded_models) == 4
    with caplog.at_level(logging.DEBUG):
        core.free_memory(1e30, CPU)
    unloaded = [line for line in caplog.messages if line.startswith("Unloading ")]
    assert unloaded[0] == "Unloading CapturedCalls" and len(unloaded) == 4
    assert left(capturer) == 0 and core.current_loaded_models == []


def test_captures_go_last_where_a_model_streams_its_weights_which_give_way_by_themselves(cache, capturer, caplog):
    model, streaming = unet(), unet(seed=2)
    core.load_models_gpu([streaming])
    streaming.is_dynamic = lambda: True
    image(fast(model, cache))
    with caplog.at_level(logging.DEBUG):
        core.free_memory(1e30, CPU)
    unloaded = [line for line in caplog.messages if line.startswith("Unloading ")]
    assert unloaded[-1] == "Unloading CapturedCalls" and len(unloaded) == 3
    assert left(capturer) == 0


def test_nothing_is_unloaded_for_the_entry_and_nothing_goes_while_there_is_enough(cache, capturer):
    model, other = unet(), unet(seed=2)
    core.load_models_gpu([other])
    image(fast(model, cache))
    core.free_memory(0, CPU)
    assert left(capturer) == 1 and set(loaded_weights()) == {model.model, other.model}


@pytest.mark.parametrize("ask", ["unload_all_models", "free_memory", "another model", "keep another"])
def test_every_way_to_ask_frees_them_and_the_next_image_is_right_and_captured_anew(ask, cache, capturer):
    model = unet()
    model_fast = fast(model, cache)
    expected = image(model)
    assert torch.equal(image(model_fast), expected)
    assert left(capturer) == 1
    if ask == "unload_all_models":  # `/free`, and after a shortage
        core.unload_all_models()
    elif ask == "free_memory":
        core.free_memory(1e30, CPU)
    elif ask == "another model":
        other = unet(seed=3)
        core.free_memory(1e30, CPU)
        core.load_models_gpu([other])
    else:
        kept = [entry for entry in core.current_loaded_models if entry not in standing()]
        core.free_memory(1e30, CPU, keep_loaded=kept)
        assert loaded_weights() == [model.model]
    assert left(capturer) == 0 and standing() == [] and cache.captures.nbytes == 0
    assert torch.equal(image(model_fast), expected)
    assert left(capturer) == 1 and len(standing()) == 1 and fallbacks.rows() == []


def test_unloading_the_model_alone_leaves_an_entry_of_no_bytes_that_the_next_captures_use(cache, capturer):
    model = unet()
    model_fast = fast(model, cache)
    image(model_fast)
    (entry,) = standing()
    model_fast.detach()
    assert left(capturer) == 0 and entry.model_memory() == 0
    image(model_fast)
    assert standing() == [entry] and entry.model_memory() == cache.captures.nbytes > 0


def test_core_may_load_everything_in_its_list_again_and_nothing_changes(cache, capturer):
    model = unet()
    image(fast(model, cache))
    core.load_models_gpu(core.loaded_models())
    assert len(standing()) == 1 and left(capturer) == 1
    core.cleanup_models_gc()
    core.cleanup_models()
    core.soft_empty_cache()
    if hasattr(core, "reset_cast_buffers"):
        core.reset_cast_buffers()
    if hasattr(core, "unload_model_and_clones"):
        core.unload_model_and_clones(unet(seed=5))
    assert len(standing()) == 1 and left(capturer) == 1
    core.unload_all_models()
    assert left(capturer) == 0 and core.current_loaded_models == []


def test_memory_asked_for_in_mid_run_is_given_and_the_run_goes_on_without(cache, capturer):
    model = unet()
    model_fast = fast(model, cache)
    expected = image(model, steps=8)

    def callback(step, *args):
        if step == 5:
            assert left(capturer) == 1
            standing()[0].model_unload(1)
            assert left(capturer) == 0

    assert torch.equal(image(model_fast, steps=8, callback=callback), expected)
    assert left(capturer) == 0
    assert reasons() == ["the memory of its captures is needed elsewhere during this run"]
    assert torch.equal(image(model_fast, steps=8), expected)
    assert left(capturer) == 1


def test_asking_waits_for_a_replay_of_another_thread(cache, capturer):
    model = unet()
    image(fast(model, cache))
    thread = threading.Thread(target=core.free_memory, args=(1e30, CPU))
    with capturer.lock:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and left(capturer) == 1
    thread.join(30)
    assert not thread.is_alive() and left(capturer) == 0


def test_neither_the_cache_nor_a_model_is_kept_alive_by_the_entry():
    cache, model = capturing_cache()[0], unet()
    image(fast(model, cache))
    network, kept = weakref.ref(model.model.diffusion_model), weakref.ref(cache)
    del model
    gc.collect()
    core.cleanup_models_gc()
    assert network() is None and cache.captures.nbytes == 0
    del cache
    gc.collect()
    assert kept() is None
    core.free_memory(1e30, CPU)
    assert core.current_loaded_models == []


def test_core_that_keeps_its_models_otherwise_is_gone_without(cache, capturer, monkeypatch):
    monkeypatch.delattr(core, "current_loaded_models")
    model = unet()
    patched = fast(model, cache)
    cache.captures.on_admitted(CPU)
    assert patched.model is model.model and "current_loaded_models" not in vars(sys.modules[core.__name__])


@pytest.fixture
def settings_as_they_were(monkeypatch):
    for name in ("_current", "_for_captures"):
        monkeypatch.setattr(preferences, name, getattr(preferences, name))
    yield
    monkeypatch.undo()
    shared.set_budget(DEFAULT_MAX_ENTRIES, DEFAULT_MAX_BYTES)


def test_budget_grows_for_recordings_unless_somebody_has_set_one(settings_as_they_were):
    preferences._current = Settings()
    preferences.make_room_for_captures(3 << 30)
    assert shared.max_bytes == DEFAULT_MAX_BYTES + (3 << 30)
    preferences.make_room_for_captures(1 << 30)  # a smaller device beside it
    assert shared.max_bytes == DEFAULT_MAX_BYTES + (3 << 30)
    preferences._current = Settings(max_mb=1000)
    preferences.make_room_for_captures(4 << 30)
    assert shared.max_bytes == 1000 << 20


def test_device_without_captures_gets_no_room_for_them():
    assert room_for_captures(CPU) == 0
