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
    tokens,
    untouched,
)
from torch.utils._python_dispatch import TorchDispatchMode

# What a skipped call computes


def test_skipped_call_adds_the_remembered_residual_to_fresh_tokens():
    sampler = Sampler(Chain())
    assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
    # The blocks make 32 of 1; now the same 31 more.
    assert torch.equal(sampler.call(SKIPPED, tokens(3)), tokens(34))
    assert sampler.skipped and sampler.model.called == []
    assert torch.equal(sampler.model(tokens(1)), tokens(32)) and untouched(sampler.model)


def test_both_lists_and_both_streams_are_remembered():
    sampler = Sampler(Doubles())
    img, txt = tokens(1, 2), tokens(1, 10, count=4)
    plain = sampler.model(img, txt)
    assert torch.equal(sampler.call(FULL, img, txt), plain) and torch.equal(plain, tokens(32, 64))
    assert torch.equal(sampler.call(SKIPPED, img, txt), plain)
    assert sampler.model.called == []
    assert torch.equal(sampler.call(SKIPPED, tokens(3, 3), txt)[:1], tokens(3 + 31))


def test_text_is_remembered_beside_the_image():
    model = Doubles(3, 3)
    seen = []
    model.single_blocks[2].register_forward_pre_hook(lambda block, args: seen.append(args[0][0, :, 0].tolist()))
    sampler = Sampler(model)
    sampler.call(FULL, tokens(1, count=1), tokens(1, count=1))
    sampler.call(SKIPPED, tokens(1, count=1), tokens(5, count=1))
    # The last block is handed what the singles began with: what the doubles add to 5 and 1.
    assert seen == [[108, 32], [5 + 26, 1 + 7]]


def test_arguments_by_place_and_a_last_block_without_context():
    sampler = Sampler(Joints())
    x, context = tokens(1), tokens(1, count=4)
    assert torch.equal(sampler.call(FULL, x, context), tokens(16))
    assert torch.equal(sampler.call(SKIPPED, tokens(2), context), tokens(2 + 15))
    assert sampler.model.called == []


@pytest.mark.parametrize("count", [3, 4])  # of the sound's tokens: as many as the picture's, or not
def test_streams_in_one_tuple_are_remembered_both(count):
    sampler, sound = Sampler(Pairs()), tokens(1, count=count)
    assert torch.equal(sampler.call(FULL, tokens(1), sound)[:, 3:], tokens(243, count=count))
    out = sampler.call(SKIPPED, tokens(3), tokens(2, count=count))
    assert torch.equal(out, torch.cat((tokens(3 + 31), tokens(2 + 242, count=count)), 1))
    assert sampler.model.called == []


def test_tokens_without_a_batch_are_those_of_one_image():
    sampler = Sampler(Packed())
    assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
    assert torch.equal(sampler.call(SKIPPED, tokens(3)), tokens(34)) and sampler.skipped


def test_streams_of_one_shape_are_told_apart():
    sampler = Sampler(Joints())
    assert torch.equal(sampler.call(FULL, tokens(1), tokens(7)), tokens(16))
    assert torch.equal(sampler.call(SKIPPED, tokens(2), tokens(0)), tokens(2 + 15))


def test_what_a_model_adds_between_skipped_blocks_counts_once():
    def add_in_place(x, i):
        x += 1
        return x

    for between in (add_in_place, lambda x, i: x + 1):
        sampler = Sampler(Chain(between=between))
        assert torch.equal(sampler.call(FULL, tokens(1)), tokens(63))
        assert torch.equal(sampler.call(SKIPPED, tokens(1)), tokens(63))
        # What is added behind the last block is not of the blocks.
        assert torch.equal(sampler.call(SKIPPED, tokens(3)), tokens(3 + 61 + 1))


def test_input_of_the_first_skipped_block_stays_as_it_is():
    def write(x, i):
        x += 100
        return x

    sampler, given = Sampler(Chain(between=write)), tokens(1)
    sampler.call(FULL, tokens(1))
    sampler.call(SKIPPED, given)
    assert sampler.skipped and torch.equal(given, tokens(1))


def test_later_blocks_that_write_in_place_leave_what_was_stored_alone():
    sampler = Sampler(Chain(kind=InPlaceSingle))
    assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
    for sigma in (SKIPPED, 4.0):
        assert torch.equal(sampler.call(sigma, tokens(3)), tokens(34)) and sampler.skipped


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
    # The blocks add 31 for each 1 that the chunk was.
    assert torch.equal(joined, tokens(36, 67))
    keys = sampler.features.branches(tokens(5), ["b"], [1], None)
    assert not sampler.features.can_skip(keys)  # a second call of one evaluation is another branch
    sampler.run.begin(4.0)
    keys = sampler.features.branches(tokens(5), ["b"], [1], None)
    assert sampler.features.can_skip(keys)
    with substituted(sampler.split.skip_layers(sampler.features, keys), Order.CACHED):
        assert torch.equal(sampler.model(tokens(5)), tokens(67))


def test_new_branch_recomputes_and_the_old_one_in_its_batch_does_not():
    sampler = Sampler(Chain())
    sampler.call(FULL, tokens(1))
    assert torch.equal(sampler.call(SKIPPED, tokens(3, 3), uuids="ab"), tokens(34, 96))
    assert not sampler.skipped
    assert torch.equal(sampler.call(4.0, tokens(3, 3), uuids="ab"), tokens(34, 96))
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
    assert torch.equal(sampler.call(SKIPPED, tokens(5, 5), uuids="ab"), tokens(36, 67))
    assert sampler.skipped


# Patches


def test_patch_that_leaves_a_block_out_is_remembered_with_it():
    model = Chain(6)
    sampler = Sampler(model)
    with substituted({model.blocks[2]: lambda inner, x, **rest: x}, Order.CACHED + 1):
        assert torch.equal(sampler.call(FULL, tokens(1)), tokens(32))
        assert torch.equal(sampler.call(SKIPPED, tokens(1)), tokens(32))
    assert sampler.skipped


@pytest.mark.parametrize("index", [0, 4])
def test_patch_in_the_place_of_an_end_of_the_list_keeps_steps_full(index):
    model = Chain()
    sampler = Sampler(model)
    with substituted({model.blocks[index]: lambda inner, x, **rest: x + 1}, Order.CACHED + 1):
        for sigma in (FULL, SKIPPED):
            sampler.call(sigma, tokens(1))
            assert not sampler.skipped


@pytest.mark.parametrize("end", ["first", "last"])
def test_patch_that_comes_between_full_and_skipped_raises(end):
    model = Chain()
    sampler = Sampler(model)
    sampler.call(FULL, tokens(1))
    patched = model.blocks[0 if end == "first" else 4]
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
        sampler.model.blocks[0](tokens(1), vec=torch.ones(1, 2))
    assert any(call.inputs for call in sampler.split._calls)
    sampler.split.check_done()
    assert not sampler.split._calls


def test_layers_further_in_are_not_called_on_a_skipped_step():
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
    assert seen == [0, 1, 2, 3, 4]


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


# Residuals of a ControlNet


def test_residuals_between_skipped_blocks_are_withheld_and_the_callers_stay():
    sampler = Sampler(Doubles(3, 4))
    control = {"input": [1, 2, 3], "middle": [4], "output": [5, 6, 7, 8, None]}
    assert sampler.split.withhold(control) == control  # nothing is skipped yet
    sampler.call(FULL, tokens(1), tokens(1))
    kept = sampler.split.withhold(control)
    # What is added behind the last of a list comes after what is remembered.
    assert kept == {"input": [None, None, 3], "middle": [4], "output": [None, None, None, 8, None]}
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
