"""What `doctor` says of a machine, in sentences for its owner."""

import sys
import types

import pytest
import torch
from comfy_accel.accel import __main__
from comfy_accel.accel.core import toolchain
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.core.settings import Settings
from comfy_accel.accel.hosts import doctor
from comfy_accel.accel.hosts.comfyui import hints


@pytest.fixture
def card(monkeypatch):
    """Makes the machine one with an NVIDIA card."""

    def made(allocator="native"):
        properties = types.SimpleNamespace(name="RTX", major=8, minor=6, total_memory=24 << 30)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
        monkeypatch.setattr(toolchain, "find_missing", lambda device: None)
        monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")

    return made


def told():
    return {name: str(said) for name, said in doctor.parts()}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("python_embeded/python.exe", "python_embeded/python.exe accel/__main__.py doctor"),
        ("ComfyUI/.venv/bin/python", "../../.venv/bin/python accel/__main__.py doctor"),
        (None, "PATH_TO_ITS_PYTHON accel/__main__.py doctor"),
    ],
)
def test_python_without_torch_names_the_one_to_use(monkeypatch, tmp_path, capsys, there, said):
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "comfy-accel"
    for made in filter(None, (there and (tmp_path / there).parent, pack)):
        made.mkdir(parents=True, exist_ok=True)
    if there is not None:
        (tmp_path / there).touch()
    monkeypatch.setattr(__main__, "_PACK", str(pack))
    monkeypatch.setattr(__main__.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["accel", "doctor"])
    assert __main__.main() == 1
    assert said in capsys.readouterr().err.replace("\\", "/")


def test_machine_without_a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(toolchain, "find_missing", lambda device: None)
    said = told()
    assert said["Device"] == "CPU only" and said["CUDA graphs"].startswith("no: they need")
    assert said["Compiling"].startswith("yes")


def test_what_is_missing_and_what_to_do_come_before_all_else_of_compiling(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(toolchain, "find_missing", lambda device: Reason("no_triton", command="pip install triton"))
    said = told()
    assert said["Compiling"].startswith("no: ") and "pip install triton" in said["Compiling"]


def test_card_is_named_with_what_it_can(card):
    card()
    assert told()["Device"] == "RTX, capability 8.6, 24 GB" and "3.6.0" in told()["Compiling"]


@pytest.fixture
def graphs(card, monkeypatch, tmp_path):
    """What it says of CUDA graphs. did: by the script at the start; ... outside of ComfyUI. kept: the setting."""

    def said(allocator, did=None, kept="ask", named=None):
        card(allocator=allocator)
        monkeypatch.delenv("ACCEL_CUDA_GRAPHS", raising=False)
        if named:
            monkeypatch.setenv("ACCEL_CUDA_GRAPHS", named)
        args = None if did is ... else types.SimpleNamespace(args=types.SimpleNamespace(cpu=False, accel_allocator=did))
        monkeypatch.setitem(sys.modules, "comfy.cli_args", args)
        monkeypatch.setattr(doctor.allocator.preferences, "current", lambda: Settings(cuda_graphs=kept))
        return told()["CUDA graphs"]

    return said


def test_allocator_and_choice_decide_about_cuda_graphs(graphs):
    assert graphs("native") == "yes: torch uses its own allocator, as ComfyUI was started"
    assert graphs("native", did="native", kept="on") == "on"
    assert graphs("native", did="native", kept="off") == "changed: restart ComfyUI"
    turn_on = "off: turn them on in the Accel tab, or set ACCEL_CUDA_GRAPHS=on, then restart ComfyUI"
    assert graphs("cudaMallocAsync") == graphs("cudaMallocAsync", kept="on", named="off") == turn_on
    assert graphs("cudaMallocAsync", kept="on") == "changed: restart ComfyUI"
    for did in ("flag", "configuration", "torch_loaded", "failed"):
        assert "has chosen another allocator" in graphs("cudaMallocAsync", did=did, kept="on")
    assert graphs("native", did=..., kept="on").startswith("yes, where they are turned on")


def test_only_who_has_not_chosen_is_offered_cuda_graphs(graphs):
    asked = []
    for how in ({}, {"kept": "off"}, {"kept": "on"}, {"named": "off"}, {"did": "flag"}):
        graphs("cudaMallocAsync", **how)
        asked.append(doctor.allocator.is_offered())
    assert asked == [True, False, False, False, False]
    graphs("native")
    assert not doctor.allocator.is_offered()


def test_attention_of_a_loaded_core_is_named(monkeypatch):
    core = types.SimpleNamespace(attention_pytorch=lambda: None, attention_basic=None)
    core.optimized_attention = core.attention_pytorch
    monkeypatch.setitem(sys.modules, "comfy.ldm.modules.attention", core)
    assert told()["Attention"] == "compiled with the blocks"

    def attention_sage():
        pass

    core.optimized_attention = attention_sage
    assert told()["Attention"] == "attention_sage, called from compiled blocks; no CUDA graphs with it"


@pytest.fixture
def hinted(monkeypatch):
    """What a stand-in for a machine is told, by part. loaded: dtype and class of each model's weight."""

    def said(capability=(12, 0), function="attention_pytorch", installed=(), loaded=(), hip=None, cpu=False, given=()):
        core = types.SimpleNamespace(optimized_attention=types.SimpleNamespace(__name__=function))
        models = []
        for dtype, cls in loaded:
            weight = torch.empty(1 << 32, dtype=dtype, device="meta").as_subclass(cls)  # of no memory
            (base := types.SimpleNamespace(diffusion_model=torch.nn.Module())).diffusion_model._parameters["a"] = weight
            models.append(types.SimpleNamespace(model=types.SimpleNamespace(model=base)))
        monkeypatch.setitem(sys.modules, "comfy.ldm.modules.attention", core)
        monkeypatch.setitem(sys.modules, "comfy.model_management", types.SimpleNamespace(current_loaded_models=models))
        monkeypatch.setitem(sys.modules, "comfy.cli_args", types.SimpleNamespace(args=types.SimpleNamespace(cpu=cpu)))
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(hints.importlib.util, "find_spec", lambda name: name if name in installed else None)
        monkeypatch.setattr(hints.attention, "overrides", set(given))
        return {name: reason.code for name, reason in hints.find_hints()}

    return said


def test_attention_that_could_be_faster_is_hinted_at_once_where_nobody_has_chosen(hinted):
    assert hinted() == {"Faster attention": "sage_missing"}
    assert hinted(installed=("sageattention", "flash_attn")) == {"Faster attention": "sage_unused"}
    assert hinted(installed=("flash_attn",)) == {"Faster attention": "flash_unused"}
    chosen = {"function": "attention_sage"}, {"given": ("attention_override_sage",)}
    assert not any(hinted(**how) for how in (*chosen, {"capability": (7, 5)}, {"hip": "6.4"}, {"cpu": True}))


def test_fewer_bits_are_hinted_at_where_the_card_has_them_and_the_weights_do_not(hinted):
    whole, packed = (torch.bfloat16, torch.Tensor), (torch.bfloat16, type("Packed", (torch.Tensor,), {}))
    said = [hinted(at, loaded=[whole]).get("Fewer bits") for at in ((8, 6), (8, 9), (9, 0), (12, 0))]
    assert said == [None, "bits_fp8", "bits_fp8", "bits_fp4"]
    assert "Fewer bits" not in hinted(loaded=[packed, (torch.float8_e4m3fn, torch.Tensor), (torch.float, torch.Tensor)])
