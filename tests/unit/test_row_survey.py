"""Which inputs of a block grow with the batch: told at a batch of 1, without computing anything."""

import torch
from comfy_accel.accel.row_survey import RowSurvey
from comfy_accel.accel.substitution import Order, StandIn, set_aside, substituted


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, positions, modulation):
        return x * self.scale + positions + modulation


class Model(torch.nn.Module):
    """x: [B, T, 4], timestep: [B]; positions [1, T, 4] are the same for every image."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, timestep, hooks):
        for hook in hooks.get("wrappers", ()):
            hook()
        positions = torch.arange(x.shape[1] * 4.0).view(1, -1, 4)
        for block in self.blocks:
            x = block(x, positions, timestep.view(-1, 1, 1))
        if hooks.get("reads values"):
            x = x[: int(x.sum())]
        return x


GROWING = [{(0, 0), (2, 0)}] * 2
"""Of both blocks: rows of the image and of the modulation, not of the positions."""


def asked(hooks, batch=1, without_hooks=dict):
    """What the survey says of each block when it is asked within a call of the model."""
    model, answers, tensors = Model(), {}, {}
    survey = RowSurvey(model, {block: lambda call: list(call[0]) for block in model.blocks}, without_hooks)

    def asker(block):
        def layer(inner, *args):
            answers[block] = survey.growing(block, args)
            tensors[block] = args
            return inner(*args)

        return layer

    layers = {model: survey, **{block: asker(block) for block in model.blocks}}
    with torch.inference_mode(), substituted(layers, Order.COMPILED):
        out = model(torch.zeros(batch, 3, 4), torch.ones(batch), hooks)
    assert type(out) is torch.Tensor
    assert survey.growing(model.blocks[0], tensors[model.blocks[0]]) is None  # outside of a call
    return list(answers.values())


def test_positions_are_told_from_what_grows():
    assert asked({}) == GROWING


def test_larger_batch_is_not_asked_about():
    assert asked({}, batch=3) == [None, None]


def test_nobodys_hooks_run_twice():
    calls = []
    hooks = {"wrappers": [lambda: calls.append(1)]}
    assert asked(hooks, without_hooks=lambda options: {}) == GROWING
    assert calls == [1]


def test_model_that_needs_values_is_known_up_to_there():
    assert asked({"reads values": True}) == GROWING


def test_other_layers_are_set_aside_and_come_back():
    model = Model()
    block = model.blocks[0]
    with substituted({block: lambda inner, *args: None}, Order.CACHED):
        stand_in = block.__dict__["forward"]
        with set_aside(model):
            assert "forward" not in block.__dict__
        assert block.__dict__["forward"] is stand_in and isinstance(stand_in, StandIn)
    assert "forward" not in block.__dict__
