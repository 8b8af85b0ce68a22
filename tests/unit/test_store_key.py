"""What a saved graph is found by, and what it depends on beside that."""

import dataclasses
import math
import platform
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.fingerprint import module_files
from comfy_accel.accel.store import key as store_key
from kit.stores import CPU, built, graph, key, load, reasons, save, store

THREADS = torch.get_num_threads()
PRECISION = getattr(torch.backends.cuda.matmul, "fp32_precision", None)


def other_math_sdp():
    attention = torch.backends.cuda  # a ComfyUI in this process may have set it
    attention.allow_fp16_bf16_reduction_math_sdp(not attention.fp16_bf16_reduction_math_sdp_allowed())


def matmul_as_before():
    torch.set_float32_matmul_precision("highest")
    if PRECISION is not None:
        torch.backends.cuda.matmul.fp32_precision = PRECISION


@pytest.mark.parametrize("field", ["torch", "python", "device", "engine", "system", "options"])
def test_another_environment_is_a_miss_that_names_it(tmp_path, monkeypatch, field):
    made = store_key.environment(CPU)
    monkeypatch.setattr(store_key, "environment", lambda devices: {**made, field: "other"})
    save(store(tmp_path))
    monkeypatch.setattr(store_key, "environment", lambda devices: made)
    here = store(tmp_path)
    assert load(here) is None
    assert reasons(here)[0].startswith(f"saved with another {field} (other; here it is ")


@pytest.fixture
def asked_anew():
    """What a process knows of its software and devices is found out once for all."""
    found = store_key._software, store_key._accelerator
    for known in found:
        known.cache_clear()
    yield
    for known in found:
        known.cache_clear()


@pytest.mark.parametrize("place, name", [(torch, "__version__"), (torch.version, "git_version")])
def test_another_build_of_torch_is_another_environment(asked_anew, monkeypatch, place, name):
    before = store_key.environment(CPU)
    store_key._software.cache_clear()
    monkeypatch.setattr(place, name, "1.0")
    assert "torch" in store_key.difference(store_key.environment(CPU), before)


def test_settings_of_torch_that_change_kernels_are_in_the_environment():
    before = store_key.environment(CPU)
    with torch._inductor.config.patch(max_autotune=True):
        assert store_key.environment(CPU) != before
    # How many processes compile changes nothing, nor what the compiler is called, which Conda sets in some shells.
    compiler = {"cpp.cxx": (None, "x86_64-conda-linux-gnu-c++")}
    for same in ({"compile_threads": torch._inductor.config.compile_threads + 1}, compiler):
        with torch._inductor.config.patch(same):
            assert store_key.environment(CPU) == before
    with torch._functorch.config.patch(functionalize_rng_ops=True):
        assert store_key.environment(CPU) != before
    assert store_key.environment(CPU) == before


@pytest.mark.parametrize(
    "change, back",
    [
        (lambda: torch.set_num_threads(THREADS + 1), lambda: torch.set_num_threads(THREADS)),
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), lambda: torch.backends.cuda.enable_flash_sdp(True)),
        (other_math_sdp, other_math_sdp),
        (lambda: torch.set_float32_matmul_precision("medium"), matmul_as_before),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (lambda: torch.backends.mkldnn.set_flags(False), lambda: torch.backends.mkldnn.set_flags(True)),
    ],
    ids=["threads", "dtype", "flash", "math", "matmul", "deterministic", "mkldnn"],
)
def test_settings_of_the_process_that_change_kernels_are_too(change, back):
    before = store_key.environment(CPU)
    change()
    try:
        assert store_key.environment(CPU) != before
    finally:
        back()
    assert store_key.environment(CPU) == before


def test_algorithms_that_only_warn_where_they_are_not_deterministic_are_another_setting():
    try:
        torch.use_deterministic_algorithms(True)
        before = store_key.environment(CPU)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert store_key.environment(CPU) != before
    finally:
        torch.use_deterministic_algorithms(False)


def test_device_without_a_name_is_told_by_its_system():
    assert not hasattr(torch.mps, "get_device_name")
    assert platform.platform() in store_key._device("mps", 0)


def two_cards(monkeypatch, name, capability, hip, sets=("", "")):
    """Simulated: a machine with them. What `_device` says of each. sets: of instructions, of AMD's."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=sets[index]))
    return [store_key._device("cuda", index) for index in (0, 1)]


def test_cards_of_one_kind_are_told_apart_by_their_place(asked_anew, monkeypatch):
    """The generated code names the card that it runs on."""
    two_cards(monkeypatch, "NVIDIA H200", (9, 0), None)
    first, second = (store_key.environment([torch.device("cuda", index)]) for index in (0, 1))
    assert store_key.difference(first, second).startswith("saved with another device")


def test_amds_cards_of_one_name_are_told_apart_by_their_instruction_sets(asked_anew, monkeypatch):
    first, second = two_cards(monkeypatch, "AMD Radeon Graphics", (11, 0), "6.4.1", ("gfx1100", "gfx1101"))
    assert first.partition(" ")[2] != second.partition(" ")[2] and "gfx1100 toolkit 6.4.1" in first


def test_precision_that_was_set_through_torchs_newer_name_turns_nothing_off(tmp_path):
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch knows no fp32_precision, the newer name")
    before, usual = torch.backends.cuda.matmul.fp32_precision, store_key.environment(CPU)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert store_key.environment(CPU) != usual
        assert save(store(tmp_path)) and load(store(tmp_path)) is not None
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_somebodys_own_pass_in_inductor_is_kept_apart(tmp_path):
    here = store(tmp_path)
    with torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert not save(here)
    assert "pass of somebody's own" in reasons(here)[0]


def test_code_that_looks_at_what_cannot_be_told_is_not_kept(tmp_path):
    here = store(tmp_path)
    opaque = dataclasses.replace(key(), kind=dataclasses.replace(key().kind, opaque=frozenset({"a pack.Box"})))
    assert not here.save(opaque, "Block", CPU, graph())
    assert reasons(here) == ["not kept: its code rests on what cannot be told from outside: a pack.Box"]
    assert built(here, graph, of=opaque) is None


def test_sizes_and_backend_are_in_the_key_and_values_are_not():
    plain = key()
    assert store_key.key_digest(plain) == store_key.key_digest(key())
    changed = [
        plain.__class__(plain.kind, plain.call, plain.inputs, "other"),
        plain.__class__(plain.kind, plain.call, plain.inputs, plain.backend, (torch.Size([1]),)),
        plain.__class__(plain.kind, ("constant", 2), plain.inputs, plain.backend),
    ]
    assert len({store_key.key_digest(other) for other in (plain, *changed)}) == 4


def test_files_of_the_code_are_in_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(module_files, "_BEGAN", math.inf)
    digests = set()
    for version in ("1", "2"):
        file = tmp_path / version / "block.py"
        file.parent.mkdir()
        file.write_text(f"def forward(x): return x * {version}")
        kind = dataclasses.replace(key().kind, sources=frozenset({str(file)}))
        digests.add(store_key.key_digest(dataclasses.replace(key(), kind=kind)))
    assert len(digests) == 2


def test_key_that_names_an_address_is_not_kept(tmp_path):
    class Mark:
        __hash__, __eq__ = object.__hash__, object.__eq__

    marked = dataclasses.replace(key(), call=("dict", (Mark(), ("tensor",))))
    here = store(tmp_path)
    assert not here.save(marked, "Block", CPU, graph())
    assert "no name outside of this process" in reasons(here)[0]
    assert list(tmp_path.iterdir()) == []
