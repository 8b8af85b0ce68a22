"""The captured calls of a run: when they are made, told apart and marked failed, and that they are always right."""

import contextlib
import functools
import gc
import operator
import random
import weakref
from copy import deepcopy

import pytest
import torch
from comfy_accel.accel.core.reasons import Reason, RunEagerly
from comfy_accel.accel.cuda_graphs.model_guard import CaptureHost
from comfy_accel.accel.dispatch.block_runner import NotReady
from comfy_accel.accel.fingerprint.code_hash import CodeReader
from comfy_accel.accel.modules.snapshot import WeightSnapshot
from kit.blocks import Stop, raising
from kit.captures import (
    STAGES,
    CpuCapturer,
    Toy,
    capturing_cache,
    check_calls,
    latent,
    left,
    reasons,
    run,
    settle,
    storage,
    times,
)
from kit.code_swaps import flash_attention


def test_third_call_is_captured_and_the_rest_are_replays_in_this_run_and_the_next():
    model, (cache, capturer) = Toy(), capturing_cache()
    with run(model, cache) as call:
        # Each call until then runs the model; the second has a dry run besides, the third captured besides.
        assert check_calls(model, call, 6) == 3 + 2
        assert (capturer.warm_ups, capturer.captures, capturer.replays) == (1, 1, 1 + 3)
    with run(model, cache) as call:
        assert check_calls(model, call, 3) == 0
    capturer.assert_reads_only(*model.parameters(), *model.buffers(), *buffers(cache))
    assert cache.statistics()["captures"] == 1 and cache.statistics()["compilations"] == 0
    assert reasons() == []


def buffers(cache):
    return [tensor for member in cache.captures.members for tensor in member._buffers.tensors]


def test_output_stays_as_it_was_when_the_next_call_is_made():
    model, (cache, _) = Toy(), capturing_cache()
    with run(model, cache) as call:
        settle(call, latent(), times())
        first = call(latent(1), times())
        kept = first.clone()
        call(latent(2), times())
    assert torch.equal(first, kept)


def variants():
    x, t = latent(), times()
    context = torch.ones(2, 3, 8)
    return {
        "plain": ((x, t), {}),
        "batch": ((latent(batch=4), times(batch=4)), {}),
        "size": ((latent(tokens=7), t), {}),
        "type": ((x, t.double()), {}),
        "context": ((x, t), {"context": context}),
        "longer context": ((x, t), {"context": torch.ones(2, 6, 8)}),
        "residual": ((x, t), {"control": {"middle": [torch.ones(2, 5, 8)]}}),
        "other residuals": ((x, t), {"control": {"middle": [None, torch.ones(2, 5, 8)]}}),
        "number": ((x, t), {"scale": 0.5}),
        "other number": ((x, t), {"scale": 0.25}),
    }


def test_what_changes_the_work_is_captured_apart_and_what_changes_values_is_not():
    model, (cache, capturer) = Toy(), capturing_cache()
    calls = variants()
    with run(model, cache) as call:
        for _ in range(5):
            for args, kwargs in calls.values():
                given, named = deepcopy((args, kwargs))  # calls use lists up
                assert torch.equal(call(*given, **named), model(*deepcopy(args), **deepcopy(kwargs)))
    assert capturer.captures == len(calls)
    with run(model, cache, CaptureHost(facts="another attention")) as call:
        settle(call, latent(), times())
    assert capturer.captures == len(calls) + 1
    capturer.assert_reads_only(*model.parameters(), *model.buffers(), *buffers(cache))


@contextlib.contextmanager
def switched(holder, name, value):
    names = (name, "fp32_precision") if holder is MATMUL and hasattr(holder, "fp32_precision") else (name,)
    before = [getattr(holder, name) for name in names]
    setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(holder, name, value)


MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.mark.parametrize(
    "other",
    [
        functools.partial(switched, MATMUL, "allow_tf32", True),
        functools.partial(switched, MATMUL, "allow_bf16_reduced_precision_reduction", False),
        functools.partial(switched, CUDNN, "deterministic", True),
        functools.partial(flash_attention, False),
    ],
)
def test_switch_of_torch_that_changes_results_is_captured_apart(other):
    """As a node sets them for one run and back after it."""
    model, (cache, capturer) = Toy(), capturing_cache()
    for context, captures in ((contextlib.nullcontext, 1), (other, 2), (contextlib.nullcontext, 2), (other, 2)):
        with context(), run(model, cache) as call:
            settle(call, latent(), times())
        assert capturer.captures == captures


def test_odd_strides_share_a_capture_with_even_ones():
    model, (cache, capturer) = Toy(), capturing_cache()
    with run(model, cache) as call:
        settle(call, latent(), times())
        odd = latent(3).transpose(0, 1).contiguous().transpose(0, 1)
        wide = torch.randn(2, 10, 8)[:, ::2]
        row = latent(4)[:1].expand(2, -1, -1)
        for x in (odd, wide, row):
            assert torch.equal(call(x, times()), model(x.contiguous(), times()))
    assert (capturer.captures, capturer.replays) == (1, 1 + 3)


def replace_weight(model):
    model.blocks[1].weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)


def swap_data(model):
    model.blocks[2].bias.data = torch.randn(8)


def replace_buffer(model):
    model.shift = torch.randn(8)


def remove_bias(model):
    model.blocks[1].bias = None


def move_all(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [replace_weight, swap_data, replace_buffer, remove_bias, move_all])
@pytest.mark.parametrize("when", ["between runs", "within a run"])
def test_moved_weights_drop_the_capture_and_the_next_call_makes_one(change, when):
    model, (cache, capturer) = Toy(), capturing_cache()
    with run(model, cache) as call:
        check_calls(model, call, 5)
        if when == "within a run":
            change(model)
            check_calls(model, call, 4)
    if when == "between runs":
        change(model)
        with run(model, cache) as call:
            check_calls(model, call, 4)
    assert (capturer.warm_ups, capturer.captures, left(capturer)) == (1, 2, 1)
    capturer.assert_reads_only(*model.parameters(), *model.buffers(), *buffers(cache))


def test_weight_that_no_sample_looks_at_is_noticed_before_the_output_is_used():
    model, (cache, capturer) = Toy(blocks=100), capturing_cache()
    with run(model, cache) as call:
        check_calls(model, call, 4)
        for block in list(model.blocks)[:10:2]:
            block.bias.data = torch.randn(8)
            check_calls(model, call, 3)
    assert capturer.captures == 1 + 5


def test_weights_changed_in_place_need_no_new_capture_though_the_host_has_them_looked_at_again():
    model, (cache, capturer), token = Toy(), capturing_cache(), [0]
    with run(model, cache, CaptureHost(token=lambda: token[0])) as call:
        check_calls(model, call, 4)
        with torch.no_grad():
            model.blocks[0].weight.mul_(0.5)
        check_calls(model, call, 3)
        token[0] = 1
        check_calls(model, call, 3)
    assert capturer.captures == 1


def hook(model):
    return model.blocks[1].register_forward_hook(lambda module, args, out: out * 2).remove


def other_forward(model):
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda x: own(x) * 2
    return lambda: delattr(model.blocks[1], "forward")


@pytest.mark.parametrize("put", [hook, other_forward])
def test_code_put_into_the_model_in_mid_run_runs_and_so_does_the_model_without_it(put):
    model, (cache, _) = Toy(), capturing_cache()
    with run(model, cache) as call:
        check_calls(model, call, 4)
        take_away = put(model)
        check_calls(model, call, 3)
        take_away()
        check_calls(model, call, 4)
    with run(model, cache) as call:
        take_away = put(model)
        check_calls(model, call, 4)
        take_away()
    assert reasons() == ["code of another extension runs in Linear blocks.1"]


@pytest.mark.parametrize("index", [0, 1])
def test_model_that_changes_from_call_to_call_is_left_alone_after_a_while(index):
    model, (cache, capturer) = Toy(blocks=100), capturing_cache()
    with run(model, cache) as call:
        check_calls(model, call, 4)
        for _ in range(20):
            model.blocks[index].bias.data = torch.randn(8)  # a sample looks at the second
            check_calls(model, call, 3)
    assert capturer.captures < 12 and reasons() == ["its weights or its code change from call to call"]


def toy_with(forward, **attributes):
    """A toy's class with another forward."""
    return type("Other", (Toy,), {"forward": forward, **attributes})


plain = Toy.forward
Draws = toy_with(lambda self, x, t: plain(self, x, t) + torch.rand(()))
DrawsInPython = toy_with(lambda self, x, t: plain(self, x, t) + random.random())
Waits = toy_with(lambda self, x, t: plain(self, x, t) * (2.0 if t.max().item() > 1 else 1.0))
Remembers = toy_with(lambda self, x, t: plain(self, x, t) + self.held[0], held=[torch.ones(8)])
WritesInputs = toy_with(lambda self, x, t: plain(self, x.mul_(0.5), t))
MakesTensors = toy_with(lambda self, x, t: plain(self, x, t) * torch.tensor([1.0] * 8))
ReadsAnOption = toy_with(lambda self, x, t, options: plain(self, x, t) * options["noise"])


class WritesItself(Toy):
    def forward(self, x, t):
        self.shift += 1
        return super().forward(x, t)


class Counts(Toy):
    calls = {"number": 0}

    def forward(self, x, t):
        self.calls["number"] += 1
        return super().forward(x, t) * self.calls["number"]


class CountsOnItself(Toy):
    number = 0

    def forward(self, x, t):
        self.number += 1
        return super().forward(x, t) * self.number


@pytest.mark.parametrize(
    "cls, said",
    [
        (Draws, "random numbers"),
        (DrawsInPython, "random numbers"),
        (Waits, "values pass between"),
        (Remembers, "keeps or changes tensors"),
        (WritesInputs, "keeps or changes tensors"),
        (WritesItself, "keeps or changes tensors"),
        (MakesTensors, "values pass between"),
        (Counts, "change from call to call"),
        (CountsOnItself, "change from call to call"),
    ],
)
def test_what_a_capture_would_not_do_again_is_told_once_and_nothing_is_captured(cls, said):
    """And what the model draws, writes and counts is what it would without us."""
    made = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        Counts.calls, model, (cache, capturer) = {"number": 0}, cls(), capturing_cache()
        for _ in range(2):
            with run(model, cache) if is_ours else contextlib.nullcontext(model) as call, torch.no_grad():
                made += [call(latent(seed), times(seed)) for seed in range(4)]
        counted = torch.tensor(Counts.calls["number"])
        made += [torch.rand(1), torch.tensor(random.random()), model.shift.clone(), counted]
    assert all(map(torch.equal, made[: len(made) // 2], made[len(made) // 2 :]))
    assert (capturer.warm_ups, capturer.captures) == (cls not in (Counts, CountsOnItself), 0)
    (reason,) = reasons()
    assert said in reason


class Keeps(Toy):
    """As Anima, which keeps the embedding of its time steps for whoever asks."""

    def forward(self, x, t):
        self.last = out = super().forward(x, t)
        return out * 2


def test_what_a_model_keeps_of_each_call_and_never_reads_is_no_weight_of_it():
    model, (cache, capturer) = Keeps(), capturing_cache()
    unread = CodeReader().read(frozenset(map(type, model.modules()))).unread
    assert unread == {"last"}
    host = CaptureHost(snapshot=functools.partial(WeightSnapshot, unread=unread))
    for _ in range(2):
        with run(model, cache, host) as call:
            for seed in range(5):
                out = call(latent(seed), times(seed))
                kept = model.last
                assert torch.equal(out, model(latent(seed), times(seed)))
                assert storage(kept) not in {storage(made) for graph in capturer.graphs for made in graph._made}
    assert capturer.captures == 1 and capturer.replays == 1 + 2 + 5 and reasons() == []


def test_what_is_read_by_a_name_that_is_made_may_be_a_weight():
    def reads(self):
        return getattr(self, f"kept_{len(self.names)}"), operator.attrgetter("early.shape")(self)

    def keeps(self, x):
        self.kept_0 = self.early = self.never = x

    assert CodeReader().read(frozenset(), (reads, keeps)).unread == {"never"}


def test_call_that_is_not_captured_has_no_weights_held():
    """Each weight is looked at for that, which a call that stays uncaptured can do without."""
    model, (cache, capturer) = Waits(), capturing_cache()
    held = []
    host = CaptureHost(hold=lambda: held.append(0) or frozenset())
    for _ in range(2):
        with run(model, cache, host) as call:
            for seed in range(6):
                call(latent(seed), times(seed))
    assert capturer.captures == 0 and len(reasons()) == 1
    assert len(held) == 3  # the dry run, before which each call may be the one that is captured
    with run(model, cache, host, inner=lambda *args, **kwargs: None) as call:
        for _ in range(4):
            call(latent(), control=object())
    assert len(held) == 3


def test_streamed_weights_are_not_held_for_a_capture_where_memory_is_short_and_others_do_not_matter():
    model, (cache, capturer) = Toy(), capturing_cache()
    capturer.room = False
    with run(model, cache, CaptureHost(hold=lambda: frozenset({0}))) as call:
        assert check_calls(model, call, 4) == 4 and capturer.warm_ups == 0
    assert reasons() == [str(Reason("weights_streamed"))]
    with run(model, cache) as call:
        check_calls(model, call, 4)
    assert capturer.captures == 1


def test_capture_is_not_replayed_while_weights_that_it_reads_are_not_held():
    model, (cache, capturer) = Toy(), capturing_cache()
    for held in ("ab", "a"):
        replays = capturer.replays
        with run(model, cache, CaptureHost(hold=lambda held=held: frozenset(held))) as call:
            assert torch.equal(call(latent(), times()), model(latent(), times()))
            assert capturer.replays == replays, f"a replay with only {held} held"
            check_calls(model, call, 4)
    assert capturer.captures == 2


def test_training_and_gradients_are_left_alone():
    model, (cache, capturer) = Toy().train(), capturing_cache()
    with run(model, cache) as call:
        check_calls(model, call, 4)
    model = Toy().requires_grad_(True)
    with run(model, cache) as call:
        x = latent().requires_grad_(True)
        for _ in range(4):
            call(x, times()).sum().backward()
        assert x.grad.abs().sum() > 0
    assert capturer.captures == capturer.warm_ups == 0
    assert reasons() == ["it is being trained", "gradients are requested, and compiled graphs give none"]


def test_option_that_differs_in_each_call_is_named_where_the_model_reads_it():
    model, (cache, _) = ReadsAnOption(), capturing_cache()
    with run(model, cache, CaptureHost(simplify=lambda options: {})) as call:
        for _ in range(4):
            call(latent(), times(), {"noise": 2.0})
    (reason,) = reasons()
    assert reason.endswith("it reads noise from the per-call options")


def test_reasons_of_host_and_capturer_are_told_once():
    model, (cache, capturer) = Toy(), capturing_cache()
    capturer.reason = Reason("not_cuda", device="cpu")
    with run(model, cache) as call:
        check_calls(model, call, 4)
    with run(model, cache, CaptureHost(why_not=lambda: Reason("memory_needed"))) as call:
        check_calls(model, call, 4)
    with run(model, cache, CaptureHost(simplify=raising(RunEagerly(Reason("patched", patch="attn1"))))) as call:
        for _ in range(4):
            call(latent(), times(), control={"middle": []})
    assert capturer.warm_ups == 0
    assert reasons() == [
        "CUDA graphs need an NVIDIA card, and the model runs on cpu",
        "the memory of its captures is needed elsewhere during this run",
        "another node patches it (attn1)",
    ]


def test_call_in_which_the_device_never_waits_is_not_captured_but_one_of_another_size_may_be():
    model, (cache, capturer) = Toy(), capturing_cache()
    for _ in range(2):
        with run(model, cache) as call:
            capturer.device_waits = False
            assert check_calls(model, call, 4) == 4
            assert capturer.warm_ups == capturer.captures == 0
    with run(model, cache) as call:
        capturer.device_waits = True
        assert check_calls(model, call, 5, tokens=2) == 3 + 2 and capturer.captures == 1
    capturer.device_waits = False  # what has been captured is replayed all the same
    with run(model, cache) as call:
        assert check_calls(model, call, 2, tokens=2) == 0
    assert reasons() == ["the graphics card is at work all the time, so a CUDA graph would save nothing"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_failure_at_any_stage_leaves_every_output_right_and_no_memory_behind(stage, error):
    model, (cache, capturer) = Toy(), capturing_cache(CpuCapturer(stage, error))
    with run(model, cache) as call:
        check_calls(model, call, 8)
        check_calls(model, call, 4, tokens=9)
    tried = capturer.warm_ups + capturer.captures
    assert left(capturer) == 0 and cache.statistics()["bytes"] == 0
    if error is torch.OutOfMemoryError:
        assert all("memory is short" in reason for reason in reasons())
    else:
        assert all("simulated" in reason for reason in reasons())
        with run(model, cache) as call:
            check_calls(model, call, 4)
        assert capturer.warm_ups + capturer.captures == tried  # marked failed for good
    assert reasons()


@pytest.mark.parametrize("stage", STAGES)
def test_interrupt_passes_and_the_next_run_is_right(stage):
    model, (cache, capturer) = Toy(), capturing_cache(CpuCapturer(stage, Stop))
    host = CaptureHost(interrupts=(Stop,))
    with pytest.raises(Stop), run(model, cache, host) as call:
        check_calls(model, call, 8)
    capturer.fail_at = None
    with run(model, cache, host) as call:
        check_calls(model, call, 8)
    assert reasons() == [] and left(capturer) == 1


def test_capture_in_which_a_block_has_no_graph_at_hand_is_made_later():
    """Another thread may have dropped it meanwhile."""
    model, (cache, capturer) = Toy(), capturing_cache(CpuCapturer("begin", NotReady))
    with run(model, cache) as call:
        check_calls(model, call, 4)
        assert capturer.captures == 2 and left(capturer) == 0
        capturer.fail_at = None
        check_calls(model, call, 4)
    assert reasons() == [] and left(capturer) == 1


def test_capture_that_is_wrong_is_marked_failed_at_its_first_replay():
    class Wrong(CpuCapturer):
        def capture(self, device, call):
            graph, out = super().capture(device, call)
            graph._operators.pop()
            return graph, out

    model, (cache, capturer) = Toy(), capturing_cache(Wrong())
    with run(model, cache) as call:
        check_calls(model, call, 6)
    assert "differs from the call itself" in reasons()[0] and len(reasons()) == 1
    assert capturer.captures == 1 and left(capturer) == 0


def test_clearing_evicting_and_a_model_that_is_gone_free_the_captures():
    model, (cache, capturer) = Toy(), capturing_cache()
    with run(model, cache) as call:
        check_calls(model, call, 4)
        cache.clear()  # in mid-run, from another thread
        assert left(capturer) == 0
        check_calls(model, call, 4)
    assert left(capturer) == 1
    gone = weakref.ref(model)
    del model, call
    gc.collect()
    assert gone() is None
    assert left(capturer) == 0 and cache.statistics()["bytes"] == 0
    cache.captures.drop(cache)
