"""The store: what was saved is loaded, and nothing else ever is."""

import dataclasses
import os
import time

import pytest
import torch
from comfy_accel.accel.compile.compiled_graph import CompiledGraph
from comfy_accel.accel.store import key as store_key
from comfy_accel.accel.store import manifest
from comfy_accel.accel.store.folder import Folder
from comfy_accel.accel.store.graph_store import NOTHING_SAVED, GraphStore
from kit.blocks import Stop, raising
from kit.stores import CPU, built, graph, key, load, reasons, save, store


def entry(path):
    (found,) = (path / "graphs").iterdir()
    return found


def opened(store, build, name="a", **given):
    return built(store, build, of=key(name), **given)


class Failing(Folder):
    """A folder that fails in these ways, such as on a disk that is full or a share that is gone."""

    def __init__(self, path, *verbs, error=None):
        super().__init__(path)
        self.asked, self._error = 0, error or OSError(28, "No space left on device")
        for verb in verbs:
            setattr(self, verb, self._fail)

    def _fail(self, *_):
        self.asked += 1
        raise self._error


def failing(tmp_path, *verbs, **error):
    folder = Failing(tmp_path / "graphs", *verbs, **error)
    return GraphStore(folder), folder


GONE, fails = OSError(110, "Connection timed out"), raising(ZeroDivisionError)


def test_another_process_loads_what_was_saved(tmp_path):
    empty = store(tmp_path)
    assert load(empty) is None and reasons(empty) == [NOTHING_SAVED]
    assert list(tmp_path.iterdir()) == []  # looking makes no folder
    assert save(store(tmp_path))
    another = store(tmp_path)
    assert load(another) == (b"code", graph().facts)
    assert load(another, "b") is None
    told = another.statistics()
    assert (told["lookups"], told["loaded"]) == (2, 1)


def test_no_more_are_opened_than_a_call_can_wait_for(tmp_path):
    for number in range(7):
        save(store(tmp_path), data=bytes([number]))
        time.sleep(0.01)
    made = []
    assert opened(store(tmp_path), lambda data, _: made.append(data) or graph(data), fits=lambda graph: False) is None
    assert made == [bytes([number]) for number in (6, 5, 4, 3)]


def test_graph_that_does_not_fit_the_call_is_not_used_and_the_next_one_is(tmp_path):
    for data in (b"one", b"two"):
        save(store(tmp_path), data=data)
    assert load(store(tmp_path), fits=lambda graph: graph.run(()) == b"one")[0] == b"one"
    assert load(store(tmp_path), fits=lambda graph: graph.run(()) == b"two")[0] == b"two"
    neither = store(tmp_path)
    assert load(neither, fits=lambda graph: False) is None
    assert opened(neither, fails, may_serve=lambda facts: facts.weights == 2) is None  # not even opened
    assert ["does not fit" in reason for reason in reasons(neither)] == [True]


def test_every_flipped_bit_and_every_truncation_is_a_miss(tmp_path, monkeypatch):
    here = store_key.environment(CPU)
    monkeypatch.setattr(store_key, "environment", lambda devices: here)  # to find it out takes most of a look
    save(store(tmp_path))
    file = entry(tmp_path)
    whole = file.read_bytes()
    places = range(len(whole))
    flipped = (whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in places)
    for changed in (*flipped, *(whole[:length] for length in places)):
        file.write_bytes(changed)
        damaged = store(tmp_path)
        assert load(damaged) is None
        assert reasons(damaged) not in ([], [NOTHING_SAVED])
    file.unlink()
    assert load(store(tmp_path)) is None


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"{}", b"[" * 10**5, b'{"format": 5}', b"\xff" * 9, b"9" * 5000])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_manifest_of_any_content_is_a_miss(tmp_path, text, end):
    save(store(tmp_path))
    entry(tmp_path).write_bytes(manifest._checksum(text) + b" " + text + end)
    damaged = store(tmp_path)
    assert load(damaged) is None
    assert reasons(damaged) == ["its manifest is damaged"]


def test_entry_renamed_to_another_key_is_a_miss(tmp_path):
    save(store(tmp_path))
    digest = store_key.key_digest(key("b"))
    file = entry(tmp_path)
    file.rename(file.with_name(digest + file.name[len(digest) :]))
    renamed = store(tmp_path)
    assert load(renamed, "b") is None
    assert "not what its name says" in reasons(renamed)[0]


def test_full_disk_costs_the_saving_alone(tmp_path):
    save(store(tmp_path))
    full, folder = failing(tmp_path, "write")
    for number in range(5):
        assert load(full, f"k{number}") is None and not save(full)
    assert any("No space left" in reason for reason in reasons(full)) and folder.asked == 3
    assert load(full) is not None


def test_folder_that_is_read_only_still_serves(tmp_path):
    for name in "ab":
        save(store(tmp_path), name)
    here, folder = failing(tmp_path, "write", "touch")
    found = opened(here, lambda data, facts: graph(data))
    assert folder.asked == 1
    for _ in range(5):  # as where what is known of graphs in memory grows with the sizes of calls
        here.save_facts(found, "Block")
    assert folder.asked == 4
    assert load(here, "b") is not None


def test_folder_that_cannot_be_read_is_a_miss(tmp_path):
    save(store(tmp_path))
    for verb in ("files", "open"):
        assert load(failing(tmp_path, verb)[0]) is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "graphs").write_text("in its place")
    blocked = store(tmp_path / "other")
    assert not save(blocked) and load(blocked) is None


def test_code_that_cannot_be_loaded_is_a_miss_and_tried_once(tmp_path):
    save(store(tmp_path))
    broken = store(tmp_path)
    for _ in range(2):
        assert opened(broken, fails) is None
    assert "ZeroDivisionError" in reasons(broken)[0]
    assert "failed in this process" in reasons(broken)[1]


def test_code_that_cannot_be_loaded_gives_way_to_what_is_compiled_instead(tmp_path):
    save(store(tmp_path), data=b"bad")
    time.sleep(0.01)

    def build(data, facts):
        assert data != b"bad"
        return CompiledGraph(lambda t: data, lambda t: True, facts)

    sick = store(tmp_path)
    assert opened(sick, build) is None
    assert save(sick, data=b"good")
    later = store(tmp_path)
    assert opened(later, build).run(()) == b"good"
    assert reasons(later) == []


def test_loaded_graph_that_failed_is_not_loaded_again_and_stays_for_others(tmp_path):
    assert save(store(tmp_path))
    here = store(tmp_path)
    found = opened(here, lambda data, facts: graph(data))
    assert here.distrust(found.saved_as)
    assert load(here) is None
    assert load(store(tmp_path)) is not None


def test_own_graph_that_failed_is_deleted(tmp_path):
    here = store(tmp_path)
    made = graph()
    assert here.save(key(), "Block", CPU, made)
    assert made.save is None
    assert not here.distrust(made.saved_as)
    assert list((tmp_path / "graphs").iterdir()) == []


def test_share_that_is_gone_is_asked_three_times_and_again_after_a_while(tmp_path, monkeypatch):
    here, folder = failing(tmp_path, "files", error=GONE)
    for number in range(40):
        assert load(here, f"k{number}") is None
    assert folder.asked == 3
    now = time.monotonic()
    monkeypatch.setattr("comfy_accel.accel.store.graph_store.time.monotonic", lambda: now + 301)
    assert load(here) is None and load(here) is None
    assert folder.asked == 4


def test_graphs_that_cannot_be_loaded_turn_nothing_off(tmp_path):
    for name in "abcdefg":
        save(store(tmp_path), name)
    here = store(tmp_path)
    for name in "abcdef":
        assert opened(here, fails, name) is None
    assert load(here, "g") is not None


def test_lack_of_memory_is_not_held_against_a_graph(tmp_path):
    save(store(tmp_path))
    here = store(tmp_path)
    assert opened(here, raising(torch.OutOfMemoryError("no more"))) is None
    assert load(here) is not None


def test_one_entry_that_cannot_be_read_hides_no_other(tmp_path):
    for data in (b"one", b"two"):
        save(store(tmp_path), data=data)
        time.sleep(0.01)
    first = min((tmp_path / "graphs").iterdir(), key=lambda file: -file.stat().st_mtime)

    class Denied(Folder):
        def open(self, name):
            if name == first.name:
                raise PermissionError(13, "Permission denied")
            return super().open(name)

    assert load(GraphStore(Denied(tmp_path / "graphs")))[0] == b"one"


def stop(*args):
    try:
        raise Stop
    except Stop as error:
        raise RuntimeError("what a compiler makes of it") from error


def test_hosts_interrupt_while_loading_or_saving_passes_through(tmp_path):
    save(store(tmp_path))
    interrupted = store(tmp_path)
    for build, fits in ((stop, lambda graph: True), (lambda data, facts: graph(data), stop)):
        with pytest.raises(Stop):
            opened(interrupted, build, fits=fits, interrupts=(Stop,))
    with pytest.raises(Stop):
        interrupted.save(key(), "Block", CPU, dataclasses.replace(graph(), save=stop), (Stop,))
    assert load(interrupted) is not None


def test_graph_for_other_values_is_not_opened(tmp_path):
    good = graph()
    here = store(tmp_path)
    here.save(key(), "Block", CPU, dataclasses.replace(good, facts=dataclasses.replace(good.facts, values=("0.5",))))
    assert opened(here, lambda data, facts: CompiledGraph(len, len, facts), values=("0.5",)).facts.values == ("0.5",)
    assert opened(here, fails, values=("0.7",)) is None
    assert reasons(here) == [NOTHING_SAVED]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", len])
def test_what_inductor_has_not_compiled_is_not_looked_for(tmp_path, backend):
    save(store(tmp_path))
    here, _ = failing(tmp_path, "files")
    other = dataclasses.replace(key(), backend=backend)
    assert built(here, graph, of=other) is None
    assert reasons(here) == []


def test_least_recently_used_are_deleted_first(tmp_path):
    for number, name in enumerate("abc"):
        save(store(tmp_path), name, data=bytes([number]) * 5000)
        for file in (tmp_path / "graphs").glob(f"{store_key.key_digest(key(name))}*"):
            os.utime(file, (time.time() - 100 + number,) * 2)
    assert load(store(tmp_path), "a") is not None  # used just now
    Folder(tmp_path / "graphs").prune(14000)
    assert [load(store(tmp_path), name) is not None for name in "abc"] == [True, False, True]


def test_saving_keeps_the_folder_within_its_bytes(tmp_path):
    small = store(tmp_path, max_bytes=lambda: 30_000)
    for number in range(33):
        save(small, chr(97 + number % 20) + str(number), data=os.urandom(5000))
        time.sleep(0.002)
    files = list((tmp_path / "graphs").iterdir())
    assert sum(file.stat().st_size for file in files) <= 30_000 + 16 * 6000
    assert load(store(tmp_path), chr(97 + 32 % 20) + "32") is not None


def test_without_a_budget_nothing_is_saved_nor_what_cannot_leave_the_process(tmp_path):
    assert not save(store(tmp_path, max_bytes=lambda: 0))
    assert not store(tmp_path).save(key(), "Block", CPU, CompiledGraph(len, len))
    assert list(tmp_path.iterdir()) == []
