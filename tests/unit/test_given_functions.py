"""Blocks that are given functions: a model makes them anew in each call, around the tensors of that call."""

import pickle
import sys

import pytest
import torch
from comfy_accel.accel.hosts.diffusers import pipeline as host
from comfy_accel.accel.signature.tree_spec import UnsupportedArgument, flatten, functions_in, rebuild
from comfy_accel.accel.store.key import key_digest
from kit.blocks import reasons
from kit.code_swaps import scaling
from kit.thorough import thorough_except
from torch import nn

KNOWN = nn.functional.scaled_dot_product_attention


def attend(q, k, v, mask=None):
    return KNOWN(q[:, None], k[:, None], v[:, None], attn_mask=mask)[:, 0]


def causal(segments, kept, place, prefix):
    """As Qwen-Image 2.1 makes one for each block: text tokens see those before them, an image sees all."""

    def attn(q, k, v, scale=None):
        if kept is not None:
            kept.put(place, torch.stack([k[:, :prefix], v[:, :prefix]], 1))
        outs = [attend(q[:, start:end], k[:, :end], v[:, :end], mask) for start, end, mask in segments]
        return torch.cat(outs, 1)

    return attn


def after(prefix_k, prefix_v):
    def attn(q, k, v, scale=None):
        return attend(q, torch.cat([prefix_k, k], 1), torch.cat([prefix_v, v], 1))

    return attn


class Kept:
    """What a run keeps of texts of one shape."""

    def __init__(self):
        self.shape, self.slots = None, {}

    def is_filled(self, shape):
        if shape != self.shape:
            self.shape, self.slots = shape, {}
        return bool(self.slots)

    def put(self, place, tensor):
        self.slots[place] = tensor.clone()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, gate, places, attn, prefix):
        y = self.out(attn(*self.qkv(x * places).chunk(3, -1)))
        x[:, prefix:].addcmul_(y[:, prefix:], gate)
        if prefix:
            x[:, :prefix].add_(y[:, :prefix])
        return x


class Model(nn.Module):
    def __init__(self, kept=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(4, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.kept = kept
        self.eval().requires_grad_(False)

    def forward(self, x, t, text):
        n, gate = text.shape[1], t[:, None, None].expand(-1, 1, 16)
        x = self.embed(torch.cat([text, x.flatten(1, 2)], 1))
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        segments = [(0, n, mask), (n, x.shape[1], None)]
        places = torch.linspace(0.5, 1.5, x.shape[1])[None, :, None].expand(-1, -1, 16)
        if self.kept is None:
            for place, block in enumerate(self.blocks):
                x = block(x, gate, places, causal(segments, None, place, n), n)
        else:
            is_filled, prefix, x = self.kept.is_filled(text.shape), x[:, :n], x[:, n:]
            for place, block in enumerate(self.blocks):
                if not is_filled:
                    prefix = block(prefix, gate, places[:, :n], causal(segments[:1], self.kept, place, n), n)
                x = block(x, gate, places[:, n:], after(*self.kept.slots[place].unbind(1)), 0)
        return self.head(x[:, -x.shape[1] if self.kept is not None else n :])


CALLS = [(1, 3, 5, 6), (1, 3, 5, 6), (1, 4, 7, 3), (3, 4, 7, 6), (2, 3, 3, 2)]
"""Batch, height and width, tokens of text. In a batch of 1 the positions look as if they had rows for images."""


def given(batch, height, width, tokens, seed=0):
    made = torch.Generator().manual_seed(seed)
    image, text = torch.randn(batch, height, width, 4, generator=made), torch.randn(batch, tokens, 4, generator=made)
    return image, torch.rand(batch, generator=made), text


def check(fast, plain, *call, steps=2):
    with torch.no_grad(), host.one_run():
        for step in range(steps):
            assert torch.equal(fast(*given(*call, seed=step)), plain(*given(*call, seed=step)))


def test_function_made_in_each_call_around_its_tensors_is_compiled_once(cache):
    fast, plain = host.accelerate_module(Model(), backend="eager", measured=False), Model()
    for call in CALLS:
        check(fast, plain, *call)
        assert cache.statistics()["graphs"] == 1 + (call in CALLS[3:])
    assert reasons() == []


def test_function_that_fills_a_cache_runs_uncompiled_and_the_one_that_reads_it_is_compiled(cache):
    fast = host.accelerate_module(Model(), backend="eager", measured=False)
    for call in CALLS:
        plain, fast.kept = Model(Kept()), Kept()
        check(fast, plain, *call, steps=3)
        assert all(torch.equal(tensor, fast.kept.slots[at]) for at, tensor in plain.kept.slots.items())
        assert cache.statistics()["graphs"] == 1 + (call in CALLS[3:])
    assert reasons() == [f"it is called with an argument of type {__name__}.Kept"]


def counted(number):
    def attn(q, k, v):
        nonlocal number
        number += 1
        return attend(q, k, v) * number

    return attn


def itself():
    def attn(q, k, v, deeper=True):
        return attn(q, k, v, False) if deeper else attend(q, k, v)

    return attn


def summed(total):
    def attn(q, k, v):
        torch.add(total, q.mean(), out=total)
        return attend(q, k, v) * total

    return attn


KEEPING = {"variable": (counted, 0), "itself": (itself,)}
"""What makes a function, and what of."""


class Given(nn.Module):
    """Its blocks are given one function, which stays from one call to the next."""

    def __init__(self, attn):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.attn = nn.ModuleList(Block(4) for _ in range(3)), [attn]
        self.eval().requires_grad_(False)

    def forward(self, x, t, text):
        x = x.flatten(1, 2) + 0
        for block in self.blocks:
            x = block(x, t[:, None, None], torch.ones(1, 1, 1), self.attn[0], 0)
        return x


@pytest.mark.parametrize("keeps", KEEPING)
def test_function_that_keeps_something_or_calls_itself_is_left_as_it_is(cache, keeps):
    make, *of = KEEPING[keeps]
    fast, plain = host.accelerate_module(Given(make(*of)), backend="eager", measured=False), Given(make(*of))
    check(fast, plain, 2, 3, 5, 6, steps=4)
    assert cache.statistics()["graphs"] == 0 and len(reasons()) == 1


def test_tensor_that_a_function_writes_to_is_written_to(cache):
    fast, plain = Given(summed(torch.ones(()))), Given(summed(torch.ones(())))
    host.accelerate_module(fast, backend="eager", measured=False)
    check(fast, plain, 2, 3, 5, 6, steps=4)
    (one,), (other,) = (model.attn[0].__closure__ for model in (fast, plain))
    assert torch.equal(one.cell_contents, other.cell_contents) and other.cell_contents != 1


def times(factor, place=0):
    return lambda q, k, v: attend(q, k, v) * factor


def other_times(factor, place=0):
    return lambda q, k, v: attend(q, k, v) * -factor


def test_function_of_other_code_or_with_other_values_is_another(cache):
    fast, plain = Given(None), Given(None)
    host.accelerate_module(fast, backend="eager", measured=False)
    for make, factor, count in ((times, 0.5, 1), (times, 0.25, 2), (other_times, 0.5, 3), (times, 0.5, 3)):
        fast.attn[0], plain.attn[0] = make(factor), make(factor)
        check(fast, plain, 1, 3, 5, 6)
        assert cache.statistics()["graphs"] == count
    assert reasons() == []


def test_what_a_function_calls_is_read_anew_where_another_program_replaces_it(cache):
    fast, plain = Given(times(0.5)), Given(times(0.5))
    host.accelerate_module(fast, backend="eager", measured=False)
    for count in (1, 2, 2):
        check(fast, plain, 1, 3, 5, 6)
        with scaling(sys.modules[__name__], "attend", 3.0):
            check(fast, plain, 1, 3, 5, 6)
        assert cache.statistics()["graphs"] <= 2, count
    assert reasons() == []


class Passing(nn.Module):
    """A block that may give itself to what it is given."""

    def __init__(self, scale):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), scale

    def forward(self, x, itself, *given):
        for function in filter(callable, given):
            x = function(self, x) if itself else function(x)
        return self.second(self.first(x))


class Passed(nn.Module):
    """Its blocks are given what `given` returns, and are of one kind: their own code does not read the scale."""

    def __init__(self, itself, given):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.given = nn.ModuleList(map(Passing, (0.5, 1.5, 2.5))), (itself, [given])
        self.eval().requires_grad_(False)

    def forward(self, x):
        itself, (given,) = self.given
        for block in self.blocks:
            x = block(x, itself, *given(x.mean()))
        return x


def check_given(itself, given):
    fast, plain, x = Passed(itself, given), Passed(itself, given), torch.randn(1, 3, 4)
    host.accelerate_module(fast, backend="eager", measured=False)
    with torch.no_grad(), host.one_run():
        assert torch.equal(fast(x), plain(x))


def test_function_that_reads_a_setting_of_the_block_it_is_given_is_left_as_it_is(cache):
    check_given(True, lambda mean: [lambda block, x: x * block.scale + mean])
    assert reasons() == ["it is called with a function"]


def more(by):
    def inner(x):
        return x + by

    return inner


def larger(by):
    def inner(x):
        return x * by

    return inner


def test_functions_that_have_changed_places_are_saved_under_another_key(cache):
    for count, makers in enumerate([(more, larger), (larger, more), (more, larger)]):
        check_given(False, lambda mean, makers=makers: [make(mean) for make in makers])
        keys = list(map(key_digest, cache.keys()))
        assert len(keys) == len(set(keys)) == min(count + 1, 2)
    assert reasons() == []


def seeded(seed):
    return lambda x: x if seed % 2 else -x


def test_function_is_no_obstacle_to_saving_a_graph():
    """Torch saves what a graph was traced with, and code objects and functions without a name cannot be pickled."""
    spec = flatten(([more(torch.ones(2)), larger(2)], {}), [], functions=True)
    assert f"{__name__}.inner" in repr(pickle.loads(pickle.dumps(spec)))


@pytest.mark.parametrize("number", thorough_except([2**31 - 1, 2**63 - 1, 2**64 - 1, 10**30], 2**31 - 1, 10**30))
def test_number_that_is_larger_than_any_size_is_a_value(cache, number):
    for now in (number, number + 1):
        check_given(False, lambda mean, now=now: [seeded(now), now])
    assert reasons() == [] and cache.statistics()["graphs"] == 2


def test_function_is_made_again_of_its_code_and_of_what_it_closes_over():
    def function(x, of=0.5):
        return x * of + tensor * place

    tensors, tensor, place = [], torch.ones(2), 1
    spec = flatten(([function], {}), tensors, functions=True)
    ((again,), _) = rebuild(spec, tensors)
    assert again is not function and torch.equal(again(2), function(2)) and len(tensors) == 2
    (found,) = functions_in(spec)
    assert found.code is function.__code__ and again.__globals__ is function.__globals__
    tensor, place = torch.zeros(3), 0
    assert flatten(([function], {}), [], functions=True) == spec
    function.calls = 0
    for value, asked in (([function], True), ([attend], False), ([itself()], True)):
        with pytest.raises(UnsupportedArgument, match="a function"):
            flatten(value, [], functions=asked)
