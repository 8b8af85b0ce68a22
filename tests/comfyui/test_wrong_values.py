"""A wrong value is refused before the run, and its own input is marked."""

import asyncio

import execution
import pytest
from comfy_accel.nodes import NODES

import nodes as core_nodes

RIGHT = {node.define_schema().node_id: node for node in NODES}


def wrong_values():
    for name, node in RIGHT.items():
        for declared in node.define_schema().inputs:
            if getattr(declared, "options", None):
                yield name, declared.id, "perhaps"
            elif getattr(declared, "min", None) is not None:
                yield name, declared.id, declared.min - 1
                yield name, declared.id, declared.max + 1


@pytest.fixture
def registered(monkeypatch):
    for name, node in RIGHT.items():
        monkeypatch.setitem(core_nodes.NODE_CLASS_MAPPINGS, name, node)


def marked(name, changes):
    """The inputs that core marks for these values of a node of its own; what is not linked does not count."""
    values = {
        declared.id: getattr(declared, "default", None)
        for declared in RIGHT[name].define_schema().inputs
        if getattr(declared, "default", None) is not None
    }
    prompt = {"1": {"class_type": name, "inputs": {**values, **changes}}}
    _, errors, _ = asyncio.run(execution.validate_inputs("test", prompt, "1", {}))
    return {error["extra_info"]["input_name"] for error in errors if error["type"] != "required_input_missing"}


def test_linked_sizes_are_not_judged_before_the_run():
    assert RIGHT["AccelWarmUpGraphs"].validate_inputs(sizes=None) is True


@pytest.mark.parametrize(("name", "wrong", "value"), list(wrong_values()), ids=lambda value: str(value))
def test_only_the_wrong_input_is_marked(name, wrong, value, registered):
    assert marked(name, {}) == set()
    assert marked(name, {wrong: value}) == {wrong}


@pytest.mark.parametrize(
    ("wrong", "value", "said"),
    [
        *(("sizes", value, "size") for value in ("10x", "", " , ")),
        *(("batches", value, "batches") for value in ("1, two", "0")),
        ("prompt_lengths", "77 154", "prompt lengths"),
    ],
)
def test_a_wrong_text_is_refused_by_name(wrong, value, said, registered):
    """ComfyUI marks all three inputs, which are judged together: the sentence says which one is meant."""
    assert wrong in marked("AccelWarmUpGraphs", {wrong: value})
    assert said in RIGHT["AccelWarmUpGraphs"].validate_inputs(**{"sizes": "512x512", wrong: value})
