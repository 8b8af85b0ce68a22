"""Telling a block's token streams, and leaving blocks alone whose streams cannot be told."""

import logging

import pytest
import torch
from comfy_accel.accel.step_cache.splits import token_streams
from comfy_accel.accel.step_cache.splits.token_streams import NoStreams, StreamFinder, arguments
from kit.toys import FULL, SKIPPED, Block, Chain, Joint, Sampler, Single, tokens


class Widening(Block):
    def forward(self, x, vec):
        return torch.cat((x, x), 1)


class Telling(Block):
    def forward(self, x, vec):
        return {"x": x}


class Swapping(Block):
    """Which output is which argument cannot be told."""

    def forward(self, one, other):
        return other + 1, one + 1


@pytest.mark.parametrize(
    "kind, reason",
    [(Widening, "like none of its arguments"), (Telling, "returns dict")],
)
def test_blocks_without_streams_run_in_full_with_one_reason(kind, reason, caplog):
    model = Chain(kind=kind, between=lambda x, i: x["x"] if isinstance(x, dict) else x)
    plain = model(tokens(1))
    sampler = Sampler(model)
    with caplog.at_level(logging.WARNING):
        for sigma in (FULL, SKIPPED, 4.0):
            assert torch.equal(sampler.call(sigma, tokens(1)), plain)
            assert not sampler.skipped
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and reason in said[0] and said[0].endswith("; every step runs in full.")


def test_outputs_that_fit_several_arguments_are_left_alone(caplog):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Swapping([], i) for i in range(4))

        def forward(self, x):
            one, other = x, x.clone()
            for block in self.blocks:
                one, other = (part + 0 for part in block(one, other))
            return one

    sampler = Sampler(Model())
    assert torch.equal(sampler.call(FULL, tokens(1)), tokens(5))
    assert torch.equal(sampler.call(SKIPPED, tokens(2)), tokens(6)) and not sampler.skipped
    assert "is unclear" in caplog.text


def test_arguments_have_the_names_of_the_blocks_own_forward():
    x, vec = tokens(1), tokens(2)
    assert arguments(Single([], 0), (x,), {"vec": vec}) == {"x": x, "vec": vec}
    assert arguments(Joint([], 0), (x, vec), {"c": 3}) == {"args[0]": x, "args[1]": vec, "c": 3}
    with pytest.raises(NoStreams, match="called otherwise"):
        arguments(Single([], 0), (x,), {"unheard": vec})


def test_tensors_of_a_list_are_named_as_those_of_a_tuple_and_the_list_is_there_as_well():
    """Blocks may write to it."""
    x, vec = tokens(1), tokens(2)
    assert arguments(Single([], 0), ((x, vec), vec), {}) == {"x[0]": x, "x[1]": vec, "vec": vec}
    assert arguments(Single([], 0), ([x, vec], vec), {}) == {"x[0]": x, "x[1]": vec, "x": [x, vec], "vec": vec}


def test_signature_is_read_once_for_all_calls_of_a_class(monkeypatch):
    class Fresh(Single):
        def forward(self, x, vec, scale=2.0):
            return x

    read = []
    signature = token_streams.inspect.signature
    monkeypatch.setattr(token_streams.inspect, "signature", lambda of: (read.append(of), signature(of))[1])
    for block in (Fresh([], 0), Fresh([], 1)):
        assert arguments(block, (1, 2), {}) == arguments(block, (), {"x": 1, "vec": 2}) == {"x": 1, "vec": 2}
    assert read == [Fresh.forward]


def test_identity_with_the_next_blocks_argument_decides_between_equal_shapes():
    finder = StreamFinder()
    given = {"one": tokens(1), "other": tokens(2)}
    out = (tokens(3), tokens(4))
    finder.see_call(given)
    finder.see_return(given, out)
    with pytest.raises(NoStreams, match="unclear"):
        finder.found()
    finder.see_call({"one": out[1], "other": tokens(5)})
    assert finder.found().names == ("other", "one")


def test_streams_are_packed_as_the_block_returns_them():
    finder = StreamFinder()
    x = tokens(1)
    finder.see_return({"x": x}, [None, x + 1])
    streams = finder.found()
    assert streams.names == (None, "x") and streams.tensors == ("x",)
    assert streams.pack({"x": x}) == [None, x] and streams.unpack([None, x]) == {"x": x}
    with pytest.raises(NoStreams, match="otherwise than before"):
        streams.unpack((None, x))
