"""What sizes the inputs of a block have in a larger call: found without computing anything."""

import functools
import gc
import sys
import types

import pytest
import torch
from comfy_accel.accel.dispatch.batch_dry_run import BatchDryRun
from comfy_accel.accel.dispatch.global_state_guard import global_state_restored
from comfy_accel.accel.modules.substitution import Order, substituted
from kit.blocks import Stop


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


LARGER = [[(2, 3, 4), (1, 3, 4), (2, 1, 1)]] * 2
"""Of both blocks: more rows of the image and of the modulation, not of the positions."""


def asked(hooks, batch=1, without_hooks=dict, model=None, interrupts=(), x=None, **given):
    """What the dry run says of each block when it is asked within a call of the model."""
    model, answers, tensors = model or Model(), {}, {}
    tensors_of = {block: lambda call: list(call[0]) for block in model.blocks}
    dry_run = BatchDryRun(model, tensors_of, without_hooks, interrupts)

    def asker(block):
        def layer(inner, *args):
            answers[block] = dry_run.larger(block, args)
            tensors[block] = args
            return inner(*args)

        return layer

    layers = {model: dry_run, **{block: asker(block) for block in model.blocks}}
    with torch.inference_mode(), substituted(layers, Order.COMPILED):
        out = model(torch.zeros(batch, 3, 4) if x is None else x, torch.ones(batch), hooks, **given)
    assert type(out) is torch.Tensor
    assert dry_run.larger(model.blocks[0], tensors[model.blocks[0]]) is None  # outside of a call
    return list(answers.values())


def test_positions_do_not_grow():
    assert asked({}) == LARGER


def test_larger_batch_is_not_asked_about():
    assert asked({}, batch=3) == [None, None]


def test_mask_of_one_row_for_every_image_is_left_as_it_is():
    assert asked({}, model=Masked(), mask=torch.ones(1, 3, 1)) == LARGER


class Masked(Model):
    """One mask for every image, which core's HunyuanVideo copies into a tensor of one row."""

    def forward(self, x, timestep, hooks, mask):
        rows = torch.zeros(1, x.shape[1], 1)
        rows[:] = mask
        return super().forward(x + rows, timestep, hooks)


class Level(torch.nn.Module):
    def forward(self, x, residual):
        return x + residual


class Halving(torch.nn.Module):
    """Halves an image [B, C, H, W], and adds what a ControlNet gives for that size."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Level()])

    def forward(self, x, timestep, hooks):
        return self.blocks[0](torch.nn.functional.avg_pool2d(x, 8), hooks["control"])


@pytest.mark.parametrize("batch", [1, 2])
def test_deeper_level_of_a_small_latent_is_larger_than_one_pixel(batch):
    control = {"control": torch.zeros(batch, 4, 1, 2)}
    assert asked(control, model=Halving(), x=torch.zeros(batch, 4, 8, 16)) == [[(2, 4, 2, 4)] * 2]
    assert asked({"control": torch.zeros(2, 4, 2, 2)}, model=Halving(), x=torch.zeros(2, 4, 16, 16)) == [None]


def test_nobodys_hooks_run_twice():
    calls = []
    hooks = {"wrappers": [lambda: calls.append(1)]}
    assert asked(hooks, without_hooks=lambda options: {}) == LARGER
    assert calls == [1]


def test_model_that_needs_values_is_known_up_to_there():
    assert asked({"reads values": True}) == LARGER


def test_other_layers_do_not_see_the_look_and_stay():
    model, calls = Model(), []

    def cached(inner, *args):
        calls.append(1)
        return inner(*args)

    with substituted({model.blocks[0]: cached}, Order.CACHED):
        stand_in = model.blocks[0].__dict__["forward"]
        assert asked({}, model=model) == LARGER
        assert model.blocks[0].__dict__["forward"].items == stand_in.items
    assert calls == [1]
    assert "forward" not in model.blocks[0].__dict__


def test_interrupt_passes_through_the_look():
    class Interrupted(Model):
        def forward(self, x, timestep, hooks):
            if len(x) == 2:
                raise RuntimeError("wrapped") from Stop()
            return super().forward(x, timestep, hooks)

    with pytest.raises(Stop):
        asked({}, model=Interrupted(), interrupts=(Stop,))
    assert asked({}, model=Interrupted()) == [None, None]


MEMO = {}
NESTED = {"cpu": {}, "kept": torch.ones(1)}
LAST = None


@functools.lru_cache(maxsize=4)
def grid(size):
    return torch.arange(size * 4.0).view(1, -1, 4)


@functools.lru_cache(maxsize=4)
def untouched(size):
    return torch.zeros(size)


class Helper:
    """A plain object that keeps something."""

    def __init__(self):
        self.kept = None


HELPER = Helper()


@pytest.fixture
def nothing_kept():
    global LAST
    LAST = Keeping.of_class = HELPER.kept = None
    MEMO.clear()
    NESTED["cpu"].clear()
    grid.cache_clear()
    Keeping.of_method.cache_clear()


class Keeping(Model):
    """Keeps what depends on the number of tokens alone, wherever there is a place to keep it."""

    of_class = None

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, 1, 4), persistent=False)
        self.registry, self.attribute, self.rows, self.helper = {}, None, 0, Helper()
        self.bound = self.on_self

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def of_method(self, size):
        return torch.zeros(1, size, 4)

    def on_self(self, zeros):
        if self.attribute is None:
            self.attribute = self.helper.kept = zeros
            self.kept = zeros + 0
            self.blocks[0].attribute = zeros
            self.blocks[0]._buffers["late"] = zeros

    def forward(self, x, timestep, hooks):
        global LAST
        size = x.shape[1]
        self.rows = x.shape[0]
        zeros = self.of_method(size)
        self.bound(zeros)
        found = [
            self.registry.setdefault(size, zeros),
            MEMO.setdefault(size, zeros),
            NESTED["cpu"].setdefault(size, [zeros])[0],
        ]
        if LAST is None:
            LAST = Keeping.of_class = HELPER.kept = zeros
        kept = [self.attribute, self.helper.kept, self.kept, self.blocks[0].attribute, LAST, self.of_class, HELPER.kept]
        x = x + sum(found) + sum(kept) + grid(size) * 0
        return super().forward(x, timestep, hooks)


@pytest.fixture(params=[False, True], ids=["", "frozen"])
def frozen(request):
    """As in a program that has frozen what it loaded: Python then lists none of it."""
    (gc.freeze if request.param else gc.unfreeze)()
    yield
    gc.freeze()


def test_nothing_without_values_is_remembered(nothing_kept, frozen):
    model, kept = Keeping(), untouched(3)
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    dry_run = BatchDryRun(model, {block: lambda call: list(call[0]) for block in model.blocks})
    seen = dry_run(lambda *args: dry_run._look(), torch.zeros(1, 3, 4), torch.ones(1), {})
    assert [len(calls) for calls in seen.values()] == [1, 1]
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    assert (model.attribute, model.registry, model.rows, model.helper.kept) == (None, {}, 0, None)
    assert (MEMO, NESTED["cpu"], LAST, Keeping.of_class, HELPER.kept) == ({}, {}, None, None, None)
    assert model.of_method.cache_info().currsize == grid.cache_info().currsize == 0
    assert untouched(3) is kept
    assert_real(model)


def assert_real(model):
    with torch.inference_mode():
        out = model(torch.zeros(1, 3, 4), torch.ones(1), {})
    assert type(out) is torch.Tensor
    assert torch.equal(out, Model()(torch.zeros(1, 3, 4), torch.ones(1), {}))


def test_caches_beside_the_classes_of_weights_are_looked_at_too(monkeypatch):
    kernels, fake = types.ModuleType("kernels_of_others"), object()
    kernels.KEPT = {}
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    stored = type("Stored", (torch.Tensor,), {"__module__": kernels.__name__})
    layer = torch.nn.Linear(2, 2)
    layer.weight = torch.nn.Parameter(torch.ones(2, 2).as_subclass(stored))
    with global_state_restored(layer, lambda value: value is fake):
        kernels.KEPT["a"] = fake
    assert kernels.KEPT == {}


def test_modules_may_come_and_go_while_garbage_is_collected():
    """As generated code does, which is a module and goes with its graph."""

    def come(phase, info):
        sys.modules[f"accel_test_module_{len(sys.modules)}"] = types.ModuleType("accel_test_module")

    before, thresholds = sys.modules.copy(), gc.get_threshold()
    gc.callbacks.append(come)
    gc.set_threshold(1, 1 << 30)  # of the youngest objects alone, which is quick
    try:
        with global_state_restored(Model(), lambda value: False):
            pass
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(come)
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]
