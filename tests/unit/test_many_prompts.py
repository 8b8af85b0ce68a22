"""The example of Ray Data: batches of one size, and a run that is killed and goes on."""

import importlib.util

import pytest

pytest.importorskip("ray.data", reason="an optional package of 200 MB", exc_type=ImportError)
pytest.importorskip("diffusers.schedulers", reason="needs the package diffusers: tests/requirements.txt")

# ruff: noqa: E402
from dev import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "many_prompts.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("many_prompts", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_batches_have_one_trained_size_and_one_of_a_few_numbers_of_images(example):
    jobs = [{"width": 1200, "height": 800, "number": number} for number in range(15)]
    jobs += [{"width": 1000, "height": 1000, "number": 15}]
    batches = list(example.batches_of(jobs, example.SIZES))
    assert [len(batch["jobs"]) for batch in batches] == [8, 4, 2, 1, 1]
    assert {(batch["width"], batch["height"]) for batch in batches} == {(1216, 832), (1024, 1024)}
    assert [job["number"] for batch in batches for job in batch["jobs"]] == list(range(16))


def test_prompt_that_was_changed_has_another_file(example):
    asked = [("a lake", []), ("a lake", []), ("a hill", []), ("a lake", ["--steps", "5"]), ("a lake", ["--model", "b"])]
    names = {example.file_name(3, {"prompt": prompt}, example.parse(flags)) for prompt, flags in asked}
    assert len(names) == 4
    assert all(name.startswith("000003-") for name in names)


def test_a_line_is_a_prompt_whatever_its_text(example, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028lake"}\n\n{"prompt": "\x85", "seed": 2}\n', encoding="utf-8")
    assert [(job["prompt"], job["seed"]) for job in example.read(file)] == [("a\u2028lake", 0), ("\x85", 2)]
