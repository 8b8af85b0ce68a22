"""What CUDA paths do on the host, on a made-up device: tests/fakecuda, in processes of their own that load it.

No GPU is here, and no time is measured.
"""

import ast
import os
import subprocess
import sys

import pytest
from kit import made_up_device

from dev import PYTEST, ROOT
from dev.tools.comfyui import tree

WITHOUT_VALUES = "-p", "kit.made_up_device.without_values"


@pytest.fixture(scope="session")
def device(tmp_path_factory):
    """The environment of a process with the device."""
    try:
        folder = made_up_device.build(tmp_path_factory.mktemp("made_up_device"))
    except made_up_device.Unavailable as why:
        pytest.skip(f"there can be no made-up device: {why}")
    compiled = {
        name: str(folder / name.split("_")[0].lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    return {**os.environ, "OMP_NUM_THREADS": "1", **compiled, **made_up_device.environment(folder)}


def passes(environment: dict[str, str], *arguments: str) -> str:
    """The output of the named tests, which pass in a process with the device; none is skipped."""
    arguments = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", *WITHOUT_VALUES, *arguments)
    paths = os.pathsep.join(filter(None, [str(ROOT / "tests"), environment.get("PYTHONPATH")]))
    child = subprocess.run(
        [sys.executable, "-c", PYTEST, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "skipped" not in child.stdout, child.stdout[-2000:]
    return child.stdout


NEED_A_CARD = tuple(
    str(file.relative_to(ROOT))
    for file in sorted((ROOT / "tests").rglob("test_*.py"))
    if "pytest.mark." + "gpu" in file.read_text(encoding="utf-8")
)
"""Files with tests that are marked `gpu`."""

FP8, GROUP_NORMS = "tests/fakecuda/test_fp8.py", "tests/fakecuda/test_group_norm_graphs.py"
CAPTURES = (*NEED_A_CARD, "tests/fakecuda/test_capture.py")


def test_captures_and_all_tests_that_need_a_card_pass_but_for_values(device):
    assert NEED_A_CARD == ("tests/unit/test_capture_cuda.py",)
    others = ("lean_calls", "benchmark", "beside", "whole_calls")
    passes(device, FP8, *CAPTURES, *(f"tests/fakecuda/test_{name}.py" for name in others))


def test_contributors_are_told_which_tests_need_a_card():
    marked = [
        node.name
        for file in NEED_A_CARD
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and "pytest.mark." + "gpu" in map(ast.unparse, node.decorator_list)
    ]
    told = "".join(f"- `{name}`\n" for name in marked)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"\nMarked `gpu`, and passing on the made-up device but for values:\n\n{told}\n" in text


GROWING = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.thorough
def test_captures_are_the_same_in_segments_that_grow(device):
    passes({**device, **GROWING}, *CAPTURES)


def with_comfyui(environment: dict[str, str], **more: str) -> dict[str, str]:
    return {**environment, "COMFYUI_PATH": str(tree()), **more}


BLOCKS = "tests/fakecuda/test_block_kernels.py::test_"
BRIEFLY = "--tb=short"  # to write out tensors without values may take all memory


def test_kernels_of_blocks_take_sizes_of_32_bits_and_compute_what_these_do(device):
    """On a card of capability 8.6, as are our kernels of group norms, and casts of fp8 weights, which it has not."""
    files = ["tests/fakecuda/test_kernel_sizes.py", FP8, GROUP_NORMS]
    of_ampere = with_comfyui(device, FAKECUDA_CC="86")
    passes(of_ampere, BRIEFLY, *files, BLOCKS + "wrong_kernels_are_found_and_right_ones_pass")


def test_nothing_of_ours_waits_for_the_device_or_takes_more_memory(device):
    passes(with_comfyui(device), "tests/fakecuda/test_waits.py", "tests/fakecuda/test_memory.py")


@pytest.mark.thorough
@pytest.mark.parametrize("capability", ["86", "89", "120"])
def test_kinds_compile_and_are_captured_on_cards_of_each_capability(device, capability):
    """Thorough: each compiles the same blocks as for 9.0, above."""
    passes(with_comfyui(device, FAKECUDA_CC=capability), "tests/fakecuda/test_waits.py")


@pytest.mark.thorough
@pytest.mark.parametrize("capability", ["80", "89", "90", "120"])
def test_fp8_weights_are_compiled_and_group_norms_are_our_kernels_on_cards_of_each_capability(device, capability):
    passes({**device, "FAKECUDA_CC": capability}, FP8, GROUP_NORMS)


MODELS = "SD1.5", "SDXL", "Flux", "SD3", "Qwen-Image", "wide Wan", "HunyuanVideo", "Lumina2", "LTXV", "LTX 2"
CARDS = ("86", "fp16"), ("89", "bf16"), ("90", "fp32"), ("120", "bf16")
MORE_CARDS = ("86", "bf16"), ("89", "fp16"), ("90", "bf16"), ("90", "fp16"), ("120", "fp16")
QUICK_MODELS = "Qwen-Image", "Lumina2"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "capability", "dtype"),
    [(model, *card) for model in MODELS for card in CARDS + MORE_CARDS * (model in QUICK_MODELS)],
)
def test_kernels_of_all_blocks_of_a_model_compute_what_these_do(device, model, capability, dtype):
    """Thorough: each takes one to four minutes. With `-rP` it says which blocks, kernels and sizes."""
    if model == "LTX 2" and not (tree() / "comfy/ldm/lightricks/av_model.py").is_file():
        pytest.skip("this ComfyUI has no LTX 2")
    test = f"{BLOCKS}kernels_compute_what_blocks_do[{model}-{dtype}]"
    print(passes(with_comfyui(device, FAKECUDA_CC=capability), BRIEFLY, "-rP", test))
