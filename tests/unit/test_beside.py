"""Code that is made in a process beside: calls go on without it, and it is what would have been made here."""

import functools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.beside import making
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile import generated_code
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.dispatch.compiled_layers import Host
from comfy_accel.accel.report import log as report_log
from kit import blocks
from kit.code_swaps import flash_attention
from kit.stores import saving


class Block(torch.nn.Module):
    """Norm, matrix and attention over tokens: what reads sizes in many ways."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.linear(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


@pytest.fixture
def process(monkeypatch):
    """A process of the test's own, wherever it runs."""
    own = making._Process()
    monkeypatch.setattr(making, "_process", own)
    monkeypatch.setenv(making.VARIABLE, "1")
    yield own
    own.stop()


@pytest.fixture(scope="module")
def one_for_all():
    one = making._Process()
    yield one
    one.stop()


@pytest.fixture
def shared(process, one_for_all, monkeypatch):
    """A process that tests share which only have it compile: to begin one takes seconds."""
    monkeypatch.setattr(making, "_process", one_for_all)


def inputs(batch, tokens):
    return torch.linspace(-1, 1, batch * tokens * 16).view(batch, tokens, 16)


def runner(block, cache, **settings):
    return blocks.runner(block, cache, backend="inductor", beside=True, **settings)


def wait(cache):
    """Until all code is there, or will never be."""
    pending = [graph.pending for entry in cache.entries() for graph in entry.graphs if graph.pending is not None]
    ends = time.monotonic() + 120
    while not all(one.is_done for one in pending):
        assert time.monotonic() < ends
        time.sleep(0.02)
    return len(pending)


def answers(stand_in, block):
    with torch.inference_mode():
        return [stand_in(block.forward, inputs(*size)) for size in ((2, 6), (1, 6), (3, 9), (2, 1))]


def test_calls_go_on_without_the_code_and_then_run_what_is_compiled_here_bit_for_bit(
    tmp_path, block, shared, one_for_all, monkeypatch, caplog
):
    caplog.set_level("INFO", "accel")
    monkeypatch.setattr(report_log, "_has_begun", True)
    here, there = GraphCache(), saving(tmp_path)
    expected = answers(blocks.runner(block, here, backend="inductor"), block)
    stand_in, x = runner(block, there), inputs(2, 6)
    with torch.inference_mode():
        plain = block(x)
        while_made = stand_in(block.forward, x)
    assert torch.equal(while_made, plain)
    assert [there.statistics()[name] for name in ("compilations", "pending")] == [0, 1]
    said = [re.sub(r"\d+\.\d", "1", message) for message in caplog.messages if "Block in" in message]
    assert said == ["Compiled Block in 1 s.", "Traced Block in 1 s; its code is made beside."]
    caplog.clear()
    assert fallbacks.counts() == {("Block", Reason("compiling_beside")): 1}
    assert wait(there) == 1
    began = subprocess.run(["pgrep", "-P", str(one_for_all._running.pid)], capture_output=True)
    assert began.stdout == b""  # such as torch's pool of compilers, 600 MB
    fallbacks.clear()
    assert all(map(torch.equal, answers(stand_in, block), expected))
    assert fallbacks.rows() == []
    assert there.statistics()["compilations"] == here.statistics()["compilations"] == 1
    assert there.statistics()["pending"] == 0
    assert caplog.messages == ["Block runs compiled from now on."]
    (made,), (saved,) = (entry.graphs for cache in (here, there) for entry in cache.entries())
    assert saved.nbytes and saved.facts.asked and not made.facts.asked
    # What was made beside is saved, and loaded with what it asks of sizes.
    again = saving(tmp_path)
    assert all(map(torch.equal, answers(runner(block, again), block), expected))
    assert again.statistics()["loaded"] == 1 and again.statistics()["compilations"] == 0
    assert [graph.facts.asked for entry in again.entries() for graph in entry.graphs] == [saved.facts.asked]


def test_a_process_that_ends_costs_the_time_to_compile_here(block, process, caplog):
    cache = GraphCache()
    stand_in, x = runner(block, cache), inputs(2, 6)
    with torch.inference_mode():
        assert torch.equal(stand_in(block.forward, x), block(x))
        while process._running is None:
            time.sleep(0.01)
        process.stop()
        wait(cache)
        torch.testing.assert_close(stand_in(block.forward, x), block(x))
        assert stand_in.eager_calls == 1
    (entry,) = cache.entries()
    assert [graph.pending for graph in entry.graphs] == [None]
    assert [
        record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("accel", "WARNING")
    ] == ["Block is compiled while the image waits: EOFError: the process beside has ended, or hung for 600 s"]
    assert process.has_failed and not making.is_possible()


def test_a_graph_that_cannot_be_compiled_there_is_compiled_here(block, process, monkeypatch):
    monkeypatch.setattr(making, "_job_of", lambda graph, device: {"graph": b"", "nothing": None})
    cache = GraphCache()
    stand_in, x = runner(block, cache), inputs(2, 6)
    with torch.inference_mode():
        assert torch.equal(stand_in(block.forward, x), block(x))
        wait(cache)
        torch.testing.assert_close(stand_in(block.forward, x), block(x))
    assert stand_in.eager_calls == 1
    assert not process.has_failed  # the next graph may well be


def test_passes_of_others_are_not_left_out(block, process, monkeypatch):
    from torch._inductor import config

    asked = []
    cache = GraphCache()
    with config.patch(post_grad_custom_post_pass=asked.append), torch.inference_mode():
        x = inputs(2, 6)
        torch.testing.assert_close(runner(block, cache)(block.forward, x), block(x))
    assert asked and process.given == 0


def test_torchs_switches_are_as_here(block, shared):
    x, cache = inputs(2, 6), GraphCache()
    with flash_attention(False), generated_code.collect_modules() as modules, torch.inference_mode():
        for _ in range(2):
            runner(block, cache)(block.forward, x)
            wait(cache)
    assert modules and not any("flash_attention" in Path(module.__file__).read_text() for module in modules)


def test_code_is_saved_for_torch_as_it_was_set_when_it_was_sent(tmp_path, block, shared):
    own, x, loaded = torch.backends.cuda.flash_sdp_enabled(), inputs(2, 6), []
    with torch.inference_mode():
        cache = saving(tmp_path)
        stand_in = runner(block, cache)
        stand_in(block.forward, x)
        with flash_attention(not own):
            wait(cache)
            stand_in(block.forward, x)
        for is_on in (not own, own):
            again = saving(tmp_path)
            with flash_attention(is_on):
                blocks.runner(block, again, backend="inductor")(block.forward, x)
            loaded.append(again.statistics()["loaded"])
    assert loaded == [0, 1]


def test_how_torch_is_set_otherwise_keeps_graphs_here(block, process):
    own = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        stand_in = runner(block, GraphCache())
        with torch.inference_mode():
            torch.testing.assert_close(stand_in(block.forward, inputs(2, 6).float()), block(inputs(2, 6).float()))
    finally:
        torch.set_default_dtype(own)
    assert stand_in.eager_calls == 0 and process.given == 0


def test_who_asked_for_no_code_beside_waits_for_what_somebody_else_has_begun(block, shared):
    cache, x = GraphCache(), inputs(2, 6)
    with torch.inference_mode():
        runner(block, cache)(block.forward, x)
        waiting = blocks.runner(block, cache, backend="inductor")
        torch.testing.assert_close(waiting(block.forward, x), block(x))
    assert waiting.eager_calls == 0 and cache.statistics()["compilations"] == 1


def test_who_waits_for_code_can_cancel(block, process, monkeypatch):
    """For who warms up a model whose code another image has begun."""
    monkeypatch.setattr(process, "_send", lambda job: time.sleep(600))
    cache, x = GraphCache(), inputs(2, 6)
    runner(block, cache)(block.forward, x)
    host = Host(interrupts=(blocks.Stop,), ask=blocks.raising(blocks.Stop))
    layers = blocks.layers_of(blocks.model_of(block), cache, host, backend="inductor")
    with pytest.raises(blocks.Stop):
        layers[block](block.forward, x)


def test_the_image_that_takes_code_does_not_wait_for_what_the_processor_can_do(block, process, monkeypatch):
    """For a CPU device: inductor builds and runs a program for each kind of vector, once in each process."""
    from torch._inductor import cpu_vec_isa

    own, asked = functools.cache(cpu_vec_isa.valid_vec_isa_list.__wrapped__), []

    @functools.cache
    def valid_vec_isa_list():
        asked.append(threading.current_thread().name)
        return own()

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", valid_vec_isa_list)
    cache = GraphCache()
    runner(block, cache)(block.forward, inputs(2, 6))
    assert wait(cache) == 1
    runner(block, cache)(block.forward, inputs(2, 6))
    assert asked == ["accel-beside"] and cache.statistics()["pending"] == 0


def test_code_counts_once_it_is_there(block, shared):
    cache = GraphCache()
    runner(block, cache)(block.forward, inputs(2, 6))
    wait(cache)
    runner(block, cache)(block.forward, inputs(2, 6))
    made = cache.statistics()["bytes"]
    tight, other = GraphCache(max_bytes=made + made // 2), Block().double().requires_grad_(False)
    for one, x in ((block, inputs(2, 6)), (other, inputs(2, 6).double())):
        for _ in range(2):
            runner(one, tight)(one.forward, x)
            wait(tight)
    assert 0 < tight.statistics()["bytes"] <= tight.max_bytes


@pytest.fixture
def machine(process, monkeypatch, tmp_path):
    """Becomes one of so many cores and GB of free memory, in no container."""

    def become(cores, free):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        memory = SimpleNamespace(available=free << 30)
        monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(virtual_memory=lambda: memory))

    monkeypatch.delenv(making.VARIABLE)
    monkeypatch.setattr(making, "Path", {"/sys/fs/cgroup": tmp_path, "/proc/self/cgroup": tmp_path / "own"}.get)
    become(8, 64)
    return become


def test_it_needs_a_core_and_memory_of_its_own(machine, process, monkeypatch):
    for cores, free, is_possible in [(1, 64, False), (2, 64, True), (4, 2, False), (4, 3, True)]:
        machine(cores, free)
        assert making.is_possible() is is_possible
    machine(4, 2)
    with monkeypatch.context() as begun:
        begun.setattr(process, "_running", object())  # it has what it needs
        assert making.is_possible()
    monkeypatch.setenv(making.VARIABLE, "0")
    assert not making.is_possible()


def test_it_is_off_on_windows_until_a_machine_has_run_it_there(machine, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert not making.is_possible()
    monkeypatch.setenv(making.VARIABLE, "1")
    assert making.is_possible()


TOLD, OLDER = "anon 1073741824\nfile 999999999999\n", "rss 5\ntotal_rss 1073741824\ntotal_cache 999999999999\n"
CONTAINERS = {
    "second version": ("0::/", "", []),
    "second version, of a job": ("0::/jobs/7", "jobs", []),
    "first version": ("5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n1:name=systemd:/\n0::/", "memory", ["cpu,cpuacct"]),
}


@pytest.mark.parametrize(
    "cores, gigabytes, is_possible", [("0.5", 9, False), ("2", 2, False), ("2", 4, True), (None, None, True)]
)
@pytest.mark.parametrize("how", CONTAINERS)
def test_limits_of_a_container_are_those_of_its_machine(how, cores, gigabytes, is_possible, machine, tmp_path):
    """For Docker, Kubernetes and clusters, whose programs see all of the machine's cores and memory."""
    own, folder, of_cores = CONTAINERS[how]
    (tmp_path / "own").write_text(own)
    for name in (folder, *of_cores):
        (tmp_path / name).mkdir(exist_ok=True)
    quota, limit = str(int(float(cores or 0) * 100000)), str((gigabytes or 0) << 30)
    if of_cores:
        (tmp_path / of_cores[0] / "cpu.cfs_quota_us").write_text(quota if cores else "-1")
        (tmp_path / of_cores[0] / "cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / folder / "memory.limit_in_bytes").write_text(limit if cores else str((1 << 63) - 4096))
    else:
        (tmp_path / folder / "cpu.max").write_text(f"{quota if cores else 'max'} 100000\n")
        (tmp_path / folder / "memory.max").write_text(f"{limit if cores else 'max'}\n")
    (tmp_path / folder / "memory.stat").write_text(OLDER if of_cores else TOLD)
    assert making.is_possible() is is_possible


def test_it_ends_when_idle_and_begins_again(process, monkeypatch):
    monkeypatch.setattr(making, "IDLE", 0.1)
    for _ in range(2):
        assert "nothing" in process.ask({"nothing": None}).result(60)
        ends = time.monotonic() + 30
        while process._running is not None:
            assert time.monotonic() < ends
            time.sleep(0.02)
    assert making.progress() == (1, 1)


STARTS_A_PROGRAM = """
import subprocess, sys
shown = "import os, stat, sys\\nfor fd in range(64):\\n try: stat.S_ISFIFO(os.fstat(fd).st_mode) and print(fd)\\n"
shown += " except OSError: pass\\nprint(repr(sys.stdin.read()))"
with open({said!r}, "w") as said:
    subprocess.run([sys.executable, "-c", shown], stdout=said, close_fds=False, timeout=60)
"""


def test_what_it_starts_inherits_no_pipe_that_somebody_reads(tmp_path, block, process, monkeypatch):
    """For Windows, where a compiler that inherits one waits before its first line, for good."""
    (tmp_path / "starts_a_program.py").write_text(STARTS_A_PROGRAM.format(said=str(tmp_path / "said")))
    monkeypatch.syspath_prepend(tmp_path)
    job_of = making._job_of
    monkeypatch.setattr(making, "_job_of", lambda *given: {**job_of(*given), "libraries": {"starts_a_program"}})
    cache = GraphCache()
    runner(block, cache)(block.forward, inputs(2, 6))
    assert wait(cache) == 1
    assert (tmp_path / "said").read_text() == "''\n"


@pytest.mark.parametrize("said", ["hello\\n", "Booting"], ids=["a line", "the start of a pickle"])
def test_what_python_prints_while_it_starts_is_no_answer(said, tmp_path, process, monkeypatch):
    """For installations whose .pth files, or whose torch's backends, print something."""
    (tmp_path / "sitecustomize.py").write_text(f"import os; os.write(1, b'{said}'); print('more')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "nothing" in process.ask({"nothing": None}).result(60)
    assert "nothing" in process.ask({"nothing": None}).result(60)


@pytest.mark.skipif(not hasattr(os, "nice"), reason="priorities are POSIX's")
@pytest.mark.parametrize("load, lower", [(0.5, 5), (3.5, 0)], ids=["a core is free", "busy"])
def test_it_has_a_lower_priority_where_a_core_is_free(load, lower, tmp_path, process, monkeypatch):
    """For busy machines, on which it would be ready when the images are made."""
    told = f"import os; os.cpu_count = lambda: 4; os.getloadavg = lambda: ({load}, 9, 9)"
    (tmp_path / "sitecustomize.py").write_text(told)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process.ask({"nothing": None}).result(60)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process._running.pid) == min(own + lower, 19)


def test_nothing_is_imported_from_the_folder_that_comfyui_was_started_in(tmp_path, process, monkeypatch):
    """For who starts it in a folder of downloads."""
    (tmp_path / "pickle.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert "nothing" in process.ask({"nothing": None}).result(60)
    assert not (tmp_path / "ran").exists()


def test_a_process_that_hangs_is_stopped_and_another_begins_minutes_later(block, process, monkeypatch, caplog):
    """For any machine on which something that it starts never ends."""
    begin, hangs = making._begin, [sys.executable, "-c", "import time; time.sleep(600)"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    monkeypatch.setattr(making, "_begin", lambda: subprocess.Popen(hangs, **pipes))
    monkeypatch.setattr(making, "LIMIT", 1.0)
    cache = GraphCache()
    stand_in, x = runner(block, cache), inputs(2, 6)
    with torch.inference_mode():
        stand_in(block.forward, x)
        assert process.ask({}).exception(60)  # what waits behind it waits no longer
        torch.testing.assert_close(stand_in(block.forward, x), block(x))
    assert "the process beside has ended, or hung for 1 s" in caplog.text
    assert process.has_failed and not making.is_possible() and process._running is None
    for name, value in {"LIMIT": 600.0, "_begin": begin}.items():
        monkeypatch.setattr(making, name, value)
    now = time.monotonic()
    assert now + making.AGAIN - 60 < process._again <= now + making.AGAIN < now + process._pause
    monkeypatch.setattr(process, "_again", now)
    assert making.is_possible()
    assert "nothing" in process.ask({"nothing": None}).result(60)


BEGINS_AND_ENDS = """
import os, sys, time, torch
sys.path[:0] = {path!r}
from dev.tools import pack
pack.load()
from comfy_accel.accel.beside import making
making._process.ask({{"nothing": None}}).result()
print(making._process._running.pid, flush=True)
names = "graph", "device", "sources", "libraries", "settings", "threads", "environment"
job = dict.fromkeys(names) | {{"libraries": ["compiles"], "environment": {{}}, "threads": 1}}
{begin}
answer = making._process.ask(job | {{"switches": making.switches.read_switches()}})
while not os.path.exists({started!r}):
    time.sleep(0.1)
{end}
"""
COMPILES = """
import pathlib, subprocess, time
started = subprocess.Popen(["sh", "-c", "sleep 600 & echo $$ $! > {started}.new; mv {started}.new {started}; wait"])
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="asks for a process by its number as POSIX does")
@pytest.mark.parametrize(
    "begin, end",
    [
        ("", "sys.exit()"),
        ("", "os.kill(os.getpid(), 9)"),
        ("making.LIMIT = 5.0; making._process._longest = 0.0", "answer.exception(); os._exit(0)"),
    ],
    ids=["exit", "killed", "hung"],
)
def test_it_and_the_compilers_that_it_runs_end_with_the_process_that_began_it_and_when_stopped(begin, end, tmp_path):
    """For who ends ComfyUI in the middle of a compilation, which would go on for minutes, or for good."""
    started = tmp_path / "started"
    (tmp_path / "compiles.py").write_text(COMPILES.format(started=started))
    path = [str(blocks.ROOT), str(blocks.ROOT / "tests"), str(tmp_path)]
    program = BEGINS_AND_ENDS.format(path=path, started=str(started), begin=begin, end=end)
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120)
    running, ends = {told.stdout.strip(), *started.read_text().split()}, time.monotonic() + 30
    assert len(running) == 3
    while running and time.monotonic() < ends:
        asked = ["ps", "-o", "pid=,stat=", "-p", ",".join(running)]
        rows = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
        running = {pid for pid, state in map(str.split, rows) if not state.startswith("Z")}
        time.sleep(0.1)
    assert not running


def test_images_that_go_without_code_for_minutes_are_told_of_once(block, process, monkeypatch, caplog):
    """For machines too busy, or too slow, for the process to get anywhere."""
    caplog.set_level("INFO", "accel")
    monkeypatch.setattr(process, "_send", lambda job: time.sleep(600))
    cache, x = GraphCache(), inputs(2, 6)
    stand_in = runner(block, cache)
    stand_in(block.forward, x)
    assert "uncompiled until" not in caplog.text
    monkeypatch.setattr(process, "began", process.began - making.LATE)
    caplog.clear()
    for _ in range(3):
        stand_in(block.forward, x)
    assert caplog.messages == [
        "The code of 1 of 1 graphs is not ready after 5 minutes; images run uncompiled until it is. If it never is, "
        "set ACCEL_COMPILE_BESIDE=0 in the environment and start again: images then wait for it."
    ]
