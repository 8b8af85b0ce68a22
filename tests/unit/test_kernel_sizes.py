"""Which generated kernels may take sizes of 32 bits, and how they divide by these."""

import random

import pytest
import torch
from comfy_accel.accel.kernels.sizes import DIVIDED, multiplies_sizes
from kit.interpreted import interpreted, kernels

HEAD = """
x0 = (xindex % ks0)
x1 = xindex // ks1
tmp0 = tl.load(in_ptr0 + (x0 + ks0 * ks1 * x1), xmask).to(tl.float32)
"""


@pytest.mark.parametrize(
    ("line", "multiplies"),
    [
        ("tl.store(out_ptr0 + (x0 + 4*ks0*x1), tmp0, xmask)", False),
        ("tl.store(out_ptr0 + (x0), tmp0, x0 < ks0*ks1)", True),
        ("tl.store(out_ptr0 + ((x0 + ks0*x1) // ks2), tmp0, xmask)", True),
        ("tmp1 = tl.load(in_ptr1 + (x0), x0 < 4*ks0, other=0.0)", True),
        ("x2 = xindex // (ks0*ks1)", True),
        ("tmp2 = ks0*ks1", True),
        ("tmp2 = tmp0 * ks0**2", True),
        ("tmp2 = tmp0 + ks0", False),
    ],
)
def test_product_of_sizes_does_no_harm_in_an_address_alone(line, multiplies):
    assert multiplies_sizes(HEAD + line) is multiplies


KERNEL = """
import triton, triton.language as tl
{divided}

@triton.jit
def quotients(index, inverse, out, step: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, divided(tl.load(index + at), step, tl.load(inverse + at)))
"""


def test_quotients_by_inverses_are_exact(tmp_path):
    """By every kind of size, at and before multiples of it, up to the largest index; in Triton's interpreter."""
    pytest.importorskip("triton", reason="torch has no Triton on this system")
    numbers, most, step, count = random.Random(0), 2**31 - 1, 24, 2**14
    sizes = [size for bits in range(32) for size in (2**bits - 1, 2**bits, 2**bits + 1) if 0 < size <= most]
    pairs = []
    for size in (*sizes, 3072, 4352, 46341, 65521, *(numbers.randint(1, most) for _ in range(30))):
        whole = [numbers.randint(1, most // size) * size for _ in range(60)]
        pairs += [(index, size) for first in (1, most, *whole) for index in (first - 1, first)]
    pairs = (pairs * 2)[:count]
    index = torch.tensor([index for index, _ in pairs], dtype=torch.int32)
    inverse = torch.tensor([1 + (2**62 - 1) // size for _, size in pairs])
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL.format(divided=DIVIDED.format(name="divided")), encoding="utf-8")
    calls = [("quotients", (1,), (index, inverse, torch.empty_like(index), by, count)) for by in (1, step)]
    for by, (_, _, quotients, *_) in zip((1, step), interpreted(kernels, str(file), calls), strict=True):
        assert quotients.tolist() == [index // by // size for index, size in pairs]
