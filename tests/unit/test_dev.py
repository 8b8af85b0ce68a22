"""dev.py without its environment: arguments, and the one sentence that every failure ends in."""

import ast
import errno
import runpy
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from dev import ROOT, Problem, main
from dev.tools import command
from dev.tools.comfyui import PACK_NAME, make_base, offer_checkpoint, offer_models, tree


@pytest.fixture
def venv(monkeypatch, tmp_path):
    """A .venv with an interpreter, and the list of what is installed into it."""
    monkeypatch.setattr(main, "VENV", tmp_path)
    python = tmp_path / ("Scripts/python.exe" if main.os.name == "nt" else "bin/python")
    python.parent.mkdir()
    python.touch()
    installed = []
    monkeypatch.setattr(main, "install", lambda python, arguments: installed.append(arguments))
    return installed


# Arguments


def test_paths_are_meant_from_the_current_folder_and_what_follows_is_passed_on(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").touch()
    _, passed_on = main.parse(["demo", "--checkpoint", "model.safetensors", "--json", "demo.json"])
    assert passed_on == ["--checkpoint", str(tmp_path / "model.safetensors"), "--json", str(tmp_path / "demo.json")]
    given = ["-k", "cache and not slow", "--steps", "3"]
    assert main.parse(["bench", "demo", *given])[1] == main.parse(["test", *given])[1] == given


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "speed"], "no measurement speed: choose one of .*demo"),
        (["demo", "--size", "64"], "does not know --size"),
        (["serve", "--models", "nowhere"], "nowhere does not exist"),
        (["serve", "--port", "abc"], "^Argument --port: invalid int value"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_begun(arguments, said):
    with pytest.raises(Problem, match=said):
        main.parse(arguments)


# Python and environment


def test_old_python_can_read_dev_py_and_is_told_what_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match="needs Python 3.10 or newer"):
        runpy.run_path(str(ROOT / "dev.py"))
    ast.parse((ROOT / "dev.py").read_text(encoding="utf-8"), feature_version=(3, 6))


def test_only_changed_requirements_are_installed_again(venv, tmp_path):
    requirements = tmp_path / "bench" / "requirements.txt"
    requirements.parent.mkdir()
    for text, calls in (("one==1", 2), ("one==1", 2), ("one==2", 4)):
        requirements.write_text(text)
        main.own_python([requirements])
        assert len(venv) == calls


def test_what_is_named_and_is_not_there_is_said(tmp_path, monkeypatch):
    with pytest.raises(Problem, match="no-such-python is not a program"):
        main.foreign_python("no-such-python")
    with pytest.raises(Problem, match="no ComfyUI at"):
        main.find_comfyui(sys.executable, str(tmp_path))
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(Problem, match="No ComfyUI at"):
        tree()
    with pytest.raises(Problem, match="No file"):
        offer_checkpoint(tmp_path, tmp_path / "none.safetensors")


# How commands end


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (Problem("Do this."), "Do this."),
        (OSError(errno.ENOSPC, "No space left on device"), "The disk is full"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.json"), "No such file or directory: x.json"),
        (KeyboardInterrupt(), "Stopped."),
        (KeyError("rows"), "A mistake of ours, KeyError: 'rows'."),
    ],
)
def test_failure_ends_in_one_sentence_and_1(error, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "WORK", tmp_path)
    assert command.run(Mock(side_effect=error)) == 1
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert said.count("\n") == 1


# The base directory


def test_base_shows_the_pack_and_removing_it_leaves_the_pack(tmp_path):
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "__init__.py").write_text("# here")
    for _ in range(2):  # The second time over an existing link.
        base = make_base(tmp_path / "base", pack)
        assert (base / "custom_nodes" / PACK_NAME / "__init__.py").read_text() == "# here"
    make_base(tmp_path / "base", ROOT)
    assert (pack / "__init__.py").is_file()


@pytest.mark.parametrize("named", ["", "models"])
def test_models_of_another_comfyui_are_offered_by_kind(tmp_path, named):
    (tmp_path / "models" / "loras").mkdir(parents=True)
    config = offer_models(tmp_path / "base", tmp_path / named).read_text()
    assert '"loras": "loras"' in config
