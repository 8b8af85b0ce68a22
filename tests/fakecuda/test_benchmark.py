"""Verdicts on the made-up device, where a test says how long kernels take: about the device, not about launching."""

import time

import pytest
import torch
from comfy_accel.accel.compile.benchmark import Benchmark
from comfy_accel.accel.signature import output_check
from kit import made_up_device as device

CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def kernels_take_no_time_afterwards():
    yield
    device.launches_take(0)


def block(kernels, microseconds, launching=0.0):
    """So many kernels of so long each; the host needs `launching` seconds more for their launches."""
    x = torch.zeros(64, device=CARD)

    def call():
        time.sleep(launching)
        device.launches_take(microseconds)
        for _ in range(kernels):
            x.add_(1)
        device.launches_take(0)
        return x

    return call


def verdict(compiled, eager, captured, call=Benchmark.call):
    benchmark = Benchmark()
    while not benchmark.done:
        call(benchmark, compiled, eager, CARD, captured)
    return "slower" if benchmark.verdict else "kept", benchmark.gain


# Uncaptured, the host's time counts too, which on a busy machine is more than that of little work.
@pytest.mark.parametrize(("unit", "captured"), [(100, True), (1000, True), (1000, False)])
@pytest.mark.parametrize("call", [Benchmark.call, Benchmark.call_one_way])
def test_graph_of_less_work_for_the_device_is_kept_and_one_of_more_is_not(unit, captured, call):
    fast, slow = block(3, unit), block(6, unit)
    assert verdict(fast, slow, captured, call)[0] == "kept"
    assert verdict(slow, fast, captured, call)[0] == "slower"


def test_launching_does_not_count_where_calls_are_captured():
    """As at small sizes: the host needs far longer than the device."""
    kept, gain = verdict(block(3, 100, launching=0.004), block(6, 100), captured=True)
    assert kept == "kept" and gain == pytest.approx(300e-6, rel=0.2)
    assert verdict(block(6, 100), block(3, 100, launching=0.004), captured=True)[0] == "slower"


def test_launching_counts_elsewhere_where_the_device_waits_for_it():
    assert verdict(block(3, 100, launching=0.01), block(6, 100), captured=False)[0] == "slower"
    assert verdict(block(6, 1000), block(6, 1100, launching=0.001), captured=False)[0] == "kept"


@pytest.mark.parametrize("shape", [(1, 4608, 1024), (2, 320, 64, 64)])
def test_comparing_outputs_takes_less_memory_than_one_more_of_them(shape):
    out, right, given = (torch.empty(shape, dtype=torch.bfloat16, device=CARD) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output_check._worst.__wrapped__(out, right, [given], 2**-7, 2**-5)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes
