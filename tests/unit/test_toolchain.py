"""What torch needs for compiling, and the command that installs it. Windows and macOS are simulated here."""

import importlib.util
import logging
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.core import toolchain
from comfy_accel.accel.core.fallbacks import Fallbacks
from comfy_accel.accel.core.reasons import Reason

PORTABLE = r"C:\ComfyUI_windows_portable\python_embeded\python.exe"


@pytest.fixture
def system(monkeypatch):
    """From a platform and a torch to a machine where no tool is found."""

    def system(platform, executable=sys.executable, version="2.11.0+cu130", hip=None):
        made = SimpleNamespace(platform=platform, executable=executable, version_info=sys.version_info)
        monkeypatch.setattr(toolchain, "sys", made)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
        for name in ("CXX", "TORCH_INDUCTOR_INSTALL_GXX"):
            monkeypatch.delenv(name, raising=False)

    return system


@pytest.mark.parametrize(
    ("platform", "version", "package"),
    [
        ("win32", "2.10.0+cu128", "triton-windows<3.7"),
        ("win32", "2.11.0+cu130", "triton-windows<3.7"),
        ("linux", "2.12.1", "triton<3.8"),
        ("win32", "2.99.0", "triton-windows"),
    ],
)
def test_missing_triton_is_said_with_the_command_for_this_python_and_this_torch(system, platform, version, package):
    system(platform, PORTABLE, version)
    assert str(toolchain.find_missing("cuda")).endswith(f'installs it: "{PORTABLE}" -m pip install -U "{package}"')


@pytest.mark.parametrize(("device", "hip"), [("cuda", "6.4"), ("xpu", None)])
def test_triton_of_amd_and_intel_comes_with_their_torch(system, device, hip):
    system("linux", hip=hip)
    said = str(toolchain.find_missing(device))
    assert "install torch again from where it came" in said and "pip" not in said


def test_portable_python_without_headers_or_libraries_is_said_before_triton_fails_on_it(system, monkeypatch, tmp_path):
    system("win32", PORTABLE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / name))
    said = str(toolchain.find_missing("cuda"))
    assert str(tmp_path / "include") in said and "include and libs" in said
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    assert str(tmp_path / "libs") in str(toolchain.find_missing("cuda"))
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "python{}{}.lib".format(*sys.version_info)).touch()
    assert toolchain.find_missing("cuda") is None


@pytest.mark.parametrize(
    ("platform", "name", "command"),
    [("win32", "cl", "winget install"), ("darwin", "clang++", "xcode-select --install"), ("linux", "g++", "g++")],
)
def test_missing_cpp_compiler_is_said_with_the_command_of_its_system(system, monkeypatch, platform, name, command):
    system(platform)
    said = str(toolchain.find_missing("cpu"))
    assert f"{name} was not found. Install it: " in said and command in said.partition("it: ")[2]
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: name if name == "dnf" else None)
    assert platform != "linux" or str(toolchain.find_missing("cpu")).endswith(": dnf install gcc-c++")


def test_compiler_in_a_folder_with_spaces_is_found(monkeypatch, tmp_path):
    compiler = tmp_path / "Program Files" / "cl.exe"
    compiler.parent.mkdir()
    compiler.touch(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert toolchain.cpp_compiler() == os.fspath(compiler) and toolchain.find_missing("cpu") is None


def test_tool_that_all_blocks_miss_is_one_line_in_the_log(caplog):
    said = Fallbacks()
    reason = Reason("no_triton", command="pip")
    with caplog.at_level(logging.WARNING):
        for block in ("ResBlock", "SpatialTransformer", "Upsample"):
            said.note(block, reason)
    assert [record.getMessage() for record in caplog.records] == [f"Nothing is compiled: {reason}"]
    assert len(said.rows()) == 3
