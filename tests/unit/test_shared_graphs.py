"""What one model's call meets says nothing of a graph that other models run too: only the graph's own failure does."""

import types

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.reasons import Reason, RunEagerly
from comfy_accel.accel.dispatch.block_observer import BlockObserver
from comfy_accel.accel.dispatch.compiled_layers import Host
from comfy_accel.accel.hosts.diffusers.peft import PeftLayers
from kit.blocks import Stop, layers_of, model_of, of_a_pack, reasons
from kit.compiled import graphs

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
NO_MEMORY = torch.OutOfMemoryError("no more")


class Block(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = torch.nn.LayerNorm(4)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(self.norm(x)))


class Store:
    """It has nothing, keeps the names of what is saved, and of what is distrusted."""

    def __init__(self):
        self.distrusted = []

    def candidates(self, *_):
        return ()

    def save(self, key, name, devices, graph, interrupts):
        graph.saved_as = name

    def distrust(self, stem):
        self.distrusted.append(stem)
        return True


def raising(*errors):
    """A function that raises these, one a call, None for no error, and then nothing."""
    left = list(errors)

    def call(*_):
        error = left.pop(0) if left else None
        if error is not None:
            raise error

    return call


class Run:
    """A model's first block in one run, called as its model calls it. hook: another pack's, on a part of it."""

    def __init__(self, cache, seed=0, hook=None, **settings):
        self.model = model_of(Block(seed), Block(seed + 1))
        self.block, self.fail = self.model.blocks[0], raising()
        if hook is not None:
            self.block.norm.register_forward_hook(of_a_pack(hook))
        self.layers = layers_of(self.model, cache, Host(wraps=PeftLayers(), interrupts=(Stop,)), **settings)
        self.runner = self.layers[self.block]

    @torch.inference_mode()
    def call(self, x=X):
        return self.runner(lambda x: self.fail(x) or self.block(x), x)


def graph_raises(*errors):
    def put(run, graph, patch):
        own, fail = graph.run, raising(*errors)
        patch.setattr(graph, "run", lambda tensors: fail() or own(tensors))

    return put


def both_raise(run, graph, patch):
    run.fail = raising(ValueError("wrong size"))
    graph_raises(ValueError("wrong size"))(run, graph, patch)


def eager_raises(run, graph, patch):
    run.fail = raising(ValueError("once"))


def weights_raise(run, graph, patch):
    own, fail = run.runner._weights.take, raising(None, ValueError("a layer of an extension"))
    patch.setattr(run.runner, "_weights", types.SimpleNamespace(take=lambda x: fail() or own(x), release=lambda: None))


def is_captured(run, graph, patch):
    run.runner.observer = BlockObserver(capturing=True)
    graph_raises(RuntimeError("not while capturing"))(run, graph, patch)


def caused(error, cause):
    error.__cause__ = cause
    return error


CAUSES = {
    "memory": (graph_raises(NO_MEMORY), None),
    "memory that a library asked for": (graph_raises(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED in cublasCreate")), None),
    "memory of the process": (graph_raises(MemoryError()), None),
    "interrupt": (graph_raises(Stop()), Stop),
    "interrupt inside another error": (graph_raises(caused(RuntimeError(), Stop())), Stop),
    "Ctrl+C": (graph_raises(KeyboardInterrupt()), KeyboardInterrupt),
    "wrong input": (both_raise, ValueError),
    "refusal": (graph_raises(RunEagerly(Reason("code_changes"))), None),
    "capture": (is_captured, RuntimeError),
}
COMPARED = {**CAUSES, "block compared with": (eager_raises, None), "streamed weights": (weights_raise, None)}


@pytest.mark.parametrize(
    "cause, measured", [*((cause, False) for cause in CAUSES), *((cause, True) for cause in COMPARED)]
)
def test_graph_stays_whatever_happens_in_one_call(cause, measured, monkeypatch):
    cache, (put, raised) = GraphCache(), COMPARED[cause]
    cache.store = Store()
    run, other = Run(cache, measured=measured), Run(cache, seed=7)
    for _ in range(1 if measured else 3):
        run.call()
    with torch.inference_mode():
        expected, expected_of_other = run.block(X), other.block(X)
    (entry,) = cache._entries.values()
    (graph,) = entry.graphs
    with monkeypatch.context() as patch:
        put(run, graph, patch)
        if raised is None:
            assert torch.equal(run.call(), expected)
        else:
            with pytest.raises(raised):
                run.call()
    assert entry.graphs == [graph] and entry.failure is None and cache.store.distrusted == []
    assert cause != "wrong input" or reasons() == []
    hits = entry.calls
    assert torch.equal(other.call(), expected_of_other) and entry.calls == hits + 1
    run = Run(cache)
    assert torch.equal(run.call(), expected) and entry.calls == hits + 2 and graphs() == 1


def test_graph_that_fails_where_its_block_does_not_is_dropped(monkeypatch):
    cache = GraphCache()
    cache.store = Store()
    run = Run(cache)
    run.call()
    graph_raises(*[RuntimeError("no kernel image")] * 9)(
        run, next(iter(cache._entries.values())).graphs[0], monkeypatch
    )
    for _ in range(3):
        run.call()
    assert cache.store.distrusted == ["Block"] and graphs() == 2
    assert reasons() == ["its compiled graph failed: RuntimeError: no kernel image"]


@pytest.mark.parametrize("times", [1, 99])
def test_code_of_others_that_fails_within_a_graph_leaves_its_block_uncompiled_for_this_run_alone(times):
    calls, fails = [], set()

    def hook(part, args, out):
        calls.append(1)
        if len(calls) in fails:
            raise ValueError("of the pack")

    cache = GraphCache()
    run = Run(cache, hook=hook)
    with torch.inference_mode():
        expected = run.block(X)
    for _ in range(3):
        run.call()
    fails.update(range(len(calls) + 1, len(calls) + 1 + times))
    before = len(calls)
    if times == 1:
        assert torch.equal(run.call(), expected)
        assert len(calls) == before + 2 and "through no fault of its compiled graph" in reasons()[0]
        run.call()
        assert len(calls) == before + 3 and run.runner.eager_calls == 2
    else:
        with pytest.raises(ValueError, match="of the pack"):
            run.call()
    fails.clear()
    run.call()
    other = Run(cache, hook=hook)
    assert torch.equal(other.call(), expected) and other.runner.eager_calls == 0
    assert graphs() == 1 and cache.statistics()["graphs"] == 1
