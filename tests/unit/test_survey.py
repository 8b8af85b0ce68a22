"""Blocks found by structure, in models nobody has heard of."""

import torch
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.dispatch.compiled_layers import Host, survey_model
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.modules.blocks import blocks
from kit.blocks import heard
from torch import nn


def mlp(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = mlp(width), mlp(width)

    def forward(self, x):
        return x + self.second(self.first(x))


class Wrapper(nn.Module):
    """Holds a list of blocks, as a UNet's spatial transformer does."""

    def __init__(self, count):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = nn.ModuleList(Block() for _ in range(count))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = mlp()
        self.stages = nn.ModuleList(
            [nn.Sequential(Block(), Wrapper(2)), nn.Sequential(Wrapper(1), nn.Conv2d(4, 4, 1)), nn.Linear(4, 4)]
        )
        self.middle = Block()
        self.out = nn.Linear(4, 4)


def test_innermost_elements_of_lists_and_others_of_their_class_are_the_blocks():
    assert [path for path, _ in blocks(Model())] == [
        "stages.0.0",
        "stages.0.1.inner.0",
        "stages.0.1.inner.1",
        "stages.1.0.inner.0",
        "middle",
    ]


def test_equal_blocks_are_one_kind_and_the_count_decides():
    found = survey(Model())
    assert len(found.regions) == 5 and len(found.kinds) == 1
    assert survey(Model(), min_repetitions=6).regions == ()


def test_blocks_left_uncompiled_are_told_by_class_and_reason_wherever_they_are():
    model = Model()
    model.again = nn.ModuleList(model.stages)
    for part in (model.middle, model.stages[0][0]):
        part.forward = lambda x: x
    with heard("survey") as told:
        survey_model(model, CompileSettings(), Host())
    places = [path for path, block in blocks(model) if "forward" in vars(block)]
    assert [fields["left"] for fields in told] == [{("Block", Reason("forward_replaced")): len(places)}]
    assert len(places) >= 2


def test_forward_that_somebody_has_put_back_is_the_blocks_own():
    model = Model()
    kinds = survey(model).kinds
    for part in (model.middle, model.middle.first[0]):
        own, part.forward = part.forward, lambda x: x
        part.forward = own
    found = survey(model)
    assert found.kinds == kinds and found.left_eager == ()
    model.middle.forward = model.stages[0][0].forward  # another block's
    assert found.left_eager != survey(model).left_eager == (("middle", Reason("forward_replaced")),)


def test_model_without_repetition_has_no_blocks():
    assert survey(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).regions == ()
    assert survey(torch.nn.Identity()).regions == ()


def test_blocks_that_repeat_in_sequences_are_found_where_no_list_has_any():
    model = nn.Module()
    model.middle = nn.Sequential(Block(), nn.Sequential(mlp(), nn.ReLU()))
    model.up = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), mlp()), nn.Conv2d(4, 4, 1))
    once = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1))
    model.head = once
    assert [path for path, _ in blocks(model)] == ["middle.0", "up.1.0"]
    model.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 1)])
    assert [path for path, _ in blocks(model)] == ["head.1", "layers.0"]


def test_what_stands_beside_a_list_of_blocks_inside_a_block_is_a_block_too():
    mixture = nn.Module()
    mixture.attention = Block()
    mixture.gate = nn.Linear(2, 2)
    mixture.experts = nn.ModuleList(Block() for _ in range(2))
    model = nn.Module()
    model.layers = nn.ModuleList([mixture])
    paths = [region.path for region in survey(model).regions]
    assert paths == ["layers.0.attention", "layers.0.experts.0", "layers.0.experts.1"]


def test_blocks_that_are_moved_away_or_patched_leave_the_kind_of_the_others_as_it_was():
    model = nn.Module()
    model.layers = nn.ModuleList(Block(width) for width in (4, 4, 8))
    before = survey(model).regions[0].kind
    assert before.varying
    model.layers[2].to("meta")
    assert survey(model).regions[0].kind == before
    model.layers[2].first[1].inplace = [object()]
    found = survey(model)
    assert len(found.left_eager) == 1 and found.regions[0].kind == before


class Broken(torch.Tensor):
    def __tensor_flatten__(self):
        raise RuntimeError("its data is gone")


def test_block_whose_weights_cannot_be_asked_stays_eager():
    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    layer = next(part for part in model.layers[0].modules() if "weight" in part._parameters)
    layer._parameters["weight"] = torch.ones(4, 4).as_subclass(Broken)
    found = survey(model)
    assert [region.path for region in found.regions] == ["layers.1"]
    ((path, reason),) = found.left_eager
    assert path == "layers.0" and "its data is gone" in str(reason)
