"""What happened in a run, put together from events."""

import threading
import time
import weakref

import pytest
import torch
from comfy_accel.accel.cache.entry import Use
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.compiled_graph import CompiledGraph
from comfy_accel.accel.core.events import emit, subscribe
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.hosts.comfyui.server.panel import cache_table
from comfy_accel.accel.report.account import Saving
from comfy_accel.accel.report.run import Skipping, Totals
from comfy_accel.accel.report.run_record import RunRecords


@pytest.fixture
def records():
    made = RunRecords()
    stop = subscribe(made.hear)
    yield made
    stop()


def start(owner=1, **facts):
    emit("run_start", owner=owner, **{"model": "SD15", "latent": (2, 4, 8, 8), "steps": 4, **facts})


def end(owner=1, failed=False):
    emit("run_end", owner=owner, failed=failed)


def test_no_run_is_no_record_and_one_that_fails_is_kept_as_failed(records):
    assert records.last() is None and records.get_compilation() is None
    start()
    end(failed=True)
    assert records.last().failed


def test_events_between_start_and_end_belong_to_the_run(records):
    emit("graph_loaded", name="Block", key="x", seconds=9.0)  # of nobody
    start()
    emit("survey", model="UNet", blocks=5, kinds=2, left={}, seconds=0.5)
    emit("compile_start", name="Block", key="x")
    emit("compile_end", name="Block", key="x", seconds=1.5)
    emit("compile_failed", name="Block", key="z", reason=Reason("interrupted"), seconds=2.0)
    emit("graph_loaded", name="Block", key="y", seconds=0.25)
    fallbacks.note("Block", Reason("patched", patch="attn9"))
    end()
    run = records.last()
    assert (run.model, run.latent, run.steps) == ("SD15", (2, 4, 8, 8), 4)
    assert (run.compilations, run.compile_seconds, run.loaded, run.load_seconds) == (1, 3.5, 1, 0.25)
    assert sum(run.paid.values()) == 3.5 + 0.25 + 0.5 and (run.blocks, run.kinds) == (5, 2)
    assert [str(why) for _, why in run.fallbacks] == ["another node patches it (attn9)"]
    assert not run.failed and run.seconds >= 0 and abs(run.finished - time.time()) < 60


def test_blocks_that_nobody_tried_to_compile_count_as_often_as_the_others(records):
    patched = Reason("forward_replaced")
    for blocks, calls in ((6, 12), (0, 0)):  # of four steps
        start()
        emit("survey", model="UNet", blocks=blocks, kinds=1, left={("ResBlock", patched): 8}, seconds=0.0)
        fallbacks.note("ResBlock", patched, calls=8)
        emit("run_calls", totals=Totals(compiled_calls=calls))
        end()
        each = calls // blocks if blocks else 4
        assert records.last().totals.eager_calls == 8 * each == records.last().fallbacks[("ResBlock", patched)]


def test_fallbacks_of_earlier_runs_are_not_counted_again(records):
    for calls in (3, 2):
        start()
        for _ in range(calls):
            fallbacks.note("Block", Reason("no_blocks"))
        end()
        assert list(records.last().fallbacks.values()) == [calls]


def test_two_wrappers_of_one_sampler_describe_one_run(records):
    start(compiling={"backend": "inductor"})
    start(caching={"interval": 3})
    emit("deep_cache_run", skipping=Skipping("FS"), began=(0.0, 1.0))
    end()
    assert records.last() is None
    end()
    run = records.last()
    assert run.compiling and run.caching and run.skipping.steps_taken == "FS"


def test_a_sampler_within_a_sampler_is_a_run_of_its_own(records):
    start(owner=1, model="outer")
    start(owner=2, model="inner")
    emit("compile_end", name="Block", key="x", seconds=1.0)
    for owner, told in ((2, ("inner", 1)), (1, ("outer", 0))):
        end(owner)
        assert (records.last().model, records.last().compilations) == told


def test_samplings_of_one_prompt_are_one_run(records):
    settings = {"node": "3", "backend": "inductor"}
    patched, hooked = Reason("patched", patch="attn9"), Reason("hooks_everywhere")
    told = {}
    for prompt, model, reason in (
        ("a", "SDXL", patched),
        ("a", "SDXL", hooked),
        ("a", "Flux", patched),
        ("b", "", hooked),
    ):
        sampler = "euler" if reason is patched else "lcm"
        start(
            prompt=prompt,
            model=model,
            sampler=sampler,
            compiling={**settings, "node": "5"} if model == "Flux" else settings,
        )
        emit("sampling")
        emit("compile_end", name="Block", key="x", seconds=1.0)
        fallbacks.note("Block", reason)
        end()
        told[prompt] = records.last()
    first, second = told.values()
    assert (first.model, first.steps, first.samplings, first.compilations) == ("SDXL + Flux", 12, 3, 3)
    assert first.sampler == "euler + lcm"
    assert sum(first.owed.values()) == 3.0 and first.fallbacks == {("Block", patched): 2, ("Block", hooked): 1}
    assert {node: str(line[-1]) for node, line in first.lines.items()} == {
        "3": "not compiled: another node patches it (attn9)",
        "5": "not compiled: another node patches it (attn9)",
    }
    assert (second.samplings, second.compilations) == (1, 1)


def test_a_warm_up_is_no_part_of_the_image_after_it(records):
    for _ in range(2):
        start(prompt="a", steps=1)
        end()
    assert records.last().steps == 2
    emit("warmed_up")
    start(prompt="a")
    end()
    assert records.last().steps == 4


def test_loading_the_model_is_not_work_of_the_sampler(records):
    start()
    time.sleep(0.05)
    emit("sampling")
    time.sleep(0.02)
    emit("sampling")  # of another wrapper of the same sampler
    end()
    run = records.last()
    assert 0.05 <= run.prepare_seconds < run.seconds and run.account().worked == run.seconds - run.prepare_seconds


def test_what_another_thread_does_belongs_to_its_own_run(records):
    start()
    other = threading.Thread(target=emit, args=("compile_end",), kwargs={"name": "B", "key": "x", "seconds": 1.0})
    other.start()
    other.join()
    end()
    assert records.last().compilations == 0


def test_what_is_being_compiled_can_be_seen_meanwhile(records):
    emit("compile_start", name="Block", key="x")
    emit("compiling", name="Block", number=2, of=5, stage="build", node="7")
    now = records.get_compilation()
    assert (now["name"], now["number"], now["of"], now["stage"]) == ("Block", 2, 5, "build")
    assert now["node"] == "7" and now["seconds"] >= 0
    emit("compile_failed", name="Block", key="x", reason=Reason("interrupted"), seconds=0.1)
    assert records.get_compilation() is None
    start()
    for end_of_it in (lambda: emit("code_ready", name=""), end):  # what is made beside has no end of its own here
        emit("compiling", name="", number=3, of=7, stage="beside", node="7", left=19.5)
        assert records.get_compilation()["left"] == 19.5
        end_of_it()
        assert records.get_compilation() is None


def graph():
    return CompiledGraph(len, lambda tensors: True, nbytes=8)


def find(cache, key, lease=None):
    return cache.find(key, f"name of {key}", lambda found: True, graph, lease)[0]


def test_blocks_that_were_only_traced_save_nothing(records):
    cache = GraphCache()
    start(compiling={"backend": "eager", "check_gain": True})
    with cache.lease() as lease:
        find(cache, "a", lease).hits += 3
    emit("run_calls", totals=Totals.from_lease(lease, "eager", True))
    end()
    assert records.last().totals.by_compiling == Saving(None, Reason("compiling_traced"))


def test_calls_of_graphs_are_those_of_the_run_alone(records):
    cache = GraphCache()
    find(cache, "a").hits += 100  # an earlier run's
    start()
    with cache.lease() as lease:
        entry = find(cache, "a", lease)
        find(cache, "a", lease)
        entry.hits += 3
        find(cache, "b", lease).hits += 4
        cache.evict("b")
        find(cache, "b", lease).hits += 5
    emit("run_calls", totals=Totals.from_lease(lease, "inductor", True, eager_calls=2, contexts=(77,)))
    end()
    told = records.last().totals
    assert (told.compiled_calls, told.eager_calls, told.contexts) == (12, 2, (77,))


def test_entries_remember_the_latest_runs_that_used_them():
    cache = GraphCache()
    for side in range(12):
        with cache.lease() as lease:
            find(cache, "a", lease)
            lease.uses = (Use("SD15", (side, 8), 1, 77),)
    row = cache_table(cache)["table"][0]
    assert row["model"] == "SD15"
    assert [use["latent"][0] for use in row["used_at"]] == [11, 10, 9, 8, 7, 6, 5, 4]


def test_no_tensor_is_kept(records):
    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)
    start()
    emit("compile_start", name="Block", key=("a key with", tensor))
    emit("compile_end", name="Block", key=("a key with", tensor), seconds=0.0)
    end()
    del tensor
    assert gone() is None
