"""Stand-ins made at a part's first call: none before, all after, none left behind."""

import pytest
import torch
from comfy_accel.accel.modules.first_call import at_first_call, parts
from kit.blocks import Block


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Model(torch.nn.Module):
    """Called by methods of its own, as VAEs are."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.single = Part(), Part(), torch.nn.Linear(4, 4)

    def decode(self, x):
        return self.single(self.decoder(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


def forwards_in_place(model):
    return [name for name, part in model.named_modules() if "forward" in part.__dict__]


def counting(calls):
    def layer(inner, x):
        calls.append(1)
        return inner(x)

    return layer


def test_parts_are_what_holds_blocks(model):
    names = {part: name for name, part in model.named_modules()}
    assert [names[part] for part in parts(model)] == ["", "encoder", "encoder.blocks", "decoder", "decoder.blocks"]
    assert parts(torch.nn.Linear(2, 2)) == []


def test_layers_are_made_at_the_first_call_and_serve_that_one_too(model):
    made, of_part, of_block = [], [], []

    def make_layers(part):
        made.append(part)
        return {part: counting(of_part), part.blocks[0]: counting(of_block)}

    with at_first_call(model, make_layers):
        assert made == []
        for count in (1, 2):
            model.decode(torch.ones(1, 4))
            assert made == [model.decoder]
            assert len(of_part) == len(of_block) == count
    assert forwards_in_place(model) == []


def test_part_inside_of_a_called_one_gets_no_layers_of_its_own():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, x):
            return self.part(x)

    model, made = Outer(), []
    with at_first_call(model, lambda part: made.append(part) or {}):
        model(torch.ones(1, 4))
    assert made == [model]


def test_failing_call_or_failing_layers_leave_nothing_behind(model):
    def make_layers(part):
        return {part.blocks[1]: counting([])}

    with pytest.raises(RuntimeError), at_first_call(model, make_layers):
        model.decode(torch.ones(1, 3))
    assert forwards_in_place(model) == []

    def failing(part):
        raise KeyError(part)

    with pytest.raises(KeyError), at_first_call(model, failing):
        model.decode(torch.ones(1, 4))
    assert forwards_in_place(model) == []
