"""What functions of other programs have in their closures: it tells kinds apart, and is seen to change."""

import pytest
import torch
from comfy_accel.accel.fingerprint.code_hash import CodeReader
from comfy_accel.accel.fingerprint.kinds import describe
from comfy_accel.accel.fingerprint.plain_values import Indescribable
from torch import nn


class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Amount:
    def __init__(self, amount=1.0):
        self.amount, self.calls = amount, 0

    def times(self, x):
        return x * self.amount

    def count(self):
        self.calls += 1
        return self.calls


def by_method(amount):
    times = amount.times
    return lambda x: times(x)


def by_default(amount):
    return lambda x, times=amount.times: times(x)


def in_list(amount):
    table = [amount.times]
    return lambda x: table[0](x)


def in_dict(amount):
    table = {"times": amount.times}
    return lambda x: table["times"](x)


def in_object(amount):
    return lambda x: amount.times(x)


@pytest.fixture
def around(monkeypatch):
    """Puts a function around the layer's forward; gives its kind, and whether what was read for it stands."""
    own = Layer.forward

    def put(function):
        monkeypatch.setattr(Layer, "forward", lambda self, x: function(own(self, x)))
        reader = CodeReader()
        return describe(Layer(2, 2), reader).digest, reader.notes.snapshot().is_current

    return put


@pytest.mark.parametrize("make", [by_method, by_default, in_list, in_dict, in_object])
def test_object_behind_a_method_makes_another_kind_by_what_the_method_reads_and_is_seen_to_change(around, make):
    assert around(make(Amount(1.0)))[0] == around(make(Amount(1.0)))[0] != around(make(Amount(2.0)))[0]
    amount = Amount(1.0)
    _, is_current = around(make(amount))
    amount.calls = 5
    assert is_current()
    amount.amount = 2.0
    assert not is_current()


@pytest.mark.parametrize("table", [[1.0], ([1.0],), {0: 1.0}, {0: 1.0, "with": torch.ones(2)}, [lambda x: x]])
def test_what_others_change_in_a_list_or_dict_of_a_closure_is_seen(around, table):
    _, is_current = around(lambda x: (x, table))
    assert is_current()
    (table[0] if isinstance(table, tuple) else table)[0] = 2.0
    assert not is_current()


def test_numbers_beside_a_tensor_in_a_dict_of_a_closure_make_another_kind(around):
    def function(amount):
        table = {"amount": amount, "with": torch.ones(600)}
        return lambda x: x * table["amount"]

    assert around(function(1.0))[0] == around(function(1.0))[0] != around(function(2.0))[0]


def test_function_around_a_method_of_a_module_is_refused(around):
    with pytest.raises(Indescribable, match="a function around a Linear"):
        around((lambda forward: lambda x: forward(x))(nn.Linear(2, 2).forward))


def test_function_that_fills_a_list_of_its_own_beside_what_is_around_it_is_described(around):
    table = [2.0]

    def function(x):
        made = []
        made.append(x * table[0])
        return made[0]

    assert around(function)[1]()
