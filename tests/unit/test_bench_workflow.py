"""Changing and bypassing API-format graphs."""

import copy

import pytest

from dev import Problem
from dev.tools import workflow

GRAPH = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a"}},
    "2": {"class_type": "AccelModel", "inputs": {"model": ["1", 0], "backend": "inductor"}},
    "3": {"class_type": "AccelDeepCache", "inputs": {"model": ["2", 0], "interval": 3}},
    "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 160, "height": 240, "batch_size": 2}},
    "5": {"class_type": "KSampler", "inputs": {"model": ["3", 0], "latent_image": ["4", 0], "seed": 1}},
    "6": {"class_type": "AccelVAESkipCompile", "inputs": {"vae": ["1", 2]}},
    "7": {"class_type": "VAEDecode", "inputs": {"vae": ["6", 0], "samples": ["5", 0]}},
}


@pytest.mark.parametrize("order", [list(GRAPH), list(reversed(GRAPH))])
def test_bypass_leaves_core_nodes_connected_as_without_the_pack(order):
    plain = workflow.bypass({node_id: GRAPH[node_id] for node_id in order})
    assert not [node for node in plain.values() if node["class_type"].startswith("Accel")]
    assert plain["5"]["inputs"] == {"model": ["1", 0], "latent_image": ["4", 0], "seed": 1}
    assert plain["7"]["inputs"] == {"vae": ["1", 2], "samples": ["5", 0]}
    assert plain["4"] == GRAPH["4"]


def test_graph_that_comes_in_stays_as_it_is():
    before = copy.deepcopy(GRAPH)
    workflow.bypass(GRAPH)
    workflow.change(GRAPH, {"KSampler": {"seed": 2}})
    assert before == GRAPH


def test_change_sets_inputs_of_every_node_of_the_class():
    changed = workflow.change(GRAPH, {"KSampler": {"seed": 2}, "AccelModel": {"backend": "eager"}})
    assert changed["5"]["inputs"]["seed"] == 2
    assert changed["2"]["inputs"] == {"model": ["1", 0], "backend": "eager"}


def test_saved_workflow_has_all_nodes_that_pass_something_on_and_bypasses_clean():
    graph = workflow.load()
    there = {node["class_type"] for node in graph.values()}
    assert there >= {*workflow.PASSED_ON} - {"AccelSpeedUp", "AccelTextEncoder"}
    assert not [node for node in workflow.bypass(graph).values() if node["class_type"].startswith("Accel")]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(Problem, match="no ControlNetApply node"):
        workflow.change(GRAPH, {"ControlNetApply": {"strength": 1.0}})
    with pytest.raises(Problem, match="No workflow at"):
        workflow.load(tmp_path / "none.json")
