"""Prompts of earlier builds, as a server gets them: inputs that are gone are left out, and the log says so once."""

import logging

import pytest
from comfy_accel.accel.core.events import log
from comfy_accel.accel.hosts.comfyui.server import earlier_prompts
from kit import real_prompts

from dev.tools.client import Client

GONE = {"multiple": "8", "mode": "up", "keep_aspect": True, "max_megapixels": 0.5}


@pytest.fixture
def said(monkeypatch, tmp_path, caplog):
    """What the log says, with our nodes known to core."""
    real_prompts.prompts(monkeypatch, tmp_path)
    earlier_prompts._say_once.cache_clear()
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.WARNING, log.name)
    return lambda: [record.getMessage() for record in caplog.records]


def test_gone_inputs_are_left_out_and_said_once_whether_they_are_values_or_links(said):
    def prompt():
        return {
            "1": {"class_type": "AccelSnapSize", "inputs": {"width": 64, "height": ["2", 0], **GONE, "mode": ["2", 0]}},
            "2": {"class_type": "PrimitiveInt", "inputs": {"value": 64}},
            "3": {"class_type": "AccelDeepCache", "inputs": {"model": ["9", 0], "interval": 3, "depth": 0}},
            "4": {"class_type": "AccelModel", "inputs": {"model": ["9", 0], "backend": "eager"}},
        }

    for _ in range(2):
        posted = earlier_prompts.leave_out_gone_inputs({"prompt": prompt(), "client_id": "someone"})["prompt"]
        assert posted["1"]["inputs"] == {"width": 64, "height": ["2", 0]}
        assert posted["3"]["inputs"] == {"model": ["9", 0]}
        assert (posted["2"], posted["4"]) == (prompt()["2"], prompt()["4"])
    assert said() == [
        "AccelSnapSize is used with inputs that it no longer has, which are ignored: "
        "multiple, mode, keep_aspect, max_megapixels",
        "AccelDeepCache is used with inputs that it no longer has, which are ignored: interval, depth",
    ]


def test_inputs_of_another_pack_whose_nodes_are_named_like_ours_stay(said, monkeypatch):
    import nodes

    class AccelOfOthers:
        @classmethod
        def INPUT_TYPES(cls):  # noqa: N802
            return {"required": {}}  # what it takes beside them it does not name

    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "AccelOfOthers", AccelOfOthers)
    prompt = {"1": {"class_type": "AccelOfOthers", "inputs": {"image_1": ["2", 0]}}}
    assert earlier_prompts.leave_out_gone_inputs({"prompt": prompt})["prompt"]["1"]["inputs"] == {"image_1": ["2", 0]}
    assert said() == []


@pytest.mark.parametrize(
    "posted", [None, [], {}, {"prompt": []}, {"prompt": {"1": None, "2": {}, "3": {"class_type": "AccelGone"}}}]
)
def test_what_is_no_prompt_is_left_to_core(posted, said):
    assert earlier_prompts.leave_out_gone_inputs(posted) is posted
    assert said() == []


def test_a_prompt_of_an_earlier_build_runs_on_a_server(server):
    gone = {**GONE, "how": "pad reflect", "anchor": "center", "fill": ["1", 0], "trained_for": "SDXL"}
    graph = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 100, "height": 64, "batch_size": 1, "color": 255}},
        "2": {"class_type": "AccelSnapImage", "inputs": {"image": ["1", 0], **gone}},
        "3": {"class_type": "AccelResolutionRestore", "inputs": {"image": ["2", 0], "restore": ["2", 4]}},
        "4": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}},
        "5": {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}},
    }
    assert len(Client(server.url).run(graph, timeout=60).images) == 2
