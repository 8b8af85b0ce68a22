"""A survey is kept for the model's next runs while all that it rests on stands, and is then what a new one would be."""

import copy
import functools
import gc
import pickle
import types
import weakref
from dataclasses import replace

import pytest
import torch
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.dispatch import compiled_layers
from comfy_accel.accel.dispatch.compiled_layers import Host, survey_model
from comfy_accel.accel.fingerprint.survey import KeptSurveys, survey
from comfy_accel.accel.modules.snapshot import LayoutSnapshot
from comfy_accel.accel.modules.substitution import Order, substitute
from kit.blocks import Wrapped
from kit.code_swaps import attribute
from torch import nn

SETTINGS = CompileSettings(backend="eager")


def act(x):
    return torch.tanh(x)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale, self.index, self.shifts = 1.0, 0, []

    def forward(self, x):
        return x + act(self.second(self.first(self.norm(x)))) * self.scale + sum(self.shifts)


class OtherBlock(Block):
    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.eval().requires_grad_(False)


@pytest.fixture
def surveys(monkeypatch):
    """One item for each survey that was made."""
    made = []

    def counted(*args, **kwargs):
        made.append(1)
        return survey(*args, **kwargs)

    monkeypatch.setattr(compiled_layers, "survey", counted)
    return made


def look(model, host=None, settings=SETTINGS):
    """The survey at the start of a run, which must be what a new one is."""
    host = host or _HOST
    found = survey_model(model, settings, host, KeptSurveys.get_or_create(model))
    anew = survey(model, settings.min_repetitions, host.ignored, host.wraps, host.plain, host.traceable)
    assert [(region.path, region.block, region.kind) for region in found.regions] == [
        (region.path, region.block, region.kind) for region in anew.regions
    ]
    assert found.left_eager == anew.left_eager
    return found


def is_kept(model, surveys, host=None):
    before = len(surveys)
    look(model, host)
    return len(surveys) == before


_HOST = Host()


def set_weight(holder, name, tensor):
    holder._parameters[name] = tensor


def block(model):
    return model.blocks[1]


CHANGES = {
    "a weight of another type": lambda model: set_weight(block(model).first, "weight", torch.zeros(4, 4).half()),
    "a weight of another size": lambda model: set_weight(block(model).first, "weight", torch.zeros(6, 4)),
    "a weight that lies otherwise": lambda model: set_weight(block(model).first, "weight", torch.zeros(4, 4).T),
    "a weight cast in its place": lambda model: setattr(block(model).first.weight, "data", torch.zeros(4, 4).double()),
    "a weight of a class of its own": lambda model: set_weight(
        block(model).first, "weight", Wrapped(torch.zeros(4, 4))
    ),
    "a weight more in a layer": lambda model: set_weight(block(model).first, "scale_weight", torch.ones(1)),
    "no weight where one was": lambda model: block(model).second._parameters.update(bias=None),
    "the dict of a layer's weights": lambda model: vars(block(model).first).update(
        _parameters={"weight": torch.zeros(4, 4).half()}
    ),
    "a buffer": lambda model: block(model).first.register_buffer("shift", torch.zeros(4)),
    "a weight that two layers share": lambda model: setattr(block(model).second, "weight", block(model).first.weight),
    "an item of a list": lambda model: block(model).shifts.append(1.0),
    "another list": lambda model: setattr(block(model), "shifts", [1.0]),
    "a new setting": lambda model: setattr(block(model), "more", 2.0),
    "training": lambda model: model.train(),
    "a part more": lambda model: block(model).add_module("more", nn.Linear(4, 4)),
    "a block more": lambda model: model.blocks.append(Block()),
    "a block less": lambda model: model.blocks.pop(2),
    "a hook of a part": lambda model: block(model).norm.register_forward_hook(lambda *_: None),
    "a module that has become a block": lambda model: setattr(model, "stem", Block()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_survey_rests_on_is_noticed_when_it_changes(change, surveys):
    model = Model()
    look(model)
    assert is_kept(model, surveys)
    CHANGES[change](model)
    assert not is_kept(model, surveys)


def test_replaced_code_is_noticed_and_what_is_known_of_the_former_is_kept_beside(surveys):
    """What may be replaced is in test_current_code.py."""
    model = Model()
    look(model)
    with attribute(Block, "forward", lambda self, x: x):
        assert not is_kept(model, surveys)
        assert is_kept(model, surveys)
    assert is_kept(model, surveys)


KEEPS = {
    "values": lambda model: block(model).first.weight.add_(1),
    "weights with LoRA in them": lambda model: setattr(block(model).first, "weight", nn.Parameter(torch.ones(4, 4))),
    "another device": lambda model: model.to("meta"),
    "what its code does not read": lambda model: setattr(block(model), "index", 3),
    "a weight beside the blocks": lambda model: set_weight(model.stem, "weight", torch.zeros(9, 4)),
    "a list like the one before": lambda model: setattr(block(model), "shifts", []),
    "a hook of a block": lambda model: block(model).register_forward_hook(lambda *_: None),
    "a copy of the model": copy.deepcopy,
    "a forward that was put back": lambda model: setattr(block(model), "forward", block(model).forward),
}


def test_list_in_the_place_of_one_like_it_is_followed(surveys):
    model = Model()
    block(model).shifts.append(1.0)
    look(model)
    block(model).shifts = [1.0]
    assert is_kept(model, surveys)
    block(model).shifts.append(2.0)
    assert not is_kept(model, surveys)


@pytest.mark.parametrize("change", KEEPS)
def test_what_decides_no_kind_makes_no_new_survey(change, surveys):
    model = Model()
    look(model)
    KEEPS[change](model)
    assert is_kept(model, surveys)
    with substitute({block(model): lambda inner, x: inner(x)}, Order.CACHED):
        assert is_kept(model, surveys)


def test_form_of_a_quantised_weight_is_compared_and_the_tensors_in_it(surveys):
    model = Model()

    def store(tag, inner):
        set_weight(block(model).first, "weight", Wrapped(inner, tag))

    store("8", torch.zeros(4, 4))
    look(model)
    store("8", torch.ones(4, 4))
    assert is_kept(model, surveys)
    for tag, inner in (("4", torch.zeros(4, 4)), ("4", torch.zeros(4, 4).half())):
        store(tag, inner)
        assert not is_kept(model, surveys)


class Streams:
    """A host that keeps account of each layer's weights on the layer, and shows blocks without that."""

    def plain(self, module):
        made = object.__new__(type(module))
        kept = {name: value for name, value in vars(module).items() if name != "place"}
        kept["_modules"] = {name: self.plain(child) for name, child in module._modules.items()}
        if not kept.get("functions", ()):
            kept.pop("functions", None)
        made.__dict__.update(kept)
        return made


def test_what_a_host_keeps_on_streamed_blocks_is_compared(surveys):
    model, host = Model(), Host(plain=Streams().plain)
    layer = block(model).first
    layer.place, layer.functions = (1, 2), []
    look(model, host)
    assert is_kept(model, surveys, host)
    layer.place = 3, 4  # the memory of a weight
    assert is_kept(model, surveys, host)
    layer.cast = True
    assert not is_kept(model, surveys, host)
    layer.cast = False
    assert not is_kept(model, surveys, host)
    del layer.place
    assert not is_kept(model, surveys, host)


def test_surveys_are_of_one_model_and_one_request(surveys):
    one, other = Model(), Model()
    look(one)
    assert not is_kept(other, surveys)
    assert is_kept(one, surveys) and is_kept(other, surveys)
    assert not is_kept(one, surveys, Host(plain=lambda module: module))
    before = len(surveys)
    assert not look(one, settings=CompileSettings(min_repetitions=4)).regions
    assert len(surveys) == before + 1
    assert is_kept(one, surveys)


def test_surveys_do_not_follow_copies_of_the_model(surveys):
    model = Model()
    look(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert not is_kept(copied, surveys)


def test_block_that_was_left_eager_is_looked_at_again(surveys):
    model = Model()
    block(model).forward = lambda x: x
    assert len(look(model).left_eager) == 1
    del block(model).forward
    assert not look(model).left_eager


class Patched(torch.Tensor):
    """A weight that says on itself what is added to it."""


class Settings:
    def __init__(self, chosen):
        self.chosen = chosen


def patched_weight():
    made = torch.zeros(4, 4).as_subclass(Patched)
    made.patches = [object()]
    return made


def hooked_convolution(model):
    block(model).spread = nn.Conv2d(4, 4, 1)
    return block(model).spread.register_forward_hook(lambda *_: None)


EAGER = {
    "a forward replaced": (
        lambda model: setattr(block(model), "forward", lambda x: x),
        {
            "by another": lambda model: setattr(block(model), "forward", lambda x: x + 1),
            "by a wrapper of its class's": lambda model: wrap_block(model),
            "by none": lambda model: delattr(block(model), "forward"),
        },
    ),
    "a weight that no graph can take": (
        lambda model: set_weight(block(model).first, "weight", patched_weight()),
        {
            "with another LoRA": lambda model: set_weight(block(model).first, "weight", patched_weight()),
            "by a plain one": lambda model: set_weight(block(model).first, "weight", nn.Parameter(torch.zeros(4, 4))),
            "by none": lambda model: set_weight(block(model).first, "weight", None),
        },
    ),
    "a setting of no known type": (
        lambda model: setattr(block(model), "scale", object()),
        {"by a number": lambda model: setattr(block(model), "scale", 2.0)},
    ),
    "an object with such a setting": (
        lambda model: setattr(block(model), "scale", Settings(object())),
        {"set anew": lambda model: setattr(block(model).scale, "chosen", 1)},
    ),
    "a hook of a part": (
        hooked_convolution,
        {
            "removed": lambda model: block(model).spread._forward_hooks.clear(),
            "and another": lambda model: block(model).spread.register_forward_hook(lambda *_: None),
            "with its part": lambda model: delattr(block(model), "spread"),
        },
    ),
}


@pytest.mark.parametrize(
    ("why", "change"), [(why, change) for why, (_, changes) in EAGER.items() for change in changes]
)
def test_block_left_eager_is_looked_at_again_once_what_it_is_left_for_has_changed(why, change, surveys):
    model, (leave, changes) = Model(), EAGER[why]
    leave(model)
    assert [path for path, _ in look(model).left_eager] == ["blocks.1"]
    assert is_kept(model, surveys)
    block(model).second.weight.data.add_(1)
    assert is_kept(model, surveys)
    changes[change](model)
    assert not is_kept(model, surveys)
    assert is_kept(model, surveys)


class Stands(nn.Module):
    """A part that answers for another, and has nothing of torch's itself."""

    def __init__(self, other):
        object.__setattr__(self, "other", other)

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "other"), name)


def test_module_without_what_torch_puts_on_modules_is_surveyed_and_kept(surveys):
    model = Model()
    model.stem = Stands(model.stem)
    look(model)
    assert is_kept(model, surveys)
    set_weight(block(model).first, "weight", torch.zeros(6, 4))
    assert not is_kept(model, surveys)


def test_no_weight_of_a_block_left_eager_is_kept(surveys):
    model = Model()
    set_weight(block(model).first, "weight", patched_weight())
    look(model)
    gone = weakref.ref(block(model).first.weight)
    set_weight(block(model).first, "weight", nn.Parameter(torch.zeros(4, 4)))
    assert gone() is None


def test_part_that_gets_a_hook_or_forward_is_called_as_it_is_until_it_has_none(surveys):
    model = Model()
    kinds = look(model).kinds
    hook = block(model).norm.register_forward_hook(lambda *_: None)
    assert look(model).kinds != kinds
    hook.remove()
    assert look(model).kinds == kinds
    block(model).norm.forward = lambda x: x
    assert look(model).kinds != kinds
    del block(model).norm.forward
    assert look(model).kinds == kinds


def test_model_with_surveys_goes_when_nobody_needs_it_and_so_does_a_block_that_was_replaced(surveys):
    model = Model()
    look(model)
    gone = weakref.ref(block(model))
    model.blocks[1] = Block()
    look(model)
    assert gone() is None
    gc.disable()
    try:
        gone = weakref.ref(model), weakref.ref(block(model))
        del model
        assert [of() for of in gone] == [None, None]
    finally:
        gc.enable()


def test_few_surveys_are_kept_and_none_of_a_model_that_was_made_otherwise(surveys):
    model = Model()
    for index in range(9):
        with attribute(Block, "forward", types.FunctionType(OtherBlock.forward.__code__, {"n": index})):
            look(model)
    assert len(KeptSurveys.get_or_create(model)._kept) == 4
    block(model).scale = 3.0
    set_weight(block(model).first, "weight", torch.zeros(6, 4))
    look(model)
    assert len(KeptSurveys.get_or_create(model)._kept) == 1


def test_another_thread_may_survey_the_model_meanwhile(surveys, monkeypatch):
    model, own = Model(), LayoutSnapshot.changed_part

    def interrupted(layout, model):
        monkeypatch.setattr(LayoutSnapshot, "changed_part", own)
        look(model, settings=replace(SETTINGS, min_repetitions=2))
        return own(layout, model)

    found = look(model)
    monkeypatch.setattr(LayoutSnapshot, "changed_part", interrupted)
    assert look(model) is found


def wrapped_by_a_pack(function):
    """As another pack wraps a forward: a new wrapper at each call."""

    def forward(self, *args):
        return function(self, *args)

    return forward


def wrap_block(model):
    block(model).forward = types.MethodType(wrapped_by_a_pack(Block.forward), block(model))


def wrap_class(model, monkeypatch):
    outer = types.FunctionType(wrapped_by_a_pack.__code__, {**globals(), "__name__": "a_pack"}, "wrapped")
    monkeypatch.setattr(Block, "forward", outer(Block.forward))


@pytest.mark.parametrize("wraps", [wrap_block, wrap_class])
def test_another_wrapper_around_a_forward_is_another_survey(surveys, monkeypatch, wraps):
    model = Model()
    look(model)
    change = functools.partial(wraps, model, *([monkeypatch] if wraps is wrap_class else ()))
    for _ in range(2):
        change()
        assert not is_kept(model, surveys) and is_kept(model, surveys)
        found = look(model)
        assert [region.wrapped is not None for region in found.regions].count(True) == (1 if wraps is wrap_block else 3)
        assert all(
            region.wrapped is None or region.wrapped.stands(region.block, vars(region.block).get("forward"))
            for region in found.regions
        )
