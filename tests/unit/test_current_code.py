"""Code and settings that change while a model is called: each call gives what the uncompiled model gives in it."""

import contextlib
import functools
from unittest.mock import Mock

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch import current_code
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.dispatch.compiled_layers import Host, survey_model
from comfy_accel.accel.fingerprint.survey import KeptSurveys, survey
from comfy_accel.accel.hosts.diffusers import pipeline as module_host
from comfy_accel.accel.hosts.diffusers.component_call import call_of
from comfy_accel.accel.modules.substitution import Order, Substitution
from kit import code_swaps
from kit.blocks import Stop, layers_of
from kit.code_swaps import SWAPS, Network, assert_calls_follow_the_code, attribute
from kit.thorough import thorough_except

EAGER = CompileSettings(backend="eager")
X = torch.randn(1, 4, 3, 2, generator=torch.Generator().manual_seed(1))


with_others = GraphCache()
"""One for all swaps, in which the plain code is compiled once."""


class Run:
    """A model's blocks compiled for a run; `swap` is in place as the model is called."""

    def __init__(self, net, host=None, cache=None):
        self.net = net
        self.cache = GraphCache() if cache is None else cache
        layers = layers_of(net, self.cache, host)
        self.runners = [layer for layer in layers.values() if isinstance(layer, BlockRunner)]
        assert len(self.runners) == 2
        self._place = Substitution(layers, Order.COMPILED)

    def __call__(self, swap=contextlib.nullcontext):
        return self.call(swap, True)

    def call(self, swap, is_compiled):
        with torch.no_grad(), self._place.put_in_place() if is_compiled else contextlib.nullcontext(), swap():
            return self.net(X)

    @property
    def eager_calls(self):
        return sum(runner.eager_calls for runner in self.runners)


OF_ONE_KIND = ("a weight", "a layer by one with other weights")
"""Swaps of what graphs are given."""


def of(found):
    return found.kinds, found.left_eager, [region.path for region in found.regions]


@pytest.mark.parametrize("what", [what for what in SWAPS if what != "torch's functions"])
def test_run_that_begins_under_other_code_is_surveyed_for_it(what):
    net, host, kept = Network(), Host(), KeptSurveys()
    first = survey_model(net, EAGER, host, kept)
    with SWAPS[what](net, 0.5):
        found, anew = survey_model(net, EAGER, host, kept), survey(net)
        assert (found.kinds, found.left_eager) == (anew.kinds, anew.left_eager)
        assert what in OF_ONE_KIND or of(found) != of(first)
    assert survey_model(net, EAGER, host, kept).kinds == survey(net).kinds


NAMES = list(SWAPS)
OF_BLOCKS = NAMES[NAMES.index("a number of a block") : NAMES.index("a function that torch's layers call")]
QUICK = (
    *("a function of a module", "a default of a function", "the content of a cell", "the state of an object"),
    *("an item of a dict", "a class without instances", "a property", "the forward of the block's class"),
    *("a function that torch's layers call", "a method of modules by one in its name", "torch's functions"),
    *OF_BLOCKS,
)
"""A call notices other code as it does these; that a survey notices each of the others is asked above."""


@pytest.mark.parametrize("first", thorough_except(["plain", "swapped"], "plain"))
@pytest.mark.parametrize("what", thorough_except(SWAPS, *QUICK))
def test_call_is_of_the_code_and_settings_that_stand_in_it(what, first):
    run = Run(Network(), cache=with_others if first == "plain" else None)
    before = run.cache.statistics()["hits"]
    assert_calls_follow_the_code(what, run.net, run.call, first, (0.5,) if first == "plain" else (0.5, 1.5))
    assert run.cache.statistics()["hits"] > before


@pytest.mark.parametrize("what", ["a function of a module", "a method of torch's layers", "a weight"])
def test_calls_of_a_module_that_is_accelerated_are_of_the_code_that_stands_in_them(what, cache):
    net = Network()

    def call(swap, is_compiled):
        if is_compiled and call_of(net) is None:
            module_host.accelerate_module(net, backend="eager", measured=False)
        with torch.no_grad(), swap():
            return net(X)

    assert_calls_follow_the_code(what, net, call)
    assert cache.statistics()["hits"]


@pytest.fixture
def few_surveys(monkeypatch):
    """As many as a run makes at most."""
    monkeypatch.setattr(current_code, "MOST_SURVEYS", 4)
    return 4


def made_anew():
    """A function that closes over an equal number, another each time."""
    return attribute(code_swaps, "activation", code_swaps.softening(float("0.5")))


def test_what_is_made_anew_for_each_call_and_is_the_same_costs_one_more_graph(few_surveys):
    run = Run(Network())
    with torch.no_grad():
        plain = run.net(X)
        with made_anew():
            swapped = run.net(X)
    for number in range(few_surveys + 1):
        assert torch.allclose(run(made_anew), swapped, atol=1e-5)
        assert torch.allclose(run(), plain, atol=1e-5)
        if not number:
            graphs = run.cache.statistics()["graphs"], run.eager_calls
    assert (run.cache.statistics()["graphs"], run.eager_calls) == graphs == (2, 0)


def test_hook_on_all_modules_that_is_put_on_in_a_run_costs_one_survey(few_surveys):
    run, hooks = Run(Network()), torch.nn.modules.module._global_forward_hooks
    run()
    for _ in range(few_surveys + 1):
        run(functools.partial(item_added, hooks))
    before = run.eager_calls
    run()
    assert run.eager_calls == before


@contextlib.contextmanager
def item_added(hooks):
    hooks[-1] = lambda module, args, out: None
    try:
        yield
    finally:
        del hooks[-1]


def test_model_that_cannot_be_surveyed_in_a_call_runs_eagerly_there(monkeypatch):
    net = Network()
    run = Run(net, Host(interrupts=(Stop,)))
    plain = run()
    swap = functools.partial(attribute, code_swaps, "activation", code_swaps.weaker)
    for error in (RuntimeError("simulated"), Stop()):
        with monkeypatch.context() as patch:
            patch.setattr("comfy_accel.accel.dispatch.compiled_layers.survey", fail := Mock(side_effect=error))
            if isinstance(error, Stop):
                with pytest.raises(Stop):
                    run(swap)
            else:
                with torch.no_grad(), swap():
                    expected = net(X)
                assert torch.allclose(run(swap), expected, atol=1e-5)
            assert fail.called
        assert torch.equal(run(), plain)
    assert torch.allclose(run(swap), expected, atol=1e-5)
    assert any(row["reason"] for row in fallbacks.rows())


class Staged(Network):
    def __init__(self):
        super().__init__()
        self.stage = torch.nn.Sequential(self.blocks[1])

    def forward(self, x):
        h = self.start(x.flatten(2).transpose(1, 2))
        return self.end(self.stage(self.blocks[0](h)))


@pytest.mark.parametrize("how", ["a hook", "a forward"])
def test_code_that_others_change_between_two_blocks_counts_from_there_on(how):
    net = Staged()
    undo = contextlib.ExitStack()

    def change(*_):
        undo.enter_context(attribute(code_swaps, "activation", code_swaps.weaker))

    if how == "a hook":
        net.stage.register_forward_pre_hook(change)
    else:
        inner = net.stage.forward
        net.stage.forward = lambda x: (change(), inner(x))[1]
    with torch.no_grad(), undo:
        expected = net(X)
    run = Run(net)
    for _ in range(3):
        with undo:
            assert torch.allclose(run(), expected, atol=1e-5)
    assert not run.eager_calls
