"""The hash of a block's code: whatever can change what it computes makes another kind."""

import functools
import os
import os as system
import sys
import types
from os import environ, getenv

import numpy
import pytest
import torch
from comfy_accel.accel.fingerprint.code_facts import facts_of, find_changed_lists
from comfy_accel.accel.fingerprint.kinds import describe
from comfy_accel.accel.fingerprint.plain_values import Indescribable
from torch import nn


def digest(block):
    return describe(block).digest


class Runs(nn.Linear):
    """Runs a function that it holds."""

    offset = 1.0
    table: dict = {}

    def __init__(self, function=None, number=0):
        super().__init__(2, 2)
        self.function = function
        self.number = number

    def forward(self, x):
        return self.function(super().forward(x)) + self.offset


def test_plain_class_attribute_that_the_code_reads_makes_another_kind(monkeypatch):
    before = digest(Runs())
    monkeypatch.setattr(Runs, "table", {"never": "read"})
    assert digest(Runs()) == before
    monkeypatch.setattr(Runs, "offset", 5.0)
    assert digest(Runs()) != before


def test_what_only_saving_reads_makes_no_other_kind(monkeypatch):
    monkeypatch.setattr(Runs, "as_state_dict", lambda self: self.saved_as, raising=False)
    block, other = Runs(), Runs()
    other.saved_as = "float16"
    assert digest(block) == digest(other)


FACTOR = 1.0
OPTIONS = types.SimpleNamespace(factor=1.0, unread=1.0)
calls = 0
answers: dict = {}
loaded: list = []


def in_use():
    return calls > 0 and len(loaded) > 0


def counted(x):
    global calls
    calls += 1
    answers[calls] = calls
    in_use()
    return x * FACTOR * OPTIONS.factor


class Counts(nn.Linear):
    def forward(self, x):
        return counted(super().forward(x))


def wrapped(function, factor):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * factor

    return wrapper


def test_wrapper_around_a_method_counts_with_what_it_closes_over(monkeypatch):
    own = Counts.forward
    digests = {digest(Counts(2, 2))}
    for factor in (2.0, 3.0):
        monkeypatch.setattr(Counts, "forward", wrapped(own, factor))
        digests.add(digest(Counts(2, 2)))
    assert len(digests) == 3
    monkeypatch.setattr(Counts, "forward", wrapped(own, torch.ones(1)))
    with pytest.raises(Indescribable, match="a function around a Tensor"):
        describe(Counts(2, 2))


def test_plain_global_that_the_code_reads_makes_another_kind(monkeypatch):
    before = digest(Counts(2, 2))
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "FACTOR", 5.0)
        assert digest(Counts(2, 2)) != before
    with monkeypatch.context() as patch:
        patch.setattr(OPTIONS, "factor", 5.0)
        assert digest(Counts(2, 2)) != before
    monkeypatch.setattr(OPTIONS, "unread", 5.0)
    assert digest(Counts(2, 2)) == before


def test_global_that_leads_back_to_itself_stops_nobody(monkeypatch):
    around = types.SimpleNamespace(factor=types.SimpleNamespace())
    around.factor.back = [{"around": around, "factor": around.factor}]
    monkeypatch.setitem(globals(), "OPTIONS", around)
    assert digest(Counts(2, 2)) == digest(Counts(2, 2))
    held = Runs()
    held.function = Holder()
    held.function.back = held.function
    with pytest.raises(Indescribable, match="inside of itself"):
        describe(held)


class Holder:
    pass


def test_what_the_code_counts_and_keeps_for_itself_makes_no_other_kind(monkeypatch):
    before = digest(Counts(2, 2))
    counted(1)
    monkeypatch.setitem(globals(), "loaded", [torch.ones(1)])
    assert calls and digest(Counts(2, 2)) == before


class Asks(Runs):
    def forward(self, x):
        return x * getattr(self, "number")  # noqa: B009  That it is not an attribute in the code is the point.


def test_number_counts_that_is_read_by_a_constant_name_or_by_a_held_function():
    def read(block):
        return block.number

    assert digest(Asks(number=1)) != digest(Asks(number=5))
    assert digest(Runs(read, number=1)) != digest(Runs(read, number=5))
    assert digest(Runs(number=1)) == digest(Runs(number=5))


def test_annotations_are_no_code_that_a_call_runs():
    """From Python 3.14 on they are a function of the class, which names what it annotates."""

    class Annotated(Runs):
        def __annotate_func__(self, form):
            return {"number": int}

    assert digest(Annotated(number=1)) == digest(Annotated(number=5))


class Scaled:
    """As core's newer layers hold their cast weights: what it does begins where a `with` statement enters it."""

    factor = 2.0

    def __init__(self, x):
        self.x = x

    def __enter__(self):
        return self.x * self.factor

    def __exit__(self, *error):
        return None


def test_code_that_a_with_statement_enters_and_leaves_counts(monkeypatch):
    def enters(x):
        with Scaled(x) as scaled:
            return scaled

    before = digest(Runs(enters))
    for name in ("__enter__", "__exit__"):
        with monkeypatch.context() as patch:
            patch.setattr(Scaled, name, lambda self, *error: self.x)
            assert digest(Runs(enters)) != before
    assert digest(Runs(enters)) == before


class Registry:
    step = numpy.float32(0.5)

    @classmethod
    def scaled(cls, x):
        return x * float(cls.step)


def test_class_that_code_closes_over_is_told_whole(monkeypatch):
    def around(cls):
        return lambda x: cls.scaled(x)

    known = describe(Runs(around(Registry)))
    assert not known.code.opaque
    monkeypatch.setattr(Registry, "step", numpy.float32(0.25))
    assert digest(Runs(around(Registry))) != known.digest


def test_steps_that_newer_pythons_make_of_two_are_read_as_both():
    """From 3.13 on a variable that is read right after another is set, from 3.12 on an attribute of `super()`."""

    def fills(parts, kept=[]):  # noqa: B006
        for part in parts: kept.append(part)  # noqa: E701  # fmt: skip

    class Table(dict):
        def hands_back(self, parts):
            for part in parts: return self, part  # noqa: E701  # fmt: skip

        def changes(self):
            super().update(a=1)

        def passes_on(self):
            return len(super().kept)

    assert find_changed_lists(fills.__code__) == {"parts", "kept"}
    assert "self" in facts_of(Table.hands_back.__code__).whole
    assert facts_of(Table.changes.__code__).mutates == {None}
    assert {"kept", "self"} & facts_of(Table.passes_on.__code__).whole == {"kept"}


def test_list_that_code_shares_with_a_function_in_it_is_known_to_be_filled():
    def outside(x, kept=[]):  # noqa: B006
        kept.append(x)
        return lambda: kept

    inside = lambda x, kept=[]: lambda part: kept.append(part)  # noqa: B006, E731
    nowhere = lambda x, kept=[]: lambda part: part * kept[0]  # noqa: B006, E731
    found = [find_changed_lists(function.__code__) for function in (outside, inside, nowhere)]
    assert ["kept" in names for names in found] == [True, True, False]


SET_AT_START = os.environ.get("ACCEL_TEST_FACTOR", "1")


def asked(name):
    return os.environ[name]


def imports_it(x):
    from os import getenv as ask

    return x * float(ask("ACCEL_TEST_FACTOR", "1"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(os.environ["ACCEL_TEST_FACTOR"]),
        lambda x: x * float(os.environ.get("ACCEL_TEST_FACTOR", 1)),
        lambda x: x * float(os.getenv("ACCEL_TEST_FACTOR", 1)),
        lambda x: x * float(system.getenv("ACCEL_TEST_FACTOR", 1)),
        lambda x: x * float(environ["ACCEL_TEST_FACTOR"]),
        lambda x: x * float(getenv("ACCEL_TEST_FACTOR", 1)),
        lambda x: x * float(asked("ACCEL_TEST_FACTOR")),
        imports_it,
    ],
)
def test_code_that_reads_the_environment_in_a_call_is_refused(function):
    with pytest.raises(Indescribable, match="which reads variables of the environment in each call"):
        describe(Runs(function))


def test_code_that_read_the_environment_when_it_was_imported_is_told():
    assert not describe(Runs(lambda x: x * float(SET_AT_START) + len(os.sep))).code.opaque


def test_code_of_an_installed_package_may_read_the_environment_and_is_not_saved(monkeypatch):
    scope = {"__name__": "a_package", "os": os}
    code = compile("def ask(x): return x * float(os.environ.get('A', 1))", f"{os.sep}site-packages{os.sep}a.py", "exec")
    monkeypatch.setitem(sys.modules, "a_package", types.ModuleType("a_package"))
    ask = types.FunctionType(code.co_consts[0], scope)
    assert "the environment's variables" in describe(Runs(lambda x: ask(x))).code.opaque
