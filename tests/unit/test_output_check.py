"""The check of a graph against its block: no wrong block passes and no right one is thrown out, outliers or not."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from comfy_accel.accel.signature import output_check
from comfy_accel.accel.signature.output_check import compare_to_rounding

VALUE = torch.linspace(-1, 1, 64)
HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32)
OUTLIERS = (1, 10, 100, 1000)

SAMPLES, TOKENS, WIDTH, HEADS = 2, 96, 64, 4
LARGE = [7, 50]
"""The channels with outliers."""
ORDINARY = [channel for channel in range(WIDTH) if channel not in LARGE]


class Block:
    """Attention and a feed-forward part, each added to the stream after a norm that makes all channels alike, as
    trained ones do: [B, T, 64] to the same. quiet: how large what it adds is, in parts of the stream."""

    def __init__(self, outlier: float, quiet: float = 1.0):
        random = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=random)
        self.gains = torch.ones(WIDTH)
        self.gains[LARGE] = 1 / outlier
        self.x = self.x / self.gains + torch.where(self.gains < 1, outlier, 0)
        shapes = {"qkv": (3, WIDTH), "out": (1, WIDTH), "up": (4, WIDTH), "down": (1, 4 * WIDTH)}
        self.weights = {
            name: torch.randn(rows * WIDTH, columns, generator=random) / math.sqrt(columns)
            for name, (rows, columns) in shapes.items()
        }
        self.weights["qkv"][: 2 * WIDTH] *= 1.5
        self.other = torch.randn(WIDTH, WIDTH, generator=random) / math.sqrt(WIDTH)
        self.weights["bias"] = torch.randn(WIDTH, generator=random) / 4
        self.weights["condition"] = torch.randn(SAMPLES, 1, WIDTH, generator=random) / 4
        self.weights["update"] = torch.randn(WIDTH, 4, generator=random) @ torch.randn(4, WIDTH, generator=random) / 32
        self.mask = torch.zeros(TOKENS).index_fill(0, torch.arange(8), -math.inf)
        for name in ("out", "down", "bias", "update"):
            self.weights[name] *= quiet

    def __call__(self, dtype, fault=lambda name, values: values, product=torch.nn.functional.linear, **weights):
        x, gains = self.x.to(dtype).to(weights.get("computed", dtype)), self.gains
        weights = {name: weights.get(name, weight).to(dtype).to(x.dtype) for name, weight in self.weights.items()}

        def normed(values):
            return torch.nn.functional.layer_norm(values * gains.to(values.dtype), (WIDTH,))

        given = normed(x) + fault("condition", weights["condition"])
        q, k, v = product(given, weights["qkv"]).view(SAMPLES, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = fault("mask", self.mask.to(x.dtype)).expand(TOKENS, -1)
        heads = fault("heads", torch.nn.functional.scaled_dot_product_attention(q, k, v, mask))
        added = product(heads.transpose(1, 2).flatten(2), weights["out"]) + fault("bias", weights["bias"])
        x = x + fault("attention", added + fault("update", product(given, weights["update"])))
        hidden = torch.nn.functional.gelu(product(normed(x), weights["up"]))
        return fault("output", x + product(hidden, weights["down"]))


def changed(name, change):
    """A fault: what the block computes under this name becomes something else."""
    return lambda at, values: change(values) if at == name else values


def with_(value, *places):
    """The values with another one in these places."""

    def change(values):
        values = values.clone()
        values[places] = value
        return values

    return change


def noise(values):
    values = values.clone()
    spread = values[..., ORDINARY].std(1, keepdim=True)
    values[..., ORDINARY] = spread * torch.randn(spread.expand(-1, TOKENS, -1).shape).to(values.dtype)
    return values


FAULTS = {
    "attention gives zeros": changed("attention", torch.zeros_like),
    "attention's sign is flipped": changed("attention", torch.neg),
    "a head is dropped": changed("heads", with_(0.0, slice(None), 1)),
    "heads are swapped": changed("heads", lambda values: values.roll(1, 1)),
    "attention's tokens are shifted": changed("attention", lambda values: values.roll(1, 1)),
    "samples are swapped": changed("attention", lambda values: values.flip(0)),
    "the last token of attention is missing": changed("attention", with_(0.0, slice(None), -1)),
    "tokens are shifted": changed("output", lambda values: values.roll(1, 1)),
    "an ordinary channel is zero": changed("output", with_(0.0, ..., 20)),
    "a large channel is zero": changed("output", with_(0.0, ..., LARGE[0])),
    "ordinary channels are noise": changed("output", noise),
    "a value overflows": changed("output", with_(math.inf, 1, 5, 20)),
    "a value is no number": changed("output", with_(math.nan, 1, 5, 20)),
}


def wrong_outputs(block, dtype):
    """Each wrong output of the block by what is wrong."""
    made = {name: block(dtype, fault) for name, fault in FAULTS.items()}
    made["its input"] = block.x.to(dtype)
    made["a stale weight"] = block(dtype, out=block.other)
    made["all but what is given"] = block(dtype) - block.x.to(dtype)
    right = block(dtype)
    for name, part in {"last channels": (..., slice(-3, None)), "last sample's last token": (-1, -1)}.items():
        made[f"{name} as they were given"] = right.clone()
        made[f"{name} as they were given"][part] = block.x.to(dtype)[part]
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outlier", OUTLIERS)
def test_wrong_blocks_are_found_however_large_a_few_channels_are(dtype, outlier):
    block = Block(outlier)
    right = block(dtype)
    given = [torch.zeros(3), block.x.to(dtype)]
    found = {name: compare_to_rounding(out, right, given) for name, out in wrong_outputs(block, dtype).items()}
    assert len(found) == 18 and [name for name, times in found.items() if times is None] == []


def of_what_it_adds(part, at=...):
    """The output with this part of what the block adds, in some places or everywhere."""

    def wrong(block, dtype):
        given, out = block.x.to(dtype), block(dtype)
        out[at] = given[at] + (part * (out - given)[at].float()).to(dtype)
        return out

    return wrong


def faulty(*fault):
    return lambda block, dtype: block(dtype, changed(*fault))


@pytest.mark.parametrize(
    ("wrong", "quiet"),
    [
        pytest.param(wrong, quiet, id=f"{name}, {quiet}")
        for name, wrong, *sizes in (
            ("all but a twentieth of what it adds", of_what_it_adds(0.95), 1, 0.1, 0.03),
            ("half of what it adds", of_what_it_adds(0.5), 0.01),
            ("nothing added to a token", of_what_it_adds(0.0, (0, 5)), 0.03),
            ("a bias is missing", faulty("bias", torch.zeros_like), 0.03, 0.01),
            ("heads are swapped", faulty("heads", lambda values: values.roll(1, 1)), 0.01),
            ("samples with each other's condition", faulty("condition", lambda values: values.roll(1, 0)), 0.01),
            ("LoRA of strength 0.8", faulty("update", lambda values: 0.8 * values), 0.1, 0.03),
            ("the mask is ignored", faulty("mask", torch.zeros_like), 0.1),
        )
        for quiet in sizes
    ],
)
def test_faults_are_found_in_bf16_though_a_block_adds_little(wrong, quiet):
    block = Block(100, quiet)
    out, right = wrong(block, torch.bfloat16), block(torch.bfloat16)
    assert compare_to_rounding(out, right, [block.x.bfloat16()]) is not None


@pytest.mark.parametrize("quiet", [0.1, 0.03, 0.01, 0.001])
@pytest.mark.parametrize("dtype", HALF)
def test_rounding_passes_though_a_block_adds_little(dtype, quiet):
    block = Block(100, quiet)
    for out in (block(dtype, product=in_parts), block(dtype, computed=torch.float32).to(dtype)):
        assert compare_to_rounding(out, block(dtype), [block.x.to(dtype)]) is None


def test_parts_that_are_shorter_than_half_a_step_may_be_lost_in_other_sums():
    random = torch.Generator().manual_seed(0)
    given = torch.ones(1, 512, 64, dtype=torch.bfloat16)
    parts = [2**-7 * 0.3 * torch.randn(given.shape, generator=random) for _ in range(4)]
    one_by_one = functools.reduce(lambda x, part: x + part.bfloat16(), parts, given)
    at_once = (given.float() + sum(parts)).bfloat16()
    assert compare_to_rounding(one_by_one, at_once, [given]) is None


@pytest.mark.parametrize("at", [(0, 7), (0, slice(None), 7)])
def test_fifth_less_in_one_token_or_channel_of_many_is_found(at):
    random = torch.Generator().manual_seed(0)
    given, added = (torch.randn(1, 1024, 256, generator=random).bfloat16() for _ in range(2))
    right = given + added
    wrong = right.clone()
    wrong[at] -= 0.2 * added[at]
    assert compare_to_rounding(wrong, right, [given]) > 1


@pytest.mark.parametrize(("times", "passes"), [(2, True), (5, False)])
def test_value_may_be_off_by_what_its_channel_adds_a_few_times(times, passes):
    right = torch.ones(1, 1024, 1024).bfloat16()
    wrong = right.clone()
    wrong[0, 5, 7] += times
    assert (compare_to_rounding(wrong, right) is None) == passes


def in_parts(values, weight):
    """The product as sums of four parts, each rounded."""
    parts = zip(values.chunk(4, -1), weight.chunk(4, -1), strict=True)
    return sum(torch.nn.functional.linear(*part) for part in reversed(list(parts)))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("outlier", OUTLIERS)
def test_other_orders_of_rounding_pass_with_room_to_spare(dtype, outlier, monkeypatch):
    block = Block(outlier)
    right = block(dtype)
    others = [block(dtype, product=in_parts), block(dtype, computed=torch.float32).to(dtype)]
    monkeypatch.setattr(output_check, "STEPS", output_check.STEPS / 2)
    monkeypatch.setattr(output_check, "LEAST", output_check.LEAST / 2)
    assert [compare_to_rounding(other, right, [block.x.to(dtype)]) for other in others] == [None, None]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_pieces_find_what_the_whole_does(fault, monkeypatch):
    block = Block(100)
    given, right = block.x.half(), block(torch.float16, computed=torch.float32).half()
    out = block(torch.float16) if fault is None else block(torch.float16, FAULTS[fault])
    whole = compare_to_rounding(out, right, [given])
    monkeypatch.setattr(output_check, "_SMALLEST_PIECE", 100)
    assert compare_to_rounding(out, right, [given]) == (whole if whole is None else pytest.approx(whole, rel=1e-3))


def test_channels_of_pictures_are_found_on_either_side():
    block = Block(1000)
    for dtype, fault in itertools.product(DTYPES, (None, "a head is dropped", "an ordinary channel is zero")):
        made = block(dtype, FAULTS[fault]) if fault else block(dtype, product=in_parts)
        tokens = [tensor.view(SAMPLES, 12, 8, WIDTH) for tensor in (made, block(dtype), block.x.to(dtype))]
        pictures = [tensor.movedim(-1, 1) for tensor in tokens]
        dense = [tensor.contiguous() for tensor in pictures]
        for out, right, given in (tokens, pictures, dense):
            assert (compare_to_rounding(out, right, [given]) is None) == (fault is None), (dtype, fault)


@dataclasses.dataclass
class Made:
    out: torch.Tensor


SMALL, NAN = VALUE.view(4, 16), torch.full((64,), math.nan)
EIGHT = SMALL.to(torch.float8_e4m3fn)
OVERFLOWN = torch.where(VALUE > 0.9, math.inf, VALUE)
OUTPUTS = {
    "a value that is no number": (NAN, VALUE, [], math.inf),
    "one that is infinite, and alone": (torch.tensor(math.inf), torch.tensor(1.0), [], math.inf),
    "anything where the model itself overflows": (VALUE, NAN, [], None),
    "another value where it overflows": (torch.where(VALUE > 0.9, 2, VALUE), OVERFLOWN, [], None),
    "another value beside": (torch.where(VALUE > 0.8, 2, VALUE), OVERFLOWN, [], 1),
    "an input that is no number, and rounding": (VALUE * (1 + 1e-4), VALUE, [NAN], None),
    "an input that is no number": (VALUE * 2, VALUE, [-NAN], 1),
    "another shape": (VALUE[:1], VALUE, [], math.inf),
    "another type": (VALUE.double(), VALUE, [], math.inf),
    "other dimensions": (SMALL, VALUE, [], math.inf),
    "rounding in tuples": ((VALUE, [VALUE.half(), None]), (VALUE, [(VALUE * 1.005).half(), None]), [], None),
    "the second of two": ((VALUE, VALUE + 1), (VALUE, VALUE), [], 10),
    "one of many whole numbers": (torch.arange(64).clamp(1), torch.arange(64), [], None),
    "other whole numbers": (torch.arange(64) + 1, torch.arange(64), [], 10),
    "a mask": (VALUE > 0.5, VALUE > 0, [], 2),
    "nothing, and whole numbers": (
        (torch.empty(0), torch.ones(2).int()),
        (torch.empty(0), torch.ones(2).int()),
        [],
        None,
    ),
    "zeros": (torch.zeros(4), torch.zeros(4), [torch.ones(4)], None),
    "no zeros": (torch.ones(4), torch.zeros(4), [], 1),
    "a dict": ({"out": SMALL * 1.5}, {"out": SMALL}, [], 2),
    "an object": (Made(SMALL * 1.5), Made(SMALL), [], 2),
    "complex numbers": (torch.complex(SMALL, SMALL) * 1.5, torch.complex(SMALL, SMALL), [], 2),
    "eight bits": ((-SMALL).to(EIGHT.dtype), EIGHT, [], 1),
}
"""(output, what is right, inputs, how many times as much as rounding explains they differ; None: no more than that)"""


@pytest.mark.parametrize(("out", "right", "given", "times"), OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_of_any_kind_are_compared(out, right, given, times):
    types = {torch.bfloat16, torch.float8_e4m3fn} if right is EIGHT else ()
    found = compare_to_rounding(out, right, given, types)
    assert found is None if times is None else found == times if times == math.inf else found > times
    assert times in (None, math.inf) or compare_to_rounding(right, right, given, types) is None


@pytest.mark.parametrize(
    ("types", "passes"),
    [
        ((torch.float32,), 5e-3),
        ((torch.float16, torch.bool), 5e-3),
        ((torch.bfloat16,), 2e-2),
        ((torch.bfloat16, torch.float8_e4m3fn), 5e-2),
        ((torch.bfloat16, torch.uint8), 0.2),
    ],
)
def test_coarsest_numbers_in_a_call_say_what_rounding_explains(types, passes):
    """A stream in float32 whose blocks compute in bf16 is as exact as these."""
    random = torch.Generator().manual_seed(0)
    right, error = torch.randn(2, 500, generator=random), torch.randn(2, 500, generator=random)
    assert compare_to_rounding(right + passes * error, right, types=types) is None
    assert compare_to_rounding(right + 4 * passes * error, right, types=types) > 1
    assert compare_to_rounding(right + 4 * passes * error, right, types=types, depth=16) is None


def test_sums_that_are_rounded_to_half_precision_explain_more():
    right = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)).half()
    assert compare_to_rounding(right * 1.02, right) > 1
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert compare_to_rounding(right * 1.02, right) is None
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
