"""A call as constants and tensors, and back."""

from dataclasses import dataclass, field

import pytest
import torch
from comfy_accel.accel.signature.tensors import dense, share_memory
from comfy_accel.accel.signature.tree_spec import STAND_INS, UnsupportedArgument, flatten, rebuild, remove_values


def test_rebuild_is_the_inverse_of_flatten():
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(3)
    call = ((a, None, [b, 3, (c, "name")]), {"scale": 1.5, "flags": {"on": True, "x": a}})
    tensors = []
    spec = flatten(call, tensors)
    assert [id(t) for t in tensors if t.ndim == 1] == [id(a), id(b), id(c)]
    (x, none, (y, three, (z, name))), kwargs = rebuild(spec, tensors)
    assert (x is a, none, y is b, three, z is c, name) == (True, None, True, 3, True, "name")
    assert kwargs["scale"] == 1.5 and kwargs["flags"]["on"] is True and kwargs["flags"]["x"] is a


def test_whole_numbers_from_two_on_are_sizes_and_not_part_of_the_spec():
    tensors = []
    spec = flatten({"frames": 5, "window": (7, None)}, tensors)
    assert spec == flatten({"frames": 9, "window": (2, None)}, [])
    assert rebuild(spec, tensors) == {"frames": 5, "window": (7, None)}
    assert all(tensor.numel() == 0 for tensor in tensors)
    for flag in (True, 1, 0, -1):
        assert rebuild(flatten(flag, tensors), []) is flag and len(tensors) == 2
    assert len({flatten(flag, []) for flag in (True, 1, 1.0, False, 0, 0.0, -0.0)}) == 7


def test_spec_without_values_is_equal_for_other_numbers_and_texts_of_the_same_sort():
    one, two = (flatten(([value, text], {"x": 1}), []) for value, text in ((0.5, "a"), (2.0, "b")))
    assert one != two
    (call, values), (same, others) = remove_values(one), remove_values(two)
    assert call == same and (values, others) == (("0.5", "'a'"), ("2.0", "'b'"))
    assert remove_values(flatten(([None, "a"], {"x": 1}), []))[0] != call
    assert remove_values(flatten((["0.5", "a"], {"x": 1}), []))[0] != call


@dataclass
class Modulation:
    shift: torch.Tensor
    scale: float = 1.0


@dataclass
class Derived:
    shift: torch.Tensor
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.doubled = self.shift * 2


def test_dataclass_of_tensors_is_rebuilt():
    tensors = []
    spec = flatten((Modulation(torch.ones(2), 0.5),), tensors)
    (again,) = rebuild(spec, tensors)
    assert type(again) is Modulation and again.shift is tensors[0] and again.scale == 0.5


class PerFrame:
    """As LTX 2's time steps: all of it is in slots, and `__init__` takes something else."""

    __slots__ = ("data", "frames")

    def __init__(self, tokens: torch.Tensor):
        self.data, self.frames = tokens[::4], len(tokens) // 4


class Elsewhere(PerFrame):
    """It has a dict too."""


def test_object_with_slots_is_rebuilt_without_its_init():
    tensors = []
    spec = flatten((PerFrame(torch.arange(12.0)),), tensors)
    (again,) = rebuild(spec, tensors)
    assert type(again) is PerFrame and again.data is tensors[0] and again.frames == 3
    for tokens in (8, 4):  # of a single frame there is no graph of its own
        assert spec == flatten((PerFrame(torch.arange(float(tokens))),), [])


def test_dense_copies_only_what_is_neither_contiguous_nor_channels_last():
    plain, image = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert dense(plain) is plain and dense(image) is image
    assert dense(plain.transpose(1, 2)).is_contiguous()


def test_memory_is_shared_by_overlapping_views_alone():
    base = torch.zeros(4, 3)
    assert share_memory([base, base[2:]], (0,))
    assert not share_memory([base[:2], base[2:]], (0, 1))
    assert not share_memory([base[:2], base[2:]], (1,)) and not share_memory([base[2:], base[:2]], (0,))
    assert not share_memory([base, base[2:]], ())
    assert share_memory([torch.zeros(2), base[:3], base[3:], base[2:]], (2, 3)), "both of them changed"
    assert share_memory([base[2:], torch.zeros(2), base], (1, 2)), "the changed one behind the other"


def test_dicts_are_replaced_before_their_content_is_looked_at():
    spec = flatten(({"sigmas": object()},), [], replace=lambda options: {})
    assert rebuild(spec, []) == ({},)


class Flag(int):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "builtins.object"),
        (Flag(1), "Flag"),
        (Derived(torch.ones(2)), "Derived"),
        (Elsewhere(torch.ones(4)), "Elsewhere"),
        (object.__new__(PerFrame), "PerFrame"),
    ],
    ids=["unknown", "a constant of a subclass", "more than its fields", "more than its slots", "slots not filled"],
)
def test_object_of_which_not_all_can_be_told_is_refused_with_its_type(value, said):
    with pytest.raises(UnsupportedArgument, match=said):
        flatten((value,), [])


def test_function_that_a_host_has_a_constant_for_is_that_constant(monkeypatch):
    def known():
        """Of this module."""

    with pytest.raises(UnsupportedArgument, match="a function"):
        flatten([known], [])
    monkeypatch.setitem(STAND_INS, __name__, {known: "known"}.get)
    assert rebuild(flatten([known], []), []) == ["known"]
    with pytest.raises(UnsupportedArgument, match="a function"):
        flatten([lambda: None], [])
