"""Which generated kernels may take sizes of 32 bits."""

import pytest
from comfy_accel.accel.kernels.sizes import multiplies_sizes

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
