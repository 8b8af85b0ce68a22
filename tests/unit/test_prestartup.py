"""The script that ComfyUI runs before it imports torch, alone, beside stand-ins for core's modules of that moment."""

import ast
import importlib
import logging
import os
import runpy
import sys
import tracemalloc
import types

import pytest
from comfy_accel.accel.hosts.comfyui.server import allocator

from dev import ROOT

CONF = "PYTORCH_CUDA_ALLOC_CONF"
CORES = "backend:cudaMallocAsync"
EARLY, LATE = "early core", "late core"
"""When core chooses the allocator: before the script runs (0.33), or after (0.3.75)."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs the script in ComfyUI's place; gives core's arguments and the configuration that torch would be given."""
    home = tmp_path / "user" / "__accel"
    home.mkdir(parents=True)

    def started(
        when,
        *flags,
        kept='{"cuda_graphs": "on"}',
        conf=None,
        torch="2.11.0+cu128",
        loads_torch=False,
        times=1,
        **environment,
    ):
        for name, value in {CONF: conf, "PYTORCH_ALLOC_CONF": None, "ACCEL_CUDA_GRAPHS": None, **environment}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        if kept is not None:
            (home / "preferences.json").write_text(kept)
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").touch()
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{torch}'\n")
        given = {"cpu": "--cpu", "cuda_malloc": "--cuda-mal", "disable_cuda_malloc": "--disable-cuda-malloc"}
        args = types.SimpleNamespace(**{name: flag in " ".join(flags) for name, flag in given.items()})
        core = {"comfy.cli_args": types.SimpleNamespace(args=args)}
        core["folder_paths"] = types.SimpleNamespace(get_user_directory=lambda: str(tmp_path / "user"))
        if when == EARLY:
            core["cuda_malloc"] = types.SimpleNamespace()
            args.cuda_malloc = "+cu" in torch and not args.disable_cuda_malloc
            if args.cuda_malloc:
                monkeypatch.setenv(CONF, CORES if conf is None else f"{conf},{CORES}")
        with monkeypatch.context() as patched:
            for name in ("torch", "cuda_malloc"):
                patched.delitem(sys.modules, name, raising=False)
            for name, module in core.items():
                patched.setitem(sys.modules, name, module)
            patched.setattr(sys, "argv", ["main.py", *flags])
            patched.syspath_prepend(str(tmp_path))
            if loads_torch:
                importlib.import_module("torch")
            for _ in range(times):
                runpy.run_path(str(ROOT / "prestartup_script.py"))
        return args, os.environ.get(CONF)

    return started


def chosen(when, args, conf):
    """The backend that torch gets: core adds its own where it has not been told otherwise."""
    backends = [part for part in (conf or "").split(",") if part.startswith("backend:")]
    if when == LATE and not args.disable_cuda_malloc:
        backends.append(CORES)
    return backends[-1] if backends else "backend:native"


both = pytest.mark.parametrize("when", [EARLY, LATE])


@both
@pytest.mark.parametrize("kept", [None, "{}", '{"cuda_graphs": "ask"}', '{"cuda_graphs": "off"}'])
def test_nothing_is_changed_unasked(start, when, kept):
    args, conf = start(when, kept=kept)
    assert chosen(when, args, conf) == CORES and args.accel_allocator is None
    assert args.cuda_malloc == (when == EARLY) and not args.disable_cuda_malloc


@both
@pytest.mark.parametrize("conf", [None, "max_split_size_mb:512"])
@pytest.mark.parametrize("flags", [(), ("--windows-standalone-build",)])
def test_turned_on_torch_gets_its_own_and_the_rest_of_the_configuration_stays(start, when, conf, flags):
    args, now = start(when, *flags, conf=conf)
    assert chosen(when, args, now) == "backend:native" and now == conf
    assert (args.accel_allocator, args.cuda_malloc) == ("native", False)


@both
def test_the_environment_counts_in_place_of_the_setting(start, when):
    assert start(when, ACCEL_CUDA_GRAPHS="off")[0].accel_allocator is None
    assert start(when, kept=None, ACCEL_CUDA_GRAPHS="On")[0].accel_allocator == "native"


@pytest.mark.parametrize(("on", "off"), [("on", "off"), ("1", "0"), ("true", "false"), ("YES", "No"), (" On ", "OFF")])
def test_words_for_on_and_off_are_those_of_the_running_pack(start, on, off, caplog):
    assert start(EARLY, ACCEL_CUDA_GRAPHS=off)[0].accel_allocator is None and allocator.read_environment() == "off"
    assert (
        start(EARLY, kept="{}", ACCEL_CUDA_GRAPHS=on)[0].accel_allocator == "native"
        and allocator.read_environment() == "on"
    )
    assert caplog.text == ""
    assert (
        start(EARLY, ACCEL_CUDA_GRAPHS=on + "?")[0].accel_allocator == "native" and allocator.read_environment() is None
    )
    assert caplog.messages == ["Accel: ACCEL_CUDA_GRAPHS is neither on nor off: it counts as not set."]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files on this system")
def test_settings_that_are_a_pipe_or_have_no_end_are_not_waited_for(start, tmp_path, caplog):
    kept = tmp_path / "user" / "__accel" / "preferences.json"
    os.mkfifo(kept)
    assert start(EARLY, kept=None)[0].accel_allocator is None
    kept.unlink()
    with kept.open("wb") as file:
        file.truncate(300 << 20)
    tracemalloc.start()
    assert start(EARLY, kept=None)[0].accel_allocator == "failed" and "left as it is" in caplog.text
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


OTHERS = "backend:another"


@both
@pytest.mark.parametrize(
    ("flags", "changes", "said"),
    [
        (("--cuda-malloc",), {}, "flag"),
        (("--cuda-mal",), {}, "flag"),
        (("--cpu",), {}, None),
        (("--disable-cuda-malloc",), {}, None),
        ((), {"torch": "2.11.0+rocm6.4"}, None),
        ((), {"torch": "2.11.0+cpu"}, None),
        ((), {"conf": OTHERS}, "configuration"),
        ((), {"conf": f"max_split_size_mb:64, {OTHERS}"}, "configuration"),
        ((), {"PYTORCH_ALLOC_CONF": OTHERS}, "configuration"),
    ],
)
def test_what_somebody_else_chose_stays(start, when, flags, changes, said, caplog):
    """What stands in the way is known before anybody turns CUDA graphs on, so nobody is offered them in vain."""
    plain, before = start(when, *flags, kept=None, **changes)
    assert plain.accel_allocator == said and caplog.text == ""
    args, now = start(when, *flags, **changes)
    assert args == plain and now == before
    assert len(caplog.records) == (said is not None)


@both
@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"conf": CORES}, None),
        ({"conf": f"{CORES},{CORES}, max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"conf": "backend:native"}, None),
        ({"conf": "backend : cudaMallocAsync"}, None),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_what_a_restart_has_left_of_cores_choice_is_not_a_persons(start, when, changes, left):
    """Manager restarts ComfyUI in its place, and it inherits what it had written into its environment."""
    args, now = start(when, **changes)
    assert chosen(when, args, now) == "backend:native" and now == left
    assert args.accel_allocator == "native"


def test_another_copy_of_the_pack_changes_nothing_more(start, caplog):
    with caplog.at_level(logging.INFO):
        args, now = start(EARLY, times=2)
    assert (args.accel_allocator, now, len(caplog.records)) == ("native", None, 1)


def test_torch_that_is_there_already_finds_the_environment_that_it_was_imported_with(start):
    args, now = start(EARLY, loads_torch=True)
    assert (args.accel_allocator, args.cuda_malloc, now) == ("torch_loaded", True, CORES)
    args, now = start(LATE, loads_torch=True)
    assert (args.accel_allocator, args.disable_cuda_malloc, now) == ("native", True, None)


@both
@pytest.mark.parametrize("kept", ["{", "[]", "\x00"])
def test_damaged_settings_are_one_line_and_change_nothing(start, when, kept, caplog):
    with caplog.at_level(logging.INFO):
        args, conf = start(when, kept=kept)
    assert chosen(when, args, conf) == CORES and args.accel_allocator == "failed"
    assert len(caplog.records) == 1 and "left as it is" in caplog.text


def test_it_imports_nothing_but_the_standard_library_and_what_core_has_imported():
    tree = ast.parse((ROOT / "prestartup_script.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert own == {"comfy.cli_args", "folder_paths"}
