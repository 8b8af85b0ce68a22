"""Tests of CUDA paths on the made-up device (`tests/kit/made_up_device`), in processes of test_made_up_device.py.

Values are zeros there. So these tests are about shapes, counts, memory and what is refused.
"""

import os

from kit import made_up_device  # noqa: E402

if made_up_device.is_here():
    made_up_device.prepare()
    os.environ["ACCEL_STORE"] = "off"
else:
    collect_ignore_glob = ["*"]
