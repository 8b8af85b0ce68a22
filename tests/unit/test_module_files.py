"""A name for the files behind code that changes with them, and none where that cannot be told."""

import importlib
import os
import sys
import time

import pytest
import torch
from comfy_accel.accel import code_reach, kinds, module_files, store_key
from comfy_accel.accel.graph_key import GraphKey

BLOCK = """
import torch
{setting}

class Block(torch.nn.Module):
    def forward(self, x):
        return x * {read}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module of a text, as if it had been there when the process began, and imports it."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text, name="accel_test_module"):
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        os.utime(file, (1, time.time() - 50 + len(text) % 40))
        monkeypatch.setattr(module_files, "_BEGAN", time.time() + 1)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    sys.modules.pop("accel_test_module", None)


def kind_of(module):
    (kind,) = kinds.kinds_of([kinds.describe(module.Block())])
    return kind


def digest_of(module):
    return store_key.key_digest(GraphKey(kind_of(module), ("tensor",), (), "inductor"))


@pytest.mark.parametrize(
    "setting, read",
    [
        ("TABLE = {{i: i * {value} for i in range(9)}}\ndef f(): TABLE['kept'] = 1", "(TABLE[3], f())[0]"),
        ("import math\nTABLE = [object(), {value}]", "TABLE[1]"),
        ("SCALE = {value}", "SCALE"),
    ],
    ids=["memo", "table of objects", "number"],
)
def test_other_values_in_a_module_are_another_key(module, setting, read):
    digests = {
        digest_of(module(BLOCK.format(setting=setting.format(value=value), read=read))) for value in (10, 10, 20)
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    "setting, read, what",
    [
        ("TABLE = {i: i for i in range(600)}", "TABLE[3]", "a table of 600 items"),
        ("class Box:\n    __slots__ = ('v',)\nBOX = Box()\nBOX.v = 2", "BOX.v", "accel_test_module.Box"),
        ("SCALE = torch.ones(4)", "SCALE", "torch.Tensor"),
        ("class A:\n    def do(self): return 2\ndo = A().do", "do()", "a method of a A"),
        ("from collections import deque\nLAST = deque([2])", "LAST[0]", "collections.deque"),
    ],
)
def test_what_only_the_type_is_told_of_is_not_kept(module, setting, read, what):
    made = module(BLOCK.replace("{setting}", setting).replace("{read}", read))
    assert any(what in opaque for opaque in kind_of(made).opaque), kind_of(made).opaque
    with pytest.raises(store_key.NotPortable, match="only the type can be told"):
        digest_of(made)


def test_locks_loggers_and_fields_of_records_say_nothing(module):
    setting = """
import logging, threading, typing
log, lock, T = logging.getLogger("x"), threading.RLock(), typing.TypeVar("T")
class Record(typing.NamedTuple):
    log: int
"""
    read = "(log and 1) * (lock and 1) * (T and 1) * Record(2).log"
    made = module(BLOCK.replace("{setting}", setting).replace("{read}", read))
    assert kind_of(made).opaque == frozenset()
    assert digest_of(made)


def test_file_that_changed_since_is_not_what_runs(module, monkeypatch):
    made = module(BLOCK.format(setting="SCALE = 1", read="SCALE"))
    assert digest_of(made)
    monkeypatch.setattr(module_files, "_BEGAN", time.time() - 1000)
    with pytest.raises(store_key.NotPortable, match="has changed since"):
        digest_of(made)


def test_module_whose_file_is_gone_or_never_was_tells_nothing(module):
    made = module(BLOCK.format(setting="SCALE = 1", read="SCALE"))
    os.remove(made.__file__)
    with pytest.raises(module_files.Unknown, match="is gone"):
        module_files.digest(["accel_test_module"])
    del made.__file__
    with pytest.raises(module_files.Unknown, match="no file"):
        module_files.digest(["accel_test_module"])
    with pytest.raises(module_files.Unknown, match="no file"):
        module_files.digest(["accel_no_such_module"])


def test_folder_of_modules_is_nothing_by_itself(tmp_path, monkeypatch):
    (tmp_path / "accel_test_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("accel_test_folder")
    assert module_files.digest(["accel_test_folder"]) == module_files.digest([])


def test_code_reaches_the_modules_that_its_names_lead_to():
    kind = kinds.kinds_of([kinds.describe(Reaching())])[0]
    assert code_reach.__name__ in kind.modules and __name__ in kind.modules
    assert not any(name.partition(".")[0] in ("torch", "dataclasses") for name in kind.modules)


class Reaching(torch.nn.Module):
    def forward(self, x):
        return x * code_reach._MOST_ITEMS
