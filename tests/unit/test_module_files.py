"""A name for the files behind code that changes with them, and none where that cannot be told."""

import importlib
import os
import sys
import time
import types
import zlib

import einops
import pytest
import torch
from comfy_accel.accel.fingerprint import code_hash, kinds, module_files
from comfy_accel.accel.fingerprint.kinds import GraphKey
from comfy_accel.accel.store import key

BLOCK = """
import torch
{setting}

class Block(torch.nn.Module):
    def forward(self, x):
        return x * {read}
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Imports a module of texts, by file, as if these had been there when the process began."""
    monkeypatch.syspath_prepend(tmp_path)

    def forget():
        for name in [name for name in sys.modules if name.startswith("accel_test_")]:
            del sys.modules[name]

    def make(name, texts):
        for path, text in texts.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            os.utime(file, (1, 10**9 + zlib.crc32(text.encode()) % 10**6))  # or Python takes what it has compiled
        monkeypatch.setattr(module_files, "_BEGAN", time.time() + 1)
        forget()
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    forget()


@pytest.fixture
def module(imported):
    """Makes a module of a text, and imports it."""
    return lambda text: imported("accel_test_module", {"accel_test_module.py": text})


def kind_of(module):
    (kind,) = kinds.kinds_of([kinds.describe(module.Block())])
    return kind


def digest_of(module):
    return key.key_digest(GraphKey(kind_of(module), ("tensor",), (), "inductor"))


@pytest.mark.parametrize(
    "setting, read",
    [
        ("TABLE = {{i: i * {value} for i in range(9)}}\ndef f(): TABLE['kept'] = 1", "(TABLE[3], f())[0]"),
        ("import math\nTABLE = [object(), {value}]", "TABLE[1]"),
        ("SCALE = {value}", "SCALE"),
        ("SCALE = torch.tensor([1, {value}])", "SCALE"),
    ],
    ids=["memo", "table of objects", "number", "small tensor"],
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
        ("SCALE = torch.ones(600)", "SCALE", "torch.Tensor"),
        ("from collections import deque\nLAST = deque([2])", "LAST[0]", "collections.deque"),
    ],
)
def test_what_only_the_type_is_told_of_is_not_kept(module, setting, read, what):
    made = module(BLOCK.replace("{setting}", setting).replace("{read}", read))
    assert any(what in opaque for opaque in kind_of(made).opaque), kind_of(made).opaque
    with pytest.raises(key.NotPortable, match="cannot be told from outside"):
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
    with pytest.raises(key.NotPortable, match="has changed since"):
        digest_of(made)


def test_change_is_noticed_in_the_next_period_and_a_folder_is_looked_through_once_in_each(tmp_path, monkeypatch):
    (tmp_path / "code.py").write_text("one = 1")
    clock, walks, walk = [0.0], [], os.walk
    monkeypatch.setattr(module_files, "_BEGAN", time.time() + 1)
    monkeypatch.setattr(module_files, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(os, "walk", lambda *args: walks.append(args) or walk(*args))
    before = module_files.digest([str(tmp_path)])
    assert module_files.digest([str(tmp_path)]) == before and len(walks) == 1
    (tmp_path / "code.py").write_text("one = 2")
    os.utime(tmp_path / "code.py", (time.time() + 60,) * 2)
    clock[0] += module_files._LOOK_EVERY
    with pytest.raises(module_files.Unknown, match="code.py has changed since"):
        module_files.digest([str(tmp_path)])


def test_module_whose_file_is_gone_or_never_was_tells_nothing(module):
    made = module(BLOCK.format(setting="SCALE = 1", read="SCALE"))
    file = made.__file__
    os.remove(file)
    with pytest.raises(module_files.Unknown, match="is gone"):
        module_files.digest([file])
    del made.__file__
    with pytest.raises(key.NotPortable, match="accel_test_module has no file"):
        digest_of(made)


PLACES = {
    "outermost package": ("pack.sub.layers", "pack/sub/layers.py", "pack"),
    "its own file": ("pack", "pack/__init__.py", "pack"),
    "a package's file": ("pack.sub", "pack/sub/__init__.py", "pack"),
    "a script": ("__main__", "home/script.py", "home/script.py"),
    "a custom node": ("/comfy/custom_nodes/pack_x_1.nodes", "custom_nodes/pack.1/nodes.py", "custom_nodes/pack.1"),
    "a name that says nothing": ("some.where.else", "home/script.py", "home/script.py"),
    "half a name": ("some.where.script", "home/script.py", "home/script.py"),
}


@pytest.mark.parametrize("name, file, source", PLACES.values(), ids=PLACES)
def test_code_lies_in_its_outermost_package_or_its_file(name, file, source):
    scope = {"__name__": name, "__file__": os.path.join(os.sep, *file.split("/"))}
    assert module_files.source_of(scope) == os.path.join(os.sep, *source.split("/"))


def test_value_from_another_file_of_the_package_is_in_the_key(imported):
    layers = BLOCK.format(setting="from .consts import CONSTS", read="CONSTS[0]")

    def digest(value, hook):
        files = {
            ".git/hook.py": hook,
            "__init__.py": "",
            "consts.py": f"import torch\nCONSTS = [torch.full((1,), {value})]\n",
            "layers.py": layers,
        }
        package = {f"accel_test_package/{path}": text for path, text in files.items()}
        return digest_of(imported("accel_test_package.layers", package))

    digests = [digest(1.0, "one"), digest(1.0, "two"), digest(2.0, "two")]
    assert digests[0] == digests[1] != digests[2]


def test_what_the_code_sets_itself_is_where_it_keeps_things(module):
    setting = (
        "import weakref\nLAST = (weakref.ref(torch.nn.Linear(1, 1)), 5)\ndef keep():\n    global LAST\n    LAST = 1"
    )
    made = module(BLOCK.replace("{setting}", setting).replace("{read}", "((LAST and keep()) or 1)"))
    assert kind_of(made).opaque == frozenset()


def test_code_reaches_the_files_that_its_names_lead_to():
    (kind,) = kinds.kinds_of([kinds.describe(Reaching())])
    assert module_files.source_of(globals()) in kind.sources
    assert any(os.path.samefile(source, os.path.dirname(einops.__file__)) for source in kind.sources if source)


class Reaching(torch.nn.Module):
    def forward(self, x):
        return x * einops.parse_shape


WEIGHT = """
import torch
from kit.blocks import Wrapped

class Weight(Wrapped):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(arg.inner * {factor} if type(arg) is cls else arg for arg in args), **(kwargs or {{}}))

def Block():
    block = torch.nn.Linear(2, 2)
    del block.weight
    block.register_buffer("weight", Weight(torch.ones(2, 2)))
    return block
"""


def test_code_of_weights_classes_of_their_own_is_in_the_name(module):
    before = digest_of(module(WEIGHT.format(factor=2)))
    assert before == digest_of(module(WEIGHT.format(factor=2)))
    assert before != digest_of(module(WEIGHT.format(factor=33)))


def test_globals_that_no_result_depends_on_are_left_out(module):
    reader = code_hash.CodeReader(frozenset({("accel_test_module", "SCALE")}))
    made = module(BLOCK.format(setting="SCALE = 1", read="SCALE"))
    before = kinds.describe(made.Block(), reader).digest
    made.SCALE = 2
    assert kinds.describe(made.Block(), code_hash.CodeReader(reader.ignored)).digest == before
    assert kinds.describe(made.Block()).digest != before


def test_folder_of_modules_is_nothing_by_itself(tmp_path, monkeypatch):
    (tmp_path / "accel_test_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert module_files.source_of(vars(importlib.import_module("accel_test_folder"))) is None
