"""Kinds: equal for equal behaviour, different for anything that could compute something else."""

import threading

import pytest
import torch
from comfy_accel.accel.core.reasons import RunEagerly
from comfy_accel.accel.fingerprint.kinds import describe, kinds_of, template_of, weight_slots
from comfy_accel.accel.fingerprint.plain_values import Indescribable
from comfy_accel.accel.signature.tensors import tensor_spec
from kit.blocks import Wrapped
from torch import nn


class Block(nn.Module):
    def __init__(self, width=8, inner=16, groups=2, scale=1.0, number=0):
        super().__init__()
        self.number = number
        self.scale = scale
        self.norm = nn.GroupNorm(groups, width)
        self.up = nn.Conv2d(width, inner, 1)
        self.down = nn.Conv2d(inner, width, 1)

    def forward(self, x):
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


def digest(block):
    return describe(block).digest


def test_settings_that_the_code_reads_make_another_kind_and_values_and_a_number_do_not():
    assert digest(Block(number=1)) == digest(Block(number=2))
    assert len({digest(Block()), digest(Block(scale=2.0)), digest(Block(groups=4))}) == 3


def test_training_mode_dtype_and_layout_make_another_kind():
    plain = digest(Block())
    assert digest(Block().eval()) != plain
    assert digest(Block().half()) != plain
    assert digest(Block().to(memory_format=torch.channels_last)) == plain  # 1 x 1 kernels: both layouts at once
    wide = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    before = digest(wide)
    assert digest(wide.to(memory_format=torch.channels_last)) != before


def test_tensors_of_another_type_device_or_layout_have_another_spec():
    image = torch.empty(2, 3, 4, 5)
    others = [
        image.half(),
        image.to("meta"),
        image[0],
        image.to(memory_format=torch.channels_last),
        image.transpose(2, 3),
        image.transpose(0, 3),
    ]
    assert len({tensor_spec(tensor) for tensor in (image, *others)}) == 1 + len(others)
    assert tensor_spec(torch.empty(1, 1, 9, 9)) == tensor_spec(image)


def test_blocks_that_differ_in_channels_alone_share_a_kind_with_these_dimensions_varying():
    narrow, wide, same = kinds_of([describe(Block(8)), describe(Block(12)), describe(Block(8))])
    assert narrow == wide == same
    varying = {(narrow.weights[index], dimension) for index, dimension in narrow.varying}
    assert varying == {("norm.weight", 0), ("norm.bias", 0), ("up.weight", 1), ("down.weight", 0), ("down.bias", 0)}


def test_same_size_alone_is_another_kind_than_among_varying_ones():
    alone = kinds_of([describe(Block(8))])[0]
    among = kinds_of([describe(Block(8)), describe(Block(12))])[0]
    assert alone != among
    assert alone.varying == ()


def test_sizes_vary_only_among_blocks_that_read_the_same_numbers():
    descriptions = [describe(Block(8)), describe(Block(12, groups=4, number=1)), describe(Block(8, number=2))]
    assert [kind.varying for kind in kinds_of(descriptions)] == [(), (), ()]


def test_block_that_cannot_be_described_now_makes_the_same_sizes_vary():
    narrow, wide, other = Block(8), Block(12), Block(16, groups=4)
    wide.up.padding_mode = object()
    (with_it,) = kinds_of([describe(narrow)], [narrow, wide, other])
    wide.up.padding_mode = "zeros"
    assert with_it == kinds_of([describe(narrow), describe(wide)])[0]
    assert kinds_of([describe(other)], [narrow, wide, other])[0].varying == ()


def test_object_or_hook_that_cannot_be_described_is_named():
    block = Block()
    block.up.padding_mode = object()
    with pytest.raises(Indescribable, match="up.padding_mode"):
        describe(block)
    block.up.padding_mode = "zeros"
    block.up.register_forward_hook(lambda *_: None)
    with pytest.raises(Indescribable, match="up has forward hooks"):
        describe(block)


def test_what_is_left_on_a_part_and_read_by_no_code_is_nobody_s_business():
    block = Block()
    before = digest(block)
    for left in (torch.ones(3), lambda x: x, threading.Lock(), [torch.ones(3)]):
        block.up.left = left
        assert digest(block) == before
        assert "left" not in vars(template_of(block, read=describe(block).read).up) and block.up.left is left


def test_template_holds_no_memory_and_leaves_the_block_alone():
    block = Block()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    template = template_of(block)
    assert all(tensor.is_meta for tensor in template.state_dict().values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())


def test_slots_see_replaced_and_changed_weights():
    block = Block()
    slots = weight_slots(block, describe(block).weights)
    block.up.weight = nn.Parameter(torch.zeros_like(block.up.weight))
    names = describe(block).weights
    assert slots.take()[names.index("up.weight")] is block.up.weight


class Processor:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, module, x):
        return module.up(x) * self.scale * module.number


class Processed(Block):
    def __init__(self, processor, number=0):
        super().__init__(number=number)
        self.processor = processor

    def forward(self, x):
        return self.processor(self, x)


def test_plain_object_counts_with_its_state_and_what_it_reads_of_the_block_unless_it_has_weights():
    plain = digest(Processed(Processor(1.0), number=1))
    assert plain == digest(Processed(Processor(1.0), number=1))
    assert len({plain, digest(Processed(Processor(2.0), number=1)), digest(Processed(Processor(1.0), number=2))}) == 3
    with pytest.raises(Indescribable, match="processor"):
        describe(Processed(Processor(nn.Linear(2, 2))))


class Cast(nn.Linear):
    functions: list = []

    def forward(self, x):
        for function in self.functions:
            x = function(x)
        return super().forward(x)


def test_attribute_that_repeats_the_class_is_as_if_it_were_not_there():
    plain, set_once, changed = Cast(2, 2), Cast(2, 2), Cast(2, 2)
    set_once.functions = []
    changed.functions = [torch.relu]
    assert digest(plain) == digest(set_once) != digest(changed)


class Quantised(torch.Tensor):
    """Like GGUF's weights: an attribute that torch does not know of says how its bytes are to be read."""

    @staticmethod
    def made(data, **attributes):
        tensor = data.as_subclass(Quantised)
        vars(tensor).update(attributes)
        return tensor

    def numbers(self):
        return self.read(self), self.notes


class OfItsOwn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs)


def holding(weight):
    block = Block()
    del block.up.weight
    block.up.register_buffer("weight", weight)
    return block


def test_how_weights_of_a_class_of_their_own_are_read_makes_another_kind():
    weight = torch.randn(16, 8, 1, 1)
    a, b = digest(holding(Wrapped(weight, "a"))), digest(holding(Wrapped(weight, "b")))
    assert a == digest(holding(Wrapped(weight.clone(), "a")))
    assert len({a, b, digest(holding(weight))}) == 3
    with pytest.raises(Indescribable, match="up.weight holds a builtins.object"):
        digest(holding(Wrapped(weight, object())))


def test_sizes_and_types_in_weights_of_a_class_of_their_own_make_another_kind():
    weight, one, each = torch.randn(16, 8, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(16, 1, 1, 1)
    scaled = [Wrapped(weight, scale=scale) for scale in (one, each, one.double())]
    blocks = [holding(tensor) for tensor in (*scaled, Wrapped(weight.clone(), scale=one.clone()))]
    kinds = kinds_of([describe(block) for block in blocks])
    assert kinds[0] == kinds[3] and len(set(kinds)) == 3
    assert all(kind.varying == () for kind in kinds)


def test_weights_of_a_class_of_their_own_are_read_as_the_tensors_in_them():
    inner, scale = torch.randn(16, 8, 1, 1), torch.ones(1)
    block = holding(Wrapped(inner, scale=scale))
    kind = kinds_of([describe(block)])[0]
    slots = weight_slots(block, kind.weights, None, kind.forms)
    assert {name: tensor for name, tensor in zip(kind.tensors, slots.take(), strict=True)} == {
        **{name: tensor for name, tensor in block.named_parameters()},
        "up.weight.inner": inner,
        "up.weight.scale": scale,
    }
    for other in (Wrapped(inner, ""), Wrapped(inner, "read otherwise", scale)):
        block.up.weight = other
        with pytest.raises(RunEagerly, match=r"how a weight is stored \(Wrapped\) changed"):
            slots.take()


def test_weights_of_which_nothing_can_be_told_are_not_described():
    weight = torch.randn(16, 8, 1, 1)
    with pytest.raises(Indescribable, match="up.weight is stored as a .*OfItsOwn, which"):
        digest(holding(weight.as_subclass(OfItsOwn)))
    with pytest.raises(Indescribable, match="up.weight is stored as a .*Quantised, with notes"):
        digest(holding(Quantised.made(weight, notes=[(weight, 0.5)])))


def test_what_is_said_beside_the_data_of_weights_makes_another_kind():
    weight = torch.randn(16, 8, 1, 1)
    a, b, c = (Quantised.made(weight.clone(), read=read, notes=[]) for read in "aba")
    assert digest(holding(a)) == digest(holding(c)) != digest(holding(b))
    block = holding(a)
    kind = kinds_of([describe(block)])[0]
    slots = weight_slots(block, kind.weights, None, kind.forms)
    assert all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in slots.take())
    assert "up.weight.data" in kind.tensors
    a.notes.append((weight, 0.5))
    with pytest.raises(RunEagerly, match="Quantised, with notes"):
        slots.take()
    a.notes, a.read = [], "b"
    with pytest.raises(RunEagerly, match=r"how a weight is stored \(Quantised\) changed"):
        slots.take()
