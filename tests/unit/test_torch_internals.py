"""Torch without one of its private names: blocks run compiled all the same, or eagerly for one reason, and rightly."""

import os
import subprocess
import sys
from pathlib import Path

import comfy_accel
import pytest
import torch
from comfy_accel.accel.core import torch_internals
from kit.blocks import reasons, runner
from kit.thorough import thorough_except


def test_every_name_is_known():
    """What a new torch lacks; each says when it was first there, and what is lost without it."""
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    built = [name for name in torch_internals.ALL if torch.version.cuda or name not in torch_internals.OF_CUDA]
    expected = [name for name in built if tuple(map(int, name.since.split("."))) <= version]
    assert [str(name) for name in expected if not name.is_there] == []
    assert [name for name in torch_internals.ALL if not name.without] == []


def test_marks_of_dynamic_sizes_are_where_a_stand_in_looks_for_them():
    tensor = torch.empty(2, 3)
    torch_internals.MARK_DYNAMIC.get()(tensor, 1)
    assert tensor._dynamo_weak_dynamic_indices == {1}


# One for each thing that may be lost is quick.
QUICK = (
    *(torch_internals.AOT_CALLABLE, torch_internals.MARK_DYNAMIC, torch_internals.FAKE_MODE),
    torch_internals.TENSOR_GUARDS,
)


@pytest.mark.parametrize("name", thorough_except(torch_internals.ALL, *QUICK), ids=str)
@torch.inference_mode()
def test_renamed_in_a_new_torch_each_name_leaves_the_output_right(name, hide):
    hide(name)
    block = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    stand_in = runner(block)
    for shape in ((1, 3, 8), (1, 5, 8), (2, 4, 8)):
        x = torch.randn(shape)
        assert torch.equal(stand_in(block, x), block(x))
    assert len(set(reasons())) <= 1


@pytest.mark.skipif(os.name == "nt", reason="where every user has a name")
def test_user_without_a_name_can_import_and_compile():
    """As `docker run --user 1234`: torch names folders by the user as its compiler is imported."""
    code = """
import pwd
def none(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = none
from accel.core import torch_internals
import torch._inductor.codecache
assert torch_internals.AOT_FUNCTION.is_there and torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
"""
    named = ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in named}
    subprocess.run([sys.executable, "-c", code], cwd=Path(comfy_accel.__file__).parent, env=environment, check=True)
