"""What `doctor` says of a machine, in sentences for its owner."""

import sys
import types

import pytest
import torch
from comfy_accel.accel.core import toolchain
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.hosts.comfyui import doctor


@pytest.fixture
def card(monkeypatch):
    """Makes the machine one with an NVIDIA card."""

    def made(capability=(8, 6), allocator="native"):
        major, minor = capability
        properties = types.SimpleNamespace(name="RTX", major=major, minor=minor, total_memory=24 << 30)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
        monkeypatch.setattr(toolchain, "lacking", lambda device: None)
        monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")

    return made


def told():
    return dict(line.split(": ", 1) for line in doctor.lines())


def test_machine_without_a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(toolchain, "lacking", lambda device: None)
    said = told()
    assert said["Device"] == "none but the CPU" and said["CUDA graphs"] == "no, they are NVIDIA's"
    assert said["Compiling"].startswith("yes") and said["DeepCache"] == "works everywhere"


def test_what_is_missing_and_what_to_do_come_before_all_else_of_compiling(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(toolchain, "lacking", lambda device: Reason("no_triton", command="pip install triton"))
    said = told()
    assert said["Compiling"].startswith("no: ") and "pip install triton" in said["Compiling"]
    assert "After a restart" not in said


@pytest.mark.parametrize(("capability", "casts"), [((8, 6), True), ((8, 9), False), ((12, 0), False)])
def test_cards_below_8_9_cast_fp8_in_pytorch(card, capability, casts):
    card(capability)
    said = told()
    assert said["Device"] == f"RTX, capability {capability[0]}.{capability[1]}, 24 GB"
    assert ("cast by PyTorch" in said["Stored weights"]) == casts


@pytest.mark.parametrize(("allocator", "word"), [("cudaMallocAsync", "no: start ComfyUI with"), ("native", "yes")])
def test_allocator_decides_about_cuda_graphs(card, allocator, word):
    card(allocator=allocator)
    assert told()["CUDA graphs"].startswith(word)


def test_attention_of_a_loaded_core_is_named(monkeypatch):
    core = types.SimpleNamespace(attention_pytorch=lambda: None, attention_basic=None)
    core.optimized_attention = core.attention_pytorch
    monkeypatch.setitem(sys.modules, "comfy.ldm.modules.attention", core)
    assert told()["Attention"] == "compiled with the blocks"

    def attention_sage():
        pass

    core.optimized_attention = attention_sage
    assert told()["Attention"] == "attention_sage, called from compiled blocks; no CUDA graphs with it"
