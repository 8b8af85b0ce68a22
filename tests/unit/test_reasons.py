"""Reasons: every code has its sentence, and whoever makes a reason gives all its fields."""

import ast
import functools
import json
from string import Formatter

from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.core.sentences import SENTENCES
from comfy_accel.accel.hosts.comfyui import words  # noqa: F401 it has the sentences in the host's own terms
from comfy_accel.accel.report.run import Run
from kit.engine_imports import ENGINE


def fields(sentence: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(sentence) if name}


def reasons_of(language: str) -> dict[str, str]:
    """What the page shows for reasons, by code."""
    file = ENGINE.parent / "locales" / language / "main.json"
    return json.loads(file.read_text(encoding="utf-8"))["accelReasons"]


@functools.cache
def made() -> list[tuple[str, set[str], str]]:
    """(code, names of its fields, where) of every reason that the engine makes."""
    found = []
    for file in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reason":
                (code,) = node.args
                where = f"{file.relative_to(ENGINE)}:{node.lineno}"
                paid = [*Run().paid, *Run(is_beside=True).paid]  # each with a reason of its own
                codes = paid if isinstance(code, ast.Name) else [ast.literal_eval(code)]
                found += [(code, {keyword.arg for keyword in node.keywords}, where) for code in codes]
    return found


def test_every_reason_made_has_a_sentence_with_its_fields():
    assert made()
    assert [where for code, given, where in made() if given != fields(SENTENCES.get(code, "{?}"))] == []


def test_every_sentence_is_used():
    assert SENTENCES.keys() == {code for code, _, _ in made()}


def test_every_sentence_is_there_in_chinese_with_the_same_fields():
    chinese = reasons_of("zh")
    assert {code: fields(text) for code, text in chinese.items()} == {c: fields(s) for c, s in SENTENCES.items()}


def test_english_sentences_of_the_page_are_of_codes_that_there_are_with_the_same_fields():
    english = reasons_of("en")
    assert english and all(fields(text) == fields(SENTENCES[code]) for code, text in english.items())


def test_reason_is_its_sentence_as_text_and_a_code_with_fields_as_json():
    reason = Reason("not_captured", why=Reason("weights_type", type="Odd"))
    assert str(reason) == f"{reason}" == "not captured as a CUDA graph: its weights are of the type Odd"
    assert json.loads(json.dumps(reason.to_json())) == {
        "code": "not_captured",
        "fields": {
            "why": {"code": "weights_type", "fields": {"type": "Odd"}, "reason": "its weights are of the type Odd"}
        },
        "reason": str(reason),
    }


def test_equal_reasons_are_equal_and_hash_alike():
    assert Reason("patched", patch="attn1") == Reason("patched", patch="attn1") != Reason("patched", patch="attn2")
    assert len({Reason("autocast"), Reason("autocast")}) == 1
