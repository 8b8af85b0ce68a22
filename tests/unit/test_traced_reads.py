"""Whatever a block's code reads, and however: another value there is noticed, or the block runs uncompiled and why.

Each way is a function that reads a gain, and one that sets it. It is set between images, and by the model's own code
between its blocks: from the first image on, and from a later one.
"""

import builtins
import collections
import contextvars
import ctypes
import enum
import sys
import threading
import types
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from comfy_accel.accel import accelerate_module
from comfy_accel.accel.cache.graph_cache import shared
from comfy_accel.accel.compile import traced_reads
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.fingerprint.code_snapshot import CodeSnapshot
from kit.thorough import tuples_except
from torch.nn.attention import SDPBackend, sdpa_kernel

settings = types.ModuleType("settings_of_a_test")
settings.table = {"gain": 1.0}
UNWATCHED, KEPT = {"read_unwatched"}, {"keeps_state"}

GAIN, ONE_TENSOR = 1.0, torch.tensor(1.0)
LOCAL, QUEUE, NUMBER = threading.local(), collections.deque([1.0]), ctypes.c_float(1.0)
OF_CONTEXT = contextvars.ContextVar("gain", default=1.0)
TABLE, NESTED, BACKENDS = {"gain": 1.0}, {"inner": [1.0]}, [SDPBackend.MATH]
SPACE = types.SimpleNamespace(gain=1.0, inner=types.SimpleNamespace(gain=1.0))
gelu, code_of = F.gelu, builtins.ord


class Slots:
    __slots__ = ("gain",)


class Meta(type):
    gain = 1.0


class OfMeta(metaclass=Meta):
    pass


class Config:
    gain = 1.0


class Derived(Config):
    pass


class One:
    _instance = None

    @classmethod
    def get(cls):
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance


class Finding:
    def __init__(self):
        self.found = {"gain": 1.0}

    def __getattr__(self, name):
        return self.found[name]


class Kind(enum.Enum):
    ONE = 1.0


SLOTS, FINDING = Slots(), Finding()


def with_attribute(h):
    return h * with_attribute.gain


def with_default(h, gain=1.0):
    return h * gain


def with_table(h, options={"gain": 1.0}):  # noqa: B006
    return h * options["gain"]


def around_gain():
    gain = 1.0

    def scale(h):
        return h * gain

    def set_gain(value):
        nonlocal gain
        gain = value

    return scale, set_gain


scale, set_gain = around_gain()


def import_module(block, h):
    import settings_of_a_test

    return h * settings_of_a_test.gain


def import_function(block, h):
    import torch.nn.functional

    return torch.nn.functional.gelu(h)


def set_global(value):
    global GAIN
    GAIN = value


def set_type(value):
    torch.set_default_dtype(torch.float32 if value == 1.0 else torch.float64)


def set_gelu(value):
    F.gelu = gelu if value == 1.0 else lambda h: gelu(h) * value


def set_ord(value):
    builtins.ord = code_of if value == 1.0 else lambda letter: value


def with_backends(h, **options):  # as core's attention on a card
    options["gain"] = float(len(BACKENDS))
    with sdpa_kernel(BACKENDS, set_priority=True):
        return h * options["gain"]


def set_backends(value):
    BACKENDS[:] = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION][: 2 - (value == 1.0)]


def set_class(value):
    Config.gain = value


def set_module(value):
    settings.gain = value


@dataclass
class Way:
    """read: multiplies a tensor by the gain, for a block. set: sets it. reasons: why the block runs uncompiled."""

    read: object
    set: object
    reasons: set = field(default_factory=set)


def put_item(container, key):
    def put(value):
        container[key] = value

    return put


def put_gain(owner, name="gain"):
    return lambda value: setattr(owner, name, value)


def on_blocks(find):
    def put(value):
        for block in Net.all_blocks:
            find(block).gain = value

    return put


def set_in_lists(value):
    for block in Net.all_blocks:
        block.gains[0] = value


matmul = torch.backends.cuda.matmul
WAYS = {
    "a global": Way(lambda block, h: h * GAIN, set_global),
    "a module's": Way(lambda block, h: h * settings.gain, set_module),
    "a module's, by a string": Way(lambda block, h: h * getattr(settings, "gain"), set_module),  # noqa: B009
    "a module's, by a made-up string": Way(lambda block, h: h * getattr(settings, "niag"[::-1]), set_module, UNWATCHED),
    "a module's table": Way(lambda block, h: h * settings.table["gain"], put_item(settings.table, "gain")),
    "a module that it imports": Way(import_module, set_module),
    "torch's, that it imports": Way(import_function, set_gelu),
    "a built-in function": Way(lambda block, h: h * ord("\1"), set_ord),
    "an object with slots": Way(lambda block, h: h * SLOTS.gain, put_gain(SLOTS), UNWATCHED),
    "what a function gives": Way(lambda block, h: h * One.get().gain, lambda value: put_gain(One.get())(value), KEPT),
    "a thread's": Way(lambda block, h: h * LOCAL.gain, put_gain(LOCAL), UNWATCHED),
    "a queue": Way(lambda block, h: h * QUEUE[0], put_item(QUEUE, 0), UNWATCHED),
    "a context's": Way(lambda block, h: h * OF_CONTEXT.get(), OF_CONTEXT.set, {"untraceable", "read_unwatched"}),
    "a namespace": Way(lambda block, h: h * SPACE.inner.gain, put_gain(SPACE.inner)),
    "a table": Way(lambda block, h: h * TABLE["gain"], put_item(TABLE, "gain")),
    "a nested list": Way(lambda block, h: h * NESTED["inner"][0], put_item(NESTED["inner"], 0)),
    "a tensor, written to": Way(lambda block, h: h * ONE_TENSOR, lambda value: ONE_TENSOR.fill_(value)),
    "a class's": Way(lambda block, h: h * Derived.gain, set_class),
    "a metaclass's": Way(lambda block, h: h * OfMeta.gain, put_gain(Meta)),
    "an enumeration's": Way(lambda block, h: h * Kind.ONE.value, put_gain(Kind.ONE, "_value_")),
    "what `__getattr__` finds": Way(lambda block, h: h * FINDING.gain, put_item(FINDING.found, "gain")),
    "a function's attribute": Way(lambda block, h: with_attribute(h), put_gain(with_attribute)),
    "a default": Way(lambda block, h: with_default(h), lambda value: setattr(with_default, "__defaults__", (value,))),
    "a default's item": Way(lambda block, h: with_table(h), put_item(with_table.__defaults__[0], "gain")),
    "a cell": Way(lambda block, h: scale(h), set_gain),
    "torch's enumeration": Way(lambda block, h: with_backends(h), set_backends),
    "torch's function": Way(lambda block, h: F.gelu(h), set_gelu),
    "torch's type of tensors": Way(lambda block, h: h * (1 + torch.ones(1).element_size()), set_type),
    "torch's switch": Way(
        lambda block, h: h * (0.3 if matmul.allow_fp16_accumulation else 1.0),
        lambda value: setattr(matmul, "allow_fp16_accumulation", value != 1.0),
    ),
    "torch's answer": Way(
        lambda block, h: h * (1.0 if torch.backends.cuda.flash_sdp_enabled() else 0.3),
        lambda value: torch.backends.cuda.enable_flash_sdp(value == 1.0),
    ),
    "the block's": Way(lambda block, h: h * block.gain, on_blocks(lambda block: block)),
    "its part's": Way(lambda block, h: h * block.b.gain, on_blocks(lambda block: block.b)),
    "its list's": Way(lambda block, h: h * block.gains[0], set_in_lists),
    "its object's": Way(lambda block, h: h * block.config.gain, on_blocks(lambda block: block.config)),
}


FROM_THE_FIRST = [(name, 0) for name in ("a global", "torch's type of tensors", "its part's", "a table")]
LATER = [
    (name, 3)
    for name in ("a global", "a module's", "a nested list", "a class's", "a default", "a cell", "torch's function")
    + ("torch's type of tensors", "torch's switch", "the block's", "its object's", "a tensor, written to")
]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.gain, self.gains, self.config = 1.0, [1.0], Config()
        self.b.gain = self.config.gain = 1.0

    def forward(self, x):
        return x + self.read(self.b(torch.relu(self.a(x))))


class Net(torch.nn.Module):
    """Its image: how many were made. first: the first one in which `set` is called around the third block."""

    all_blocks = []

    def __init__(self, way, first, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        cls = type("Reads", (Block,), {"read": way.read})
        self.blocks, self.set = torch.nn.ModuleList(cls() for _ in range(blocks)), way.set
        self.image, self.first = 0, first

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if self.image >= self.first:
                self.set(0.3 if number == 2 else 1.0)
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "settings_of_a_test", settings)
    monkeypatch.setenv("ACCEL_STORE", "off")
    shared.clear()
    yield
    for way in WAYS.values():
        way.set(1.0)


def nets(way, first=1000, blocks=4):
    way.set(1.0)
    net, plain = (Net(way, first, blocks).eval() for _ in range(2))
    Net.all_blocks = [*net.blocks, *plain.blocks]
    return accelerate_module(net, "eager", measured=False), plain


def check(net, plain):
    x = torch.linspace(-1, 1, 80, dtype=torch.float32).view(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain(x))


def assert_reasons(way):
    reasons = {row["code"] for row in fallbacks.rows()}
    assert reasons <= way.reasons and bool(reasons) == bool(way.reasons)  # versions of torch differ in which


@pytest.mark.parametrize("name", WAYS)
def test_another_value_between_images_is_noticed_wherever_it_is_read(name):
    way = WAYS[name]
    net, plain = nets(way)
    for gain in (1.0, 1.0, 0.3, 0.3, 1.0):
        way.set(gain)
        check(net, plain)
    assert_reasons(way)


@pytest.mark.parametrize(
    ("name", "first"), tuples_except([(name, first) for name in WAYS for first in (0, 3)], *FROM_THE_FIRST, *LATER)
)
def test_what_the_model_itself_sets_before_a_block_counts(name, first):
    way = WAYS[name]
    net, plain = nets(way, first)
    for image in range(6):
        net.image = plain.image = image
        check(net, plain)
    assert_reasons(way)


def test_a_model_that_sets_nothing_is_compared_before_each_block_in_its_first_pass_alone(monkeypatch):
    compared, is_current, counts = [], CodeSnapshot.is_current, {}
    monkeypatch.setattr(CodeSnapshot, "is_current", lambda snapshot: compared.append(snapshot) or is_current(snapshot))
    for blocks in (2, 5):
        shared.clear()
        net, plain = nets(Way(lambda block, h: h * Config.gain, lambda value: None), blocks=blocks)
        for image in range(2):
            compared.clear()
            check(net, plain)
            counts[blocks, image] = len(compared)
    assert counts[5, 0] == counts[2, 0] + 2 * 3  # code and settings, before three more blocks
    assert counts[5, 1] == counts[2, 1]


def test_places_are_looked_up_as_torch_names_them(monkeypatch):
    """Torch may rename what is asked: then nothing is refused, and this test fails."""
    asked = []
    own = traced_reads._Reads.is_watched
    monkeypatch.setattr(
        traced_reads._Reads, "is_watched", lambda reads, source, *of: asked.append(source) or own(reads, source, *of)
    )
    net, plain = nets(WAYS["a namespace"])
    check(net, plain)
    names = set(map(traced_reads.place_of, asked))
    assert any(name.endswith("SPACE.inner.gain") for name in names), names


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return out * 0.3 if function is torch.relu else out


def tagged(x):
    x = x.clone()
    x.tag = 0.3
    return x


@pytest.mark.parametrize(
    ("read", "other", "code"),
    [
        (lambda block, h: h, lambda x: x.as_subclass(Loud), "unsupported_argument"),
        (lambda block, h: h * getattr(block.given, "tag", 1.0), tagged, "read_unwatched"),
    ],
    ids=["its class", "an attribute on it"],
)
def test_more_of_an_input_than_its_values_counts(read, other, code):
    class Given(Block):
        def forward(self, x):
            return (
                x + self.b(torch.relu(self.a(x))) * getattr(x, "tag", 1.0)
                if code == "read_unwatched"
                else super().forward(x)
            )

    net, plain = nets(Way(read, lambda value: None))
    for each in (net, plain):
        for block in each.blocks:
            block.__class__ = type("Given", (Given,), {"read": read})
    x = torch.linspace(-1, 1, 80, dtype=torch.float32).view(2, 5, 8)
    with torch.no_grad():
        for given in (x, x, other(x), other(x), x):
            out, expected = net(given), plain(given)
            assert type(out) is type(expected)
            torch.testing.assert_close(out.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
    assert {row["code"] for row in fallbacks.rows()} == {code}


class Keeps(Block):
    def forward(self, x):
        kept = self.kept = self.b(torch.relu(self.a(x)))  # which it does not read itself
        return x + kept


def kept_of(block):
    return block.kept


class Taps(Net):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + sum(kept_of(block) for block in self.blocks)


def test_what_a_block_keeps_for_its_model_is_kept():
    torch.manual_seed(0)
    net, plain = (Taps(Way(None, None), 0).eval() for _ in range(2))
    for block in (*net.blocks, *plain.blocks):
        block.__class__ = Keeps
    plain.load_state_dict(net.state_dict())
    accelerate_module(net, "eager", measured=False)
    for _ in range(3):
        check(net, plain)
    assert fallbacks.rows()[0]["reason"] == "its code keeps self.kept from one call to the next"


i = 0


def test_a_global_that_is_named_like_an_attribute_of_the_block_is_none_of_its_settings(monkeypatch):
    def read(block, h):
        return h * block.i

    net, plain = nets(Way(read, lambda value: None))
    for block in (*net.blocks, *plain.blocks):
        block.i = 1.0
    before = shared.statistics()["compilations"]
    for value in range(4):
        monkeypatch.setitem(globals(), "i", value)
        check(net, plain)
    assert shared.statistics()["compilations"] == before + 1


def test_what_torch_cannot_trace_is_said_by_its_name_and_whose_code_it_is():
    net, plain = nets(Way(lambda block, h: h * float(ctypes.sizeof(NUMBER) / 4), lambda value: None))
    check(net, plain)
    assert "torch cannot trace" in fallbacks.rows()[0]["reason"]
    assert "which <lambda> (unit/test_traced_reads.py) uses" in fallbacks.rows()[0]["reason"]
