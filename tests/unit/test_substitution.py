"""Stand-ins: order of layers, and modules put back exactly, whatever ends the call."""

import sys

import pytest
import torch
from comfy_accel.accel.modules.substitution import (
    Order,
    StandIn,
    Substitution,
    has_foreign_forward,
    substitute,
)


class AddOne(torch.nn.Module):
    def forward(self, x):
        return x + 1


def times_ten(inner, x):
    return inner(x) * 10


def plus_five(inner, x):
    return inner(x) + 5


def test_layer_sees_call_and_result_and_what_came_meanwhile_is_left_alone():
    module = AddOne()
    with substitute({module: times_ten}, Order.CACHED):
        assert module(1) == 20 and not has_foreign_forward(module)
    assert module(1) == 2
    assert "forward" not in module.__dict__
    with substitute({module: times_ten}, Order.CACHED):
        module.__dict__["forward"] = late = lambda x: 7
    assert module.__dict__["forward"] is late


@pytest.mark.parametrize("cached_first", [True, False])
def test_cached_layer_is_outermost_whichever_came_first(cached_first):
    module = AddOne()
    steps = [({module: times_ten}, Order.CACHED), ({module: plus_five}, Order.COMPILED)]
    first, second = steps if cached_first else reversed(steps)
    with substitute(*first), substitute(*second):
        assert module(1) == ((1 + 1) + 5) * 10
    assert "forward" not in module.__dict__


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_exception_puts_modules_back(error):
    modules = [AddOne(), AddOne()]
    with substitute({modules[0]: plus_five}, Order.COMPILED):
        with pytest.raises(error), substitute(dict.fromkeys(modules, times_ten), Order.CACHED):
            raise error
        assert [module(1) for module in modules] == [7, 2]
    assert all("forward" not in module.__dict__ for module in modules)


def test_same_layer_nested_is_taken_away_one_at_a_time():
    module = AddOne()
    with substitute({module: times_ten}, Order.CACHED):
        with substitute({module: times_ten}, Order.CACHED):
            assert module(1) == 200
        assert module(1) == 20
    assert "forward" not in module.__dict__


def test_forward_of_somebody_else_is_called_and_put_back():
    module = AddOne()

    def foreign(x):
        return x + 100

    module.forward = foreign
    assert has_foreign_forward(module)
    with substitute({module: times_ten}, Order.CACHED):
        assert has_foreign_forward(module)
        assert module(1) == 1010
    assert module.__dict__["forward"] is foreign


def test_context_that_is_entered_again_calls_the_forward_of_then():
    modules = [AddOne(), AddOne()]
    again = Substitution(dict.fromkeys(modules, times_ten), Order.CACHED)
    with again.put_in_place():
        assert modules[0](1) == 20
        first = modules[1].__dict__["forward"]
    modules[0].forward = foreign = lambda x: x + 100
    for _ in range(2):
        with again.put_in_place():
            assert modules[0](1) == 1010
            assert modules[1].__dict__["forward"] is first, "made anew"
        assert modules[0].__dict__["forward"] is foreign


def test_context_that_is_entered_again_calls_the_forward_that_the_class_has_then(monkeypatch):
    module, other = AddOne(), torch.nn.ReLU()
    again = Substitution({module: times_ten, other: times_ten}, Order.CACHED)
    with again.put_in_place():
        assert module(1) == 20
    monkeypatch.setattr(AddOne, "forward", lambda self, x: x + 2)
    with again.put_in_place():
        assert module(1) == 30 and other(torch.ones(1)) == 10
    monkeypatch.setattr(AddOne, "forward", staticmethod(plus_two))
    with again.put_in_place():
        assert module(1) == 30
    assert module(1) == 3


def plus_two(x):
    return x + 2


def test_context_that_is_entered_again_before_it_ends_is_left_in_any_order():
    module = AddOne()
    again = Substitution({module: times_ten}, Order.CACHED)
    first, second = again.put_in_place(), again.put_in_place()
    first.__enter__()
    second.__enter__()
    assert module(1) == 200
    first.__exit__(None, None, None)
    assert module(1) == 20
    second.__exit__(None, None, None)
    assert "forward" not in module.__dict__


def test_one_layer_is_called_without_a_frame_in_between():
    callers = []

    def layer(inner, x):
        callers.append(sys._getframe(1).f_code.co_name)
        return inner(x)

    module = AddOne()
    with substitute({module: layer}, Order.CACHED):
        module.forward(1)
    assert callers == [sys._getframe().f_code.co_name]


def test_context_is_entered_where_somebody_has_put_a_forward_over_its_own():
    module = AddOne()
    again = Substitution({module: times_ten}, Order.CACHED)
    with again.put_in_place():
        under = module.forward
        module.__dict__["forward"] = late = lambda x: under(x) + 1
        with again.put_in_place():
            assert module(1) == 210
        assert module.__dict__["forward"] is late and module(1) == 21


def around(kept):
    return lambda x: kept(x) + 100


@pytest.mark.parametrize("others", [0, 1])
def test_stand_in_that_somebody_has_kept_calls_nothing_but_the_forward_when_the_call_is_over(others):
    module = AddOne()
    again = Substitution({module: times_ten}, Order.COMPILED)
    for _ in range(2):
        with again.put_in_place(), substitute({module: plus_five} if others else {}, Order.CACHED):
            module.forward = kept = around(module.__dict__["forward"])
            assert module(1) == 120 + 5 * others
        assert module.forward is kept and module(1) == 102
        del module.forward


def test_interrupt_while_stand_ins_are_put_in_place_leaves_none(monkeypatch):
    modules = [AddOne(), AddOne(), AddOne()]
    modules[1].forward = foreign = lambda x: x + 100
    again, make = Substitution(dict.fromkeys(modules, times_ten), Order.COMPILED), StandIn.make

    def interrupt(own, is_foreign, items):
        if is_foreign:
            raise KeyboardInterrupt
        return make(own, is_foreign, items)

    with substitute({modules[2]: plus_five}, Order.CACHED):
        with monkeypatch.context() as patch:
            patch.setattr(StandIn, "make", staticmethod(interrupt))
            with pytest.raises(KeyboardInterrupt), again.put_in_place():
                pytest.fail("was entered")
        assert [module(1) for module in modules] == [2, 101, 7] and modules[1].__dict__["forward"] is foreign
        with again.put_in_place():
            assert [module(1) for module in modules] == [20, 1010, 25]
    assert ["forward" in module.__dict__ for module in modules] == [False, True, False]
