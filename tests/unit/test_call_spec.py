"""A call as constants and tensors, and back."""

import pytest
import torch
from comfy_accel.accel.call_spec import UnsupportedArgument, flatten, rebuild


def test_rebuild_is_the_inverse_of_flatten():
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(3)
    call = ((a, None, [b, 3, (c, "name")]), {"scale": 1.5, "flags": {"on": True, "x": a}})
    tensors = []
    spec = flatten(call, tensors)
    assert [id(t) for t in tensors] == [id(a), id(b), id(c), id(a)]
    (x, none, (y, three, (z, name))), kwargs = rebuild(spec, tensors)
    assert (x is a, none, y is b, three, z is c, name) == (True, None, True, 3, True, "name")
    assert kwargs["scale"] == 1.5 and kwargs["flags"]["on"] is True and kwargs["flags"]["x"] is a


def test_spec_is_hashable_and_tells_constants_apart():
    assert hash(flatten((1,), [])) and flatten((1,), []) != flatten((2,), [])


def test_dicts_are_replaced_before_their_content_is_looked_at():
    spec = flatten(({"sigmas": object()},), [], replace=lambda options: {})
    assert rebuild(spec, []) == ({},)


def test_unknown_object_is_refused_with_its_type():
    with pytest.raises(UnsupportedArgument, match="builtins.object"):
        flatten((object(),), [])


def test_constant_of_a_subclass_is_refused():
    class Flag(int):
        pass

    with pytest.raises(UnsupportedArgument):
        flatten((Flag(1),), [])
