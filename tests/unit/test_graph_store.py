"""The store: what was saved is loaded, and nothing else ever is."""

import dataclasses
import json
import os
import pickle
import time

import pytest
import torch
from comfy_accel.accel import store_key, store_trust
from comfy_accel.accel.compiled_graph import CompiledGraph
from comfy_accel.accel.graph_store import NOTHING_SAVED, GraphStore
from comfy_accel.accel.store_folder import LocalFolder
from comfy_accel.accel.store_prune import prune
from store_kit import CPU, graph, key, load, reasons, save, store


@pytest.fixture(autouse=True)
def without_key(monkeypatch):
    monkeypatch.delenv(store_trust.KEY_VARIABLE, raising=False)


def entry(path, end):
    (found,) = (path / "graphs").glob(f"*{end}")
    return found


def test_another_process_loads_what_was_saved(tmp_path):
    assert save(store(tmp_path))
    data, facts = load(store(tmp_path))
    assert data == b"code"
    assert facts == graph().facts


def test_nothing_is_touched_before_the_first_use(tmp_path):
    store(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_looking_makes_no_folder(tmp_path):
    empty = store(tmp_path)
    assert load(empty) is None
    assert reasons(empty) == [NOTHING_SAVED]
    assert list(tmp_path.iterdir()) == []


def test_another_key_is_a_miss(tmp_path):
    save(store(tmp_path), "a")
    assert load(store(tmp_path), "b") is None


def test_names_are_short(tmp_path):
    save(store(tmp_path))
    assert max(len(file.name) for file in (tmp_path / "graphs").iterdir()) <= 48


def test_graph_that_does_not_fit_the_call_is_not_used_and_the_next_one_is(tmp_path):
    for data in (b"one", b"two"):
        save(store(tmp_path), data=data)
    assert load(store(tmp_path), fits=lambda graph: graph.run(()) == b"one")[0] == b"one"
    assert load(store(tmp_path), fits=lambda graph: graph.run(()) == b"two")[0] == b"two"
    neither = store(tmp_path)
    assert load(neither, fits=lambda graph: False) is None
    assert "does not fit" in reasons(neither)[0]


@pytest.mark.parametrize("end", [".bin", ".json"])
def test_every_flipped_bit_is_a_miss(tmp_path, end):
    save(store(tmp_path))
    file = entry(tmp_path, end)
    whole = file.read_bytes()
    for place in range(0, len(whole) * 8, 1 if end == ".bin" else 7):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        file.write_bytes(bytes(changed))
        damaged = store(tmp_path)
        found = load(damaged)
        if found is not None:  # white space between the manifest's fields says nothing
            assert json.loads(bytes(changed)) == json.loads(whole)
        else:
            assert reasons(damaged) not in ([], [NOTHING_SAVED])


@pytest.mark.parametrize("end", [".bin", ".json"])
def test_every_truncation_is_a_miss(tmp_path, end):
    save(store(tmp_path))
    file = entry(tmp_path, end)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        damaged = store(tmp_path)
        assert load(damaged) is None
        assert reasons(damaged) != [NOTHING_SAVED]


@pytest.mark.parametrize("end", [".bin", ".json"])
def test_missing_part_is_a_miss(tmp_path, end):
    save(store(tmp_path))
    entry(tmp_path, end).unlink()
    assert load(store(tmp_path)) is None


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{}", b"[" * 10**5, b'{"seal": "\\ud800", "format": 1}', b"\xff" * 9, b"9" * 5000]
)
def test_manifest_of_any_content_is_a_miss(tmp_path, text):
    save(store(tmp_path))
    entry(tmp_path, ".json").write_bytes(text)
    damaged = store(tmp_path)
    assert load(damaged) is None
    assert reasons(damaged) == ["its manifest is damaged"]


def test_what_another_installation_saved_is_never_opened(tmp_path):
    save(store(tmp_path))
    (tmp_path / "secret").unlink()
    other = store(tmp_path)
    assert load(other) is None
    assert "another installation" in reasons(other)[0]


def test_hostile_pickle_is_not_opened(tmp_path):
    mark = tmp_path / "mark"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    attacker, victim = tmp_path / "attacker", tmp_path / "victim"
    save(store(attacker), data=pickle.dumps(Hostile()))
    (attacker / "graphs").rename(tmp_path / "graphs")
    victim.mkdir()
    (tmp_path / "graphs").rename(victim / "graphs")
    unpickling = store(victim)
    built = unpickling.load(key(), "Block", CPU, lambda data, facts: pickle.loads(data), lambda graph: True)
    assert built is None
    assert not mark.exists()
    # And the payload is one: its own installation would have opened it.
    pickle.loads(entry(victim, ".bin").read_bytes())
    assert mark.exists()


def test_entry_renamed_to_another_key_is_a_miss(tmp_path):
    save(store(tmp_path))
    digest = store_key.key_digest(key("b"))
    for end in (".json", ".bin"):
        file = entry(tmp_path, end)
        file.rename(file.with_name(digest + file.name[len(digest) :]))
    renamed = store(tmp_path)
    assert load(renamed, "b") is None
    assert "not what its name says" in reasons(renamed)[0]


@pytest.mark.parametrize("field", ["torch", "python", "device", "engine", "system", "options"])
def test_another_environment_is_a_miss_that_names_it(tmp_path, monkeypatch, field):
    made = store_key.environment(CPU)
    monkeypatch.setattr(store_key, "environment", lambda devices: {**made, field: "other"})
    save(store(tmp_path))
    monkeypatch.setattr(store_key, "environment", lambda devices: made)
    here = store(tmp_path)
    assert load(here) is None
    assert reasons(here)[0].startswith(f"saved with another {field} (other; here it is ")


def test_settings_of_torch_that_change_kernels_are_in_the_environment():
    before = store_key.environment(CPU)
    with torch._inductor.config.patch(max_autotune=True):
        assert store_key.environment(CPU) != before
    assert store_key.environment(CPU) == before


def test_sizes_and_backend_are_in_the_key_and_values_are_not():
    plain = key()
    assert store_key.key_digest(plain) == store_key.key_digest(key())
    changed = [
        plain.__class__(plain.kind, plain.call, plain.inputs, "other"),
        plain.__class__(plain.kind, plain.call, plain.inputs, plain.backend, (torch.Size([1]),)),
        plain.__class__(plain.kind, ("constant", 2), plain.inputs, plain.backend),
    ]
    assert len({store_key.key_digest(other) for other in (plain, *changed)}) == 4
    assert store_key.key_digest(plain.__class__(plain.kind, plain.call, plain.inputs, print)) is None


def test_fleet_key_opens_what_another_machine_saved(tmp_path, monkeypatch):
    monkeypatch.setenv(store_trust.KEY_VARIABLE, "a key for the whole fleet")
    save(store(tmp_path))
    assert not (tmp_path / "secret").exists()
    assert load(store(tmp_path)) is not None
    monkeypatch.setenv(store_trust.KEY_VARIABLE, "another key, as long as it")
    assert load(store(tmp_path)) is None


def test_short_key_turns_the_store_off_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv(store_trust.KEY_VARIABLE, "short")
    off = store(tmp_path)
    assert not save(off)
    assert "16 at least" in reasons(off)[0]


@pytest.mark.skipif(os.name != "posix", reason="only there a mode says who can read")
def test_secret_that_others_can_read_is_no_secret(tmp_path):
    save(store(tmp_path))
    secret = tmp_path / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.chmod(0o644)
    open_to_all = store(tmp_path)
    assert load(open_to_all) is None
    assert "chmod 600" in reasons(open_to_all)[0]


@pytest.mark.parametrize("content", ["", "abc", "zz" * 32, "00" * 31])
def test_damaged_secret_is_a_reason_and_never_a_weak_one(tmp_path, content):
    save(store(tmp_path))
    (tmp_path / "secret").write_text(content)
    damaged = store(tmp_path)
    assert load(damaged) is None and not save(damaged)
    assert "delete it" in reasons(damaged)[0]


class Failing(LocalFolder):
    """A folder on a disk that fails in one way."""

    def __init__(self, path, failing, error):
        super().__init__(path)
        self._failing, self._error = failing, error

    def _fail(self, verb):
        if verb in self._failing:
            raise self._error

    def files(self):
        self._fail("files")
        return super().files()

    def read(self, name):
        self._fail("read")
        return super().read(name)

    def write(self, name, data):
        self._fail("write")
        super().write(name, data)

    def touch(self, name):
        self._fail("touch")
        super().touch(name)


def failing(tmp_path, *verbs, error=None):
    error = error or OSError(28, "No space left on device")
    return GraphStore(Failing(tmp_path / "graphs", verbs, error), tmp_path / "secret")


def test_full_disk_costs_the_saving_alone(tmp_path):
    full = failing(tmp_path, "write")
    assert not save(full)
    assert "No space left" in reasons(full)[0]
    assert load(full) is None


def test_saving_that_keeps_failing_is_given_up(tmp_path):
    full = failing(tmp_path, "write")
    for _ in range(5):
        assert not save(full)
    assert sum(row["count"] for row in full.statistics()["misses"]) == 3


def test_folder_that_is_read_only_still_serves(tmp_path):
    save(store(tmp_path))
    assert load(failing(tmp_path, "write", "touch")) is not None


def test_folder_that_cannot_be_read_is_a_miss(tmp_path):
    save(store(tmp_path))
    for verb in ("files", "read"):
        assert load(failing(tmp_path, verb)) is None


def test_file_in_the_place_of_the_folder_is_a_reason(tmp_path):
    (tmp_path / "graphs").write_text("in the way")
    blocked = store(tmp_path)
    assert not save(blocked) and load(blocked) is None


def test_code_that_cannot_be_loaded_is_a_miss(tmp_path):
    save(store(tmp_path))
    broken = store(tmp_path)
    assert broken.load(key(), "Block", CPU, lambda data, facts: 1 / 0, lambda graph: True) is None
    assert "ZeroDivisionError" in reasons(broken)[0]


def test_interrupt_while_loading_passes_through(tmp_path):
    save(store(tmp_path))

    def interrupted(data, facts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store(tmp_path).load(key(), "Block", CPU, interrupted, lambda graph: True)


class StopTheRun(Exception):
    """What a host raises anywhere to stop a run."""


def stop(*args):
    try:
        raise StopTheRun
    except StopTheRun as error:
        raise RuntimeError("what a compiler makes of it") from error


def test_hosts_interrupt_while_loading_or_saving_passes_through(tmp_path):
    save(store(tmp_path))
    interrupted = store(tmp_path)
    with pytest.raises(StopTheRun):
        interrupted.load(key(), "Block", CPU, stop, lambda graph: True, (), (StopTheRun,))
    with pytest.raises(StopTheRun):
        interrupted.load(key(), "Block", CPU, lambda data, facts: graph(data), stop, (), (StopTheRun,))
    with pytest.raises(StopTheRun):
        interrupted.save(key(), "Block", CPU, dataclasses.replace(graph(), save=stop), (StopTheRun,))
    assert load(interrupted) is not None


def test_graph_for_other_values_is_not_opened(tmp_path):
    good = graph()
    here = store(tmp_path)
    here.save(key(), "Block", CPU, dataclasses.replace(good, facts=dataclasses.replace(good.facts, values=("0.5",))))

    def build(data, facts):
        return CompiledGraph(len, len, facts)

    assert here.load(key(), "Block", CPU, build, lambda graph: True, ("0.5",)).facts.values == ("0.5",)
    assert here.load(key(), "Block", CPU, lambda data, facts: 1 / 0, lambda graph: True, ("0.7",)) is None
    assert reasons(here) == [NOTHING_SAVED]


def test_key_that_names_an_address_is_not_looked_for():
    class Mark:
        __hash__, __eq__ = object.__hash__, object.__eq__

    assert store_key.key_digest(dataclasses.replace(key(), call=("dict", (Mark(), ("tensor",))))) is None


def test_graph_that_cannot_leave_the_process_is_not_saved(tmp_path):
    here = store(tmp_path)
    assert not here.save(key(), "Block", CPU, CompiledGraph(len, len))
    assert list(tmp_path.iterdir()) == []


def test_least_recently_used_are_deleted_first(tmp_path):
    for number, name in enumerate("abc"):
        save(store(tmp_path), name, data=bytes([number]) * 5000)
        for file in (tmp_path / "graphs").glob(f"{store_key.key_digest(key(name))}*"):
            os.utime(file, (time.time() - 100 + number,) * 2)
    assert load(store(tmp_path), "a") is not None  # used just now
    prune(LocalFolder(tmp_path / "graphs"), 14000)
    assert [load(store(tmp_path), name) is not None for name in "abc"] == [True, False, True]


def test_saving_keeps_the_folder_within_its_bytes(tmp_path):
    small = store(tmp_path, max_bytes=30_000)
    for number in range(33):
        save(small, chr(97 + number % 20) + str(number), data=os.urandom(5000))
        time.sleep(0.002)
    files = list((tmp_path / "graphs").iterdir())
    assert sum(file.stat().st_size for file in files) <= 30_000 + 16 * 6000
    assert load(store(tmp_path), chr(97 + 32 % 20) + "32") is not None


def test_leftovers_of_killed_processes_are_deleted_when_old(tmp_path):
    save(store(tmp_path))
    folder = tmp_path / "graphs"
    for name in ("dead.tmp", "live.tmp", "a" * 24 + "-dead.bin", "a" * 24 + "-live.bin"):
        (folder / name).write_bytes(b"part")
        if "dead" in name:
            os.utime(folder / name, (time.time() - 7200,) * 2)
    prune(LocalFolder(folder), 1 << 20)
    assert not list(folder.glob("*dead*")) and len(list(folder.glob("*live*"))) == 2
    assert load(store(tmp_path)) is not None


def test_budget_of_nothing_saves_nothing(tmp_path):
    assert not save(store(tmp_path, max_bytes=0))
    assert list(tmp_path.iterdir()) == []
