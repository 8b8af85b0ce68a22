"""What code of quantised weights' classes keeps of a trace is taken out of its tables again."""

import sys
import types

from comfy_accel.accel.dispatch.resolver import tables_restored

KERNELS = "kernels_of_others"
FAKE = object()


def test_nothing_of_a_trace_is_left_in_a_table_and_all_else_is(monkeypatch):
    """As `_HADAMARD_CACHE` and `_SVDQUANT_WORKSPACE_CACHE` of comfy-kitchen, whether the trace ends well or not."""
    module = types.ModuleType(KERNELS)
    module.by_size, module.workspaces = {1: "one"}, {}
    monkeypatch.setitem(sys.modules, KERNELS, module)
    try:
        with tables_restored({KERNELS}, lambda value: value is FAKE):
            module.by_size[2], module.by_size[3], module.workspaces["cpu"] = FAKE, "three", (1, FAKE)
            raise ArithmeticError
    except ArithmeticError:
        pass
    assert (module.by_size, module.workspaces) == ({1: "one", 3: "three"}, {})
