"""What is told of real runs: the record, the report of it, progress on the node, and that no image shows any of it."""

import json
import time
from dataclasses import asdict

import comfy.model_management
import comfyui_version
import folder_paths
import pytest
import torch
from comfy_accel.accel.beside import making
from comfy_accel.accel.cache.graph_cache import GraphCache, shared
from comfy_accel.accel.compile.generated_code import STAGES
from comfy_accel.accel.core import events
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.settings import DEFAULT_MAX_BYTES, Settings
from comfy_accel.accel.hosts.comfyui import preferences
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.hosts.comfyui.running_prompt import CompileProgress
from comfy_accel.accel.hosts.comfyui.server import panel, report
from comfy_accel.accel.report import log as report_log
from comfy_accel.accel.report.run_record import records
from comfy_accel.nodes.report import AccelReport
from kit import tiny_models
from kit.blocks import heard, raising
from kit.step_cache import every, letters

warm = GraphCache()
UNIFORM = every(3)


@pytest.fixture(autouse=True)
def clean():
    records.clear()


@pytest.fixture(scope="module")
def unet():
    return tiny_models.small_unet(model_channels=64)


@pytest.fixture
def settings(tmp_path):
    """Preferences of an installation of its own, as if ComfyUI had just started."""
    before = folder_paths.get_user_directory()
    folder_paths.set_user_directory(str(tmp_path))

    def restart():
        preferences._current = None
        return preferences

    yield restart
    folder_paths.set_user_directory(before)
    restart()
    shared.set_budget(512, DEFAULT_MAX_BYTES)
    report_log.set_verbosity("normal")


def fast(model, cache=warm, made_by=None):
    return accelerate(model, CompileSettings(backend="eager"), cache, made_by)


def image(model, **arguments):
    return tiny_models.sample(model, **{"width": 64, "height": 72, "steps": 3, **arguments})


def test_what_is_compiled_beside_the_image_is_told_when_it_changes(monkeypatch):
    now, began = [(0, 0)], time.monotonic() - 30
    monkeypatch.setattr(making, "progress", lambda: now[-1])
    monkeypatch.setattr(making._process, "began", began)
    progress = CompileProgress()
    with heard() as told:
        for done in ((0, 0), (0, 2), (0, 2), (1, 2), (2, 2), (2, 2)):
            with progress.report_call(2, "7"):
                now.append(done)
    lefts = [data.pop("left") for _, data in told]
    assert told == [
        (name, {"name": "", "number": number, "of": 2, "stage": "beside", "node": "7"})
        for name, number in (("compiling", 1), ("compiling", 2), ("code_ready", 3))
    ]
    assert lefts[0] is None and 30 <= lefts[1] < 60 and lefts[2] == 0, "half is done in 30 seconds"


def test_first_run_compiles_and_the_second_finds_all_there(unet):
    cache = GraphCache()
    runs = []
    for _ in range(2):
        image(fast(unet, cache))
        runs.append(records.last())
    first, second = runs
    assert (first.model, first.latent, first.steps, first.sampler) == ("SD15", (1, 4, 9, 8), 3, "euler")
    assert first.compilations == cache.statistics()["compilations"] > 0 and first.compile_seconds > 0
    assert second.compilations == 0
    assert first.totals.compiled_calls == second.totals.compiled_calls == second.blocks * 3
    assert first.totals.eager_calls == second.totals.eager_calls == 0
    assert second.totals.contexts == (77,) and second.fallbacks == {} and not second.failed
    assert second.seconds >= 0 and second.loaded_share == 1.0
    used = [row["used_at"] for row in panel.cache_table(cache)["table"]]
    assert all(at == [{"latent": [9, 8], "batch": 1, "context": 77}] for at in used)


def test_deep_cache_and_compiling_are_one_run_in_either_order(unet):
    orders = (
        lambda model: apply_deep_cache(fast(model), UNIFORM),
        lambda model: fast(apply_deep_cache(model, UNIFORM)),
    )
    for order in orders:
        records.clear()
        image(order(unet), steps=7)
        run = records.last()
        assert run.compiling["backend"] == "eager" and run.caching["quality"] == 40.0
        assert run.skipping.steps_taken == records.last().skipping.steps_taken == letters(7)
        # The middle ones were timed: F and S, none of them disturbed but the first.
        assert run.skipping.by_skipping.seconds is not None


def test_deep_cache_alone_is_recorded(unet):
    image(apply_deep_cache(unet, UNIFORM), steps=4)
    run = records.last()
    assert run.compiling is None and run.skipping.steps_taken == letters(4) and run.model == "SD15"


def test_blocks_that_a_patch_concerns_are_told_with_advice(unet):
    model = fast(unet)
    model.set_model_attn2_patch(lambda q, k, v, extra: (q, k, v))
    image(model)
    run = records.last()
    assert run.totals.eager_calls > 0 and run.totals.compiled_calls > 0
    assert sum(run.fallbacks.values()) == run.totals.eager_calls
    text = report.write_report()
    assert "another node patches it (attn2_patch)" in text and "Without that patch" in text


def test_core_older_than_this_pack_is_tested_with_is_told(monkeypatch):
    monkeypatch.setattr(comfyui_version, "__version__", "0.3.74")
    assert "ComfyUI 0.3.74 (update it: Accel is tested with 0.3.75 and later)" in report.write_report()


def test_run_that_is_interrupted_is_recorded_as_failed_and_passes_on(unet):
    interrupt = comfy.model_management.InterruptProcessingException
    with pytest.raises(interrupt):
        image(fast(apply_deep_cache(unet, UNIFORM)), callback=raising(interrupt))
    assert records.last().failed
    assert "until it failed or was stopped" in report.write_report()


def test_image_is_the_same_whatever_listeners_do(unet):
    def broken(name, data):
        raise RuntimeError(name)

    plain = image(unet)
    stop = events.subscribe(broken)
    try:
        assert torch.equal(image(fast(unet)), plain)
    finally:
        stop()


def test_state_is_json_with_what_the_contract_names(unet):
    image(fast(apply_deep_cache(unet, UNIFORM)))
    state = json.loads(json.dumps(panel.state()))
    assert {"graph_cache", "graph_store", "compiling", "last_run", "settings", "machine", "version"} <= set(state)
    wanted = "model latent seconds steps compiled_calls eager_calls compile_seconds loaded account"
    assert set(wanted.split()) <= set(state["last_run"])
    assert set(state["settings"]) == set(preferences.NAMES)
    assert "steps_taken" in state["last_run"]
    assert "Compiling" in [part["name"] for part in state["machine"]]


def test_node_gives_text_and_shows_it(unet):
    image(fast(apply_deep_cache(unet, UNIFORM)))
    picture = torch.rand(2, 16, 24, 3)
    out = AccelReport.execute("anything", picture, picture.clone())
    (text,) = out.args
    assert "Last image: SD15, 64×72" in text and "reference: equal" in text
    assert out.ui.as_dict() == {"text": (text,)}


def test_node_without_a_run_and_inputs_says_what_to_do():
    (text,) = AccelReport.execute().args
    assert "No image was made" in text and "between the loaders and the sampler" in text
    assert "Connect the image to `anything`" in report.write_report(prompt=workflow("AccelModel"))


def workflow(*classes):
    return {str(number): {"class_type": name, "inputs": {}} for number, name in enumerate(classes)} | {"x": "no node"}


def test_figures_of_an_earlier_workflow_bring_no_advice(unet, monkeypatch):
    monkeypatch.setattr(report, "find_hints", lambda: [("Faster attention", panel.Reason("sage_unused"))])
    image(fast(unet))
    of_another, of_ours = (report.write_report(prompt=workflow("KSampler", *own)) for own in ((), ["AccelSpeedUp"]))
    assert "Nothing in this workflow speeds the model up" in of_another and "choose" not in of_another.lower()
    assert "Choose the backend inductor." in of_ours and of_ours.count("traced but uncompiled (backend eager)") == 1
    assert of_ours.count("SageAttention is installed and not in use") == 1 and "Sage" not in of_another
    assert report._choose_changes(records.last(), (), None)[0][0] == "Nothing.", "a hint is never the first"


@pytest.mark.parametrize(("difference", "said"), [(0.1, "20.0 dB"), (0.01, "40.0 dB"), (0.0, "equal")])
def test_psnr_by_mental_arithmetic(difference, said):
    reference = torch.full((1, 8, 8, 3), 0.5)
    assert said in AccelReport.execute(None, reference + difference, reference).args[0]


def test_images_of_two_sizes_are_not_compared_and_do_no_harm():
    text = AccelReport.execute(None, torch.zeros(1, 8, 16, 3), torch.zeros(2, 8, 8, 3)).args[0]
    assert "Not compared: the image is 16x8 (1) and the reference 8x8 (2)" in text


def test_image_alone_is_not_compared_and_the_missing_one_is_named():
    assert "connect `reference` too" in AccelReport.execute(None, torch.zeros(1, 8, 8, 3)).args[0]
    assert "connect `image` too" in AccelReport.execute(None, None, torch.zeros(1, 8, 8, 3)).args[0]


def test_bar_of_the_node_fills_while_compiling_and_the_samplers_stays(unet):
    from comfy_execution import progress
    from comfy_execution.graph import DynamicPrompt
    from comfy_execution.utils import CurrentNodeContext

    moved = []

    class Watch(progress.ProgressHandler):
        def update_handler(self, node_id, value, max_value, state, prompt_id, image=None):
            moved.append((node_id, value, max_value))

    prompt = {
        "7": {"class_type": "AccelModel", "inputs": {}},
        "sampler": {"class_type": "any", "inputs": {"model": ["7", 0]}},
    }
    progress.reset_progress_state("prompt", DynamicPrompt(prompt))
    registry = progress.get_progress_state()
    registry.register_handler(Watch("watch"))
    registry.start_progress("sampler")
    registry.update_progress("sampler", 1, 3)
    with CompileProgress().report_call(2, "of another prompt"):
        events.emit("compile_start", name="block")
        events.emit("compile_end")
    assert {node for node, _, _ in moved} == {"sampler"}
    moved.clear()
    try:
        with CurrentNodeContext("prompt", "sampler"), heard("compiling") as told:
            image(fast(unet, GraphCache(), made_by="AccelModel"))
    finally:
        sampler, own = registry.nodes["sampler"], registry.nodes["7"]
        progress.reset_progress_state("", DynamicPrompt({}))
    kinds = records.last().kinds
    assert {node for node, _, _ in moved} == {"7"} and set(registry.nodes) == {"sampler", "7"}
    values = [value for _, value, _ in moved]
    of = len(STAGES) * kinds
    assert values == sorted(values) and values[0] == 0 and values[-1] == of and moved[-1][2] == of
    assert {1, len(STAGES) + 1} <= set(values), "a step for each stage"
    assert own["state"] is progress.NodeState.Finished
    assert sampler["state"] is progress.NodeState.Running and (sampler["value"], sampler["max"]) == (1, 3)
    begun = [(data["number"], data["of"]) for data in told if data["stage"] == STAGES[0]]
    assert begun == [(n + 1, kinds) for n in range(kinds)]
    assert [data["stage"] for data in told[:2]] == ["trace", "generate"]
    assert told[0]["node"] == "7"


def test_budget_comes_from_the_settings(settings):
    settings().change({"max_mb": 100, "max_entries": 50})

    def budget():
        totals = shared.statistics()
        return totals["max_bytes"] >> 20, totals["max_entries"]

    assert budget() == (100, 50)
    shared.set_budget(512, DEFAULT_MAX_BYTES)
    settings().current()  # another start: the page's settings are still there
    assert budget() == (100, 50)


def test_damaged_settings_count_as_none_and_wrong_ones_change_nothing(settings, tmp_path):
    folder = tmp_path / "__accel"
    folder.mkdir()
    (folder / "preferences.json").write_text("{")
    assert settings().current().max_mb == DEFAULT_MAX_BYTES >> 20
    with pytest.raises(ValueError, match="max_entries must be"):
        preferences.change({"max_mb": 5, "max_entries": -1})
    assert preferences.current().max_mb == DEFAULT_MAX_BYTES >> 20


def test_in_a_folder_that_cannot_be_written_settings_hold_until_the_end_and_cuda_graphs_are_not_turned_on(
    settings, tmp_path
):
    (tmp_path / "__accel").write_text("a file in its place")
    with pytest.raises(OSError):
        settings().change({"max_mb": 100, "cuda_graphs": "on"})
    assert preferences.current() == Settings(max_mb=100, cuda_graphs="ask")


def test_store_limit_is_kept_beside_the_others(settings, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCEL_STORE")
    settings().change({"max_mb": 100})
    file = tmp_path / "__accel" / "preferences.json"
    preferences.change({"verbosity": "quiet"})
    settings().change({"store_mb": 17})
    assert preferences.state()["store_mb"] == 17 and preferences.state()["max_mb"] == 100
    assert json.loads(file.read_text()) == asdict(Settings(100, 512, 17, "quiet"))
    monkeypatch.setenv("ACCEL_STORE_MB", "3")
    with pytest.raises(ValueError, match="ACCEL_STORE_MB"):
        preferences.change({"store_mb": 18})
