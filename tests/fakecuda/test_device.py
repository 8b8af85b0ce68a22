"""The made-up device keeps CUDA's rules: what a capture forbids, what runs when, what memory there is."""

import pytest
import torch
from kit import made_up_device as device


def test_values_that_only_copies_carry_are_right_in_captures_too():
    given, taken = torch.arange(4.0).cuda(), torch.zeros(4).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken.copy_(given)
    assert taken.cpu().tolist() == [0, 0, 0, 0]
    graph.replay()
    assert taken.cpu().tolist() == [0, 1, 2, 3]


def test_its_memory_is_bounded():
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    free, of = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * of, dtype=torch.uint8, device="cuda")
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] == free - (1 << 30)
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def waits_for_a_value(x):
    x.sum().item()


def waits_for_the_device(x):
    torch.cuda.synchronize()


def leaves_a_stream_unjoined(x):
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        x.add_(1)


def waits_for_work_outside(x):
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(aside)


@pytest.mark.parametrize(
    "call", [waits_for_a_value, waits_for_the_device, leaves_a_stream_unjoined, waits_for_work_outside]
)
def test_what_a_capture_forbids_fails_it(call):
    # Torch's allocator takes such a capture to last, so that tests of memory stand before this one.
    x = torch.zeros(4).cuda()
    with pytest.raises(RuntimeError, match="captur"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(x)
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert not torch.cuda.is_current_stream_capturing()


def test_work_takes_as_long_as_a_test_says_and_the_host_waits_where_a_device_makes_it():
    x = torch.zeros(4).cuda()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    waits = device.counts().waits
    torch.cuda._sleep(20_000_000)  # so that the host is ahead
    device.launches_take(100)
    began.record()
    for _ in range(7):
        x.add_(1)
    ended.record()
    device.launches_take(0)
    assert not began.query() and device.counts().waits == waits
    ended.synchronize()
    assert device.counts().waits == waits + 1
    assert began.elapsed_time(ended) == pytest.approx(0.7, rel=1e-3)
