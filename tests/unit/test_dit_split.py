"""Cutting a transformer, on models whose answer is mental arithmetic."""

import logging

import pytest
import torch
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.features import OutdatedFeature
from kit.toys import (
    FULL,
    SKIPPED,
    Block,
    Chain,
    Doubles,
    InPlaceSingle,
    Joints,
    Packed,
    Pairs,
    Sampler,
    Single,
    tokens,
    untouched,
)
from torch.utils._python_dispatch import TorchDispatchMode

# What a skipped call computes


def test_skipped_call_adds_the_remembered_residual_to_fresh_tokens():
    sampler = Sampler(Chain())
    assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
    # Before the middle 2, behind it 16; now 6 and the same 14 more.
    assert torch.equal(sampler.call(SKIPPED, tokens(3)), tokens(40))
    assert sampler.skipped and sampler.model.called == [0, 4]
    assert torch.equal(sampler.model(tokens(1)), tokens(32)) and untouched(sampler.model)


def test_skipped_call_without_a_depth_runs_no_block():
    sampler = Sampler(Chain(), None)
    assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
    assert torch.equal(sampler.call(SKIPPED, tokens(3)), tokens(34))
    assert sampler.skipped and sampler.model.called == []


@pytest.mark.parametrize("depth", [1, 2])
def test_both_lists_and_both_streams_are_remembered(depth):
    sampler = Sampler(Doubles(), depth)
    img, txt = tokens(1, 2), tokens(1, 10, count=4)
    plain = sampler.model(img, txt)
    assert torch.equal(sampler.call(FULL, img, txt), plain) and torch.equal(plain, tokens(32, 64))
    assert torch.equal(sampler.call(SKIPPED, img, txt), plain)
    assert sampler.model.called == [f"d{i}" for i in range(depth)] + [f"s{i}" for i in range(3 - depth, 3)]
    # Depth 1: 3 becomes 6 in front, the doubles add 4 - 2, the singles 16 - 4, and twice that is 40.
    # Depth 2: 12 in front, 8 - 4 more, and four times that.
    expected = {1: 40, 2: 64}[depth]
    assert torch.equal(sampler.call(SKIPPED, tokens(3, 3), txt)[:1], tokens(expected))


def test_text_is_remembered_beside_the_image():
    model = Doubles(3, 3)
    seen = []
    model.single_blocks[2].register_forward_pre_hook(lambda block, args: seen.append(args[0][0, :, 0].tolist()))
    sampler = Sampler(model)
    sampler.call(FULL, tokens(1, count=1), tokens(1, count=1))
    sampler.call(SKIPPED, tokens(1, count=1), tokens(5, count=1))
    # Text 27 behind the doubles and 108 behind two singles; 15 in front of the middle instead of 3.
    assert seen == [[108, 32], [15 + 24 + 81, 32]]


def test_arguments_by_place_and_a_last_block_without_context():
    sampler = Sampler(Joints())
    x, context = tokens(1), tokens(1, count=4)
    assert torch.equal(sampler.call(FULL, x, context), tokens(16))
    assert torch.equal(sampler.call(SKIPPED, tokens(2), context), tokens((4 + 6) * 2))
    assert sampler.model.called == [0, 3]


@pytest.mark.parametrize("count", [3, 4])  # of the sound's tokens: as many as the picture's, or not
def test_streams_in_one_tuple_are_remembered_both(count):
    sampler, sound = Sampler(Pairs()), tokens(1, count=count)
    assert torch.equal(sampler.call(FULL, tokens(1), sound)[:, 3:], tokens(243, count=count))
    out = sampler.call(SKIPPED, tokens(3), tokens(2, count=count))
    # In front 6 and 6, the middle adds 14 and 78, behind it twice and three times that.
    assert torch.equal(out, torch.cat((tokens(40), tokens((6 + 78) * 3, count=count)), 1))
    assert sampler.model.called == [0, 4]


def test_tokens_without_a_batch_are_those_of_one_image():
    sampler = Sampler(Packed())
    assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
    assert torch.equal(sampler.call(SKIPPED, tokens(3)), tokens(40)) and sampler.skipped


def test_streams_of_one_shape_are_told_apart():
    sampler = Sampler(Joints())
    assert torch.equal(sampler.call(FULL, tokens(1), tokens(7)), tokens(16))
    assert torch.equal(sampler.call(SKIPPED, tokens(2), tokens(0)), tokens((4 + 6) * 2))


def test_what_a_model_adds_between_skipped_blocks_counts_once():
    def add_in_place(x, i):
        x += 1
        return x

    for between in (add_in_place, lambda x, i: x + 1):
        sampler = Sampler(Chain(between=between))
        assert torch.equal(sampler.call(FULL, tokens(1)), tokens(63))
        assert torch.equal(sampler.call(SKIPPED, tokens(1)), tokens(63))
        # In front 7 instead of 3, behind the middle 30 + 4; one more, twice, one more.
        assert torch.equal(sampler.call(SKIPPED, tokens(3)), tokens(((30 + 4) + 1) * 2 + 1))


def test_input_of_the_first_skipped_block_stays_as_it_is():
    kept = []

    def keep(x, i):
        kept.append(x)
        x += 0 if i == 0 else 100
        return x

    sampler = Sampler(Chain(between=keep))
    sampler.call(FULL, tokens(1))
    kept.clear()
    sampler.call(SKIPPED, tokens(1))
    assert torch.equal(kept[0], tokens(2))


def test_later_blocks_that_write_in_place_leave_what_was_stored_alone():
    sampler = Sampler(Chain(kind=InPlaceSingle))
    assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
    for sigma in (SKIPPED, 4.0):
        assert torch.equal(sampler.call(sigma, tokens(3)), tokens(40)) and sampler.skipped


class Clones(TorchDispatchMode):
    """Counts copies of tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("uuids", ["a", "ab"])
def test_full_step_copies_each_token_stream_once(uuids):
    sampler = Sampler(Doubles(), interval=1)
    img, txt = tokens(*range(1, len(uuids) + 1)), tokens(*[9] * len(uuids), count=4)
    sampler.call(FULL, img, txt, uuids=uuids)
    with Clones() as plain:
        expected = sampler.model(img, txt)
    with Clones() as full:
        assert torch.equal(sampler.call(SKIPPED, img, txt, uuids=uuids), expected) and not sampler.skipped
    # img and txt in front of the doubles, x in front of the singles: the blocks may write to any of them.
    assert full.count == plain.count + 3


# CFG branches


def test_joined_and_split_chunks_agree():
    sampler = Sampler(Chain())
    sampler.call(FULL, tokens(1, 2), uuids="ab")
    joined = sampler.call(SKIPPED, tokens(5, 5), uuids="ab")
    # The middle adds 14 for each 1 that the chunk was.
    assert torch.equal(joined, tokens(48, 76))
    keys = sampler.features.branches(tokens(5), ["b"], [1], None)
    assert not sampler.features.can_skip(keys)  # a second call of one evaluation is another branch
    sampler.run.begin(4.0)
    keys = sampler.features.branches(tokens(5), ["b"], [1], None)
    assert sampler.features.can_skip(keys)
    with substituted(sampler.split.skip_layers(sampler.features, keys), Order.CACHED):
        assert torch.equal(sampler.model(tokens(5)), tokens(76))


def test_new_branch_recomputes_and_the_old_one_in_its_batch_does_not():
    sampler = Sampler(Chain())
    sampler.call(FULL, tokens(1))
    assert torch.equal(sampler.call(SKIPPED, tokens(3, 3), uuids="ab"), tokens(40, 96))
    assert not sampler.skipped
    assert torch.equal(sampler.call(4.0, tokens(3, 3), uuids="ab"), tokens(40, 96))
    assert sampler.skipped


def test_tokens_without_the_latents_batch_are_not_remembered(caplog):
    class Folded(Chain):
        def forward(self, x):
            return super().forward(x.flatten(0, 1)[None]).unflatten(1, x.shape[:2])[0]

    sampler = Sampler(Folded())
    with caplog.at_level(logging.WARNING):
        for sigma in (FULL, SKIPPED):
            assert torch.equal(sampler.call(sigma, tokens(1, 2)), tokens(32, 64))
    assert not sampler.skipped
    assert "does not have the latent's batch of 2; every step runs in full" in caplog.text


def test_batch_may_stand_where_x_format_says():
    class Inside(Chain):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.x_format = "THWBD"

        def forward(self, x):
            return super().forward(x.movedim(0, 1)[None, None]).movedim(3, 0)[:, 0, 0]

    sampler = Sampler(Inside())
    assert torch.equal(sampler.call(FULL, tokens(1, 2), uuids="ab"), tokens(32, 64))
    assert torch.equal(sampler.call(SKIPPED, tokens(5, 5), uuids="ab"), tokens(48, 76))
    assert sampler.skipped


# Patches


def test_patch_that_leaves_a_block_out_is_remembered_with_it():
    model = Chain(6)
    sampler = Sampler(model)
    with substituted({model.blocks[2]: lambda inner, x, **rest: x}, Order.CACHED + 1):
        assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
        assert torch.equal(sampler.call(SKIPPED, tokens(1)), tokens(32))
    assert sampler.skipped


@pytest.mark.parametrize("index", [1, 3])
def test_patch_in_the_place_of_an_end_of_the_middle_keeps_steps_full(index):
    model = Chain()
    sampler = Sampler(model)
    with substituted({model.blocks[index]: lambda inner, x, **rest: x + 1}, Order.CACHED + 1):
        for sigma in (FULL, SKIPPED):
            sampler.call(sigma, tokens(1))
            assert not sampler.skipped


@pytest.mark.parametrize("depth, first, last", [(1, 1, 3), (None, 0, 4)])
@pytest.mark.parametrize("end", ["first", "last"])
def test_patch_that_comes_between_full_and_skipped_raises(depth, first, last, end):
    model = Chain()
    sampler = Sampler(model, depth)
    sampler.call(FULL, tokens(1))
    patched = model.blocks[first if end == "first" else last]
    with substituted({patched: lambda inner, x, **rest: x + 1}, Order.CACHED + 1):
        with pytest.raises(RuntimeError, match=f"the {end} skipped block of blocks was not called"):
            sampler.call(SKIPPED, tokens(1))
    assert untouched(model)


def test_call_that_is_made_again_and_ends_midway_is_done_and_leaves_no_tensor():
    """As where a capture is tried after the call was made."""
    sampler = Sampler(Chain())
    sampler.call(FULL, tokens(1))
    sampler.run.begin(SKIPPED)
    keys = sampler.features.branches(tokens(1), ["a"], [0], None)
    with substituted(sampler.split.skip_layers(sampler.features, keys), Order.CACHED):
        assert torch.equal(sampler.model(tokens(1)), tokens(32))
        sampler.model.blocks[1](tokens(1), vec=torch.ones(1, 2))
    assert any(call.inputs for call in sampler.split._calls)
    sampler.split.check_done()
    assert not sampler.split._calls


def test_layers_further_in_are_called_for_shallow_blocks_alone():
    model = Chain()
    seen = []
    compiled = {
        block: lambda inner, *args, i=i, **kwargs: (seen.append(i), inner(*args, **kwargs))[1]
        for i, block in enumerate(model.blocks)
    }
    sampler = Sampler(model)
    with substituted(compiled, Order.COMPILED):
        sampler.call(FULL, tokens(1))
        sampler.call(SKIPPED, tokens(1))
    assert seen == [0, 1, 2, 3, 4, 0, 4]


def test_another_number_of_tokens_asks_for_a_full_call():
    sampler = Sampler(Doubles())
    sampler.call(FULL, tokens(1), tokens(1, count=4))
    with pytest.raises(OutdatedFeature, match="another shape"):
        sampler.call(SKIPPED, tokens(1), tokens(1, count=5))


class Remembering(Block):
    """Takes what it kept of the call before, as the blocks of a video model that goes on from frame to frame."""

    def forward(self, x, kept):
        kept["calls"] = kept.get("calls", 0) + 1
        return x * kept["calls"]


class Frames(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Remembering([], i) for i in range(5))
        self.kept = [{} for _ in self.blocks]

    def forward(self, x):
        for block, kept in zip(self.blocks, self.kept, strict=True):
            x = block(x, kept)
        return x


def test_blocks_that_keep_something_of_their_own_are_called_on_every_step(caplog):
    sampler = Sampler(Frames())
    for count, sigma in enumerate((FULL, SKIPPED, 4.0), 1):
        assert torch.equal(sampler.call(sigma, tokens(1)), tokens(count**5)) and not sampler.skipped
    assert "its blocks keep something from call to call (kept)" in sampler.run.why_full
    assert len(caplog.records) == 1


def test_dict_that_is_the_same_for_all_blocks_may_be_written_to():
    model = Frames()
    model.kept = [{}] * 5
    sampler = Sampler(model)
    sampler.call(FULL, tokens(1))
    sampler.call(SKIPPED, tokens(1))
    assert sampler.skipped


class Aside(Chain):
    """Calls a method of its blocks, as Wan Animate 2 does."""

    def forward(self, x):
        for block in self.blocks:
            x = type(block).forward(block, x, None)
        return x


def test_model_that_calls_its_blocks_otherwise_runs_in_full_with_the_reason():
    sampler = Sampler(Aside())
    for sigma in (FULL, SKIPPED):
        assert torch.equal(sampler.call(sigma, tokens(1)), tokens(32)) and not sampler.skipped
    assert sampler.run.why_full == "cannot skip blocks of Aside: the model calls none of its blocks by their forward"


class LongSkips(torch.nn.Module):
    """As HunyuanDiT: late blocks take what their mirrors in front returned."""

    def __init__(self):
        super().__init__()
        self.called = []
        self.blocks = torch.nn.ModuleList(Single(self.called, i) for i in range(6))

    def forward(self, x):
        self.called.clear()
        seen = []
        for i, block in enumerate(self.blocks):
            x = block(x, vec=seen[5 - i] if i > 3 else x) + 0
            seen.append(x)
        return x


def test_long_skips_between_shallow_blocks_are_left_alone():
    sampler = Sampler(LongSkips())
    assert torch.equal(sampler.call(FULL, tokens(1)), sampler.call(SKIPPED, tokens(1)))
    assert sampler.skipped and sampler.model.called == [0, 5]


def test_block_that_needs_what_a_skipped_one_returned_keeps_steps_full(caplog):
    class Reaching(LongSkips):
        def forward(self, x):
            seen = []
            for i, block in enumerate(self.blocks):
                x = block(x, vec=seen[2] if i == 5 else x)
                seen.append(x)
            return x

    sampler = Sampler(Reaching())
    sampler.call(FULL, tokens(1))
    assert sampler.run.why_full and "takes what a skipped one returned; every step runs in full" in caplog.text


# Residuals of a ControlNet


def test_residuals_inside_the_middle_are_withheld_and_the_callers_stay():
    sampler = Sampler(Doubles(3, 4))
    control = {"input": [1, 2, 3], "middle": [4], "output": [5, 6, 7, 8, None]}
    assert sampler.split.withhold(control) == control  # nothing is skipped yet
    sampler.call(FULL, tokens(1), tokens(1))
    kept = sampler.split.withhold(control)
    # Skipped are d1, d2, s0, s1, s2; what is added behind the last of a list comes after what is remembered.
    assert kept == {"input": [1, None, 3], "middle": [4], "output": [None, None, 7, 8, None]}
    assert control["input"] == [1, 2, 3]
    assert sampler.split.withhold(None) is None
    assert kept["middle"] is not control["middle"]  # some models take residuals off their lists
    assert sampler.split.withhold({"input": None, "output": [1]}) == {"input": None, "output": [None]}


def test_skipped_call_with_residuals_equals_the_full_one():
    sampler = Sampler(Doubles(3, 4))
    img, txt = tokens(1), tokens(1, count=4)
    control = {"input": [torch.full((1, 3, 2), float(i)) for i in (1, 2, 3)], "output": [None, *[tokens(5)] * 3]}
    full = sampler.call(FULL, img, txt, control=control)
    assert torch.equal(sampler.call(SKIPPED, img, txt, control=control), full) and sampler.skipped
    assert not torch.equal(sampler.call(SKIPPED, img, txt), full)
