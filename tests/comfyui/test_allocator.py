"""Which allocator torch has in a server, by what was chosen and by whom: on the made-up device, which ComfyUI takes for
an NVIDIA card."""

import pytest
from kit import made_up_device

from tools import comfyui
from tools.client import Client
from tools.server import serving

OURS, CORES = "native", "cudaMallocAsync"


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The environment of a process with the device."""
    try:
        return made_up_device.environment(made_up_device.build(tmp_path_factory.mktemp("made_up_device")))
    except made_up_device.Unavailable as why:
        pytest.skip(f"there can be no made-up device: {why}")


@pytest.fixture
def start(device, tmp_path, monkeypatch):
    """Starts a server in one base directory, and gives what its page is told: the allocator's name, and the state."""
    monkeypatch.setattr(comfyui, "has_accelerator", lambda: True)

    def started(*flags, prestartup="", ask=lambda client: None, **environment):
        other = tmp_path / "custom_nodes" / "an_other_pack"
        other.mkdir(parents=True, exist_ok=True)
        (other / "prestartup_script.py").write_text(prestartup)
        (other / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}")
        variables = {"ACCEL_STORE": "off", **device, **environment}
        with serving(tmp_path, extra_flags=flags, environment=variables) as server:
            client = Client(server.url)
            state = client.get("/accel/state")
            ask(client)
            name = client.get("/system_stats")["devices"][0]["name"].rpartition(" ")[2]
            return name, state["cuda_graphs"]["code"], server.read_log()

    return started


def choose(choice):
    return lambda client: client.post("/accel/settings", {"cuda_graphs": choice})


def test_a_click_gives_torch_its_own_allocator_from_the_next_start_on_and_another_takes_it_back(start):
    name, code, log = start(ask=choose("on"))
    assert (name, code) == (CORES, "graphs_off") and "Accel: CUDA graphs" not in log
    name, code, log = start(ask=choose("off"))
    assert (name, code) == (OURS, "graphs_on") and log.count("Accel: CUDA graphs are turned on") == 1
    name, code, _ = start()
    assert (name, code) == (CORES, "graphs_off")


CASES = {
    "default": ((), {}, CORES, "graphs_off"),
    "asked by the environment": ((), {"ACCEL_CUDA_GRAPHS": "on"}, OURS, "graphs_on"),
    "the user's flag for ours": (("--disable-cuda-malloc",), {}, OURS, "graphs_given"),
    "the user's flag against": (("--cuda-malloc",), {"ACCEL_CUDA_GRAPHS": "on"}, CORES, "graphs_flag"),
    "the user's own part of the configuration": (
        (),
        {"ACCEL_CUDA_GRAPHS": "on", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
        OURS,
        "graphs_on",
    ),
    "the user's own allocator": (
        (),
        {"ACCEL_CUDA_GRAPHS": "on", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        CORES,
        "graphs_configuration",
    ),
}


@pytest.mark.thorough  # a server each; test_prestartup.py asks the same of the script alone
@pytest.mark.parametrize("case", CASES)
def test_nobody_elses_choice_is_overruled(start, case):
    flags, environment, allocator, code = CASES[case]
    assert start(*flags, **environment)[:2] == (allocator, code)


@pytest.mark.thorough
def test_torch_that_another_pack_has_imported_keeps_its_allocator(start):
    """Cores that choose after that end by themselves, but where CUDA graphs are turned on."""
    main = (comfyui.tree() / "main.py").read_text(encoding="utf-8")
    is_late = main.index("import cuda_malloc") < main.index("\nexecute_prestartup_script()")
    found = start(prestartup="import torch", ACCEL_CUDA_GRAPHS="on")[:2]
    assert found == ((CORES, "graphs_torch_loaded") if is_late else (OURS, "graphs_on"))


@pytest.mark.thorough
def test_without_a_card_nothing_is_changed_or_offered(start):
    _, code, log = start("--cpu", ACCEL_CUDA_GRAPHS="on")
    assert code == "graphs_nowhere" and "Accel: CUDA graphs" not in log
