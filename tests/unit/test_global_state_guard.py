"""What code of quantised weights' classes keeps of a trace is taken back."""

import functools
import gc
import sys
import types

import pytest
from comfy_accel.accel.dispatch.global_state_guard import global_state_restored

KERNELS = "kernels_of_others"
FAKE = object()


@pytest.fixture
def kernels(monkeypatch):
    module = types.ModuleType(KERNELS)
    module.Table = type("Table", (), {"__module__": KERNELS, "kept": None, "by_size": {}})
    module.kept, module.tables, module.nested, module.cache = (
        None,
        {"a": 1},
        {"cpu": [2]},
        functools.cache(lambda size: FAKE),
    )
    module.workspace = type("Workspace", (), {"__module__": KERNELS})()
    module.workspace.kept = None
    monkeypatch.setitem(sys.modules, KERNELS, module)
    return module


@pytest.mark.parametrize("is_frozen", [False, True])
def test_nothing_of_a_trace_is_remembered(kernels, is_frozen):
    other = functools.cache(lambda: 1)
    other()
    (gc.freeze if is_frozen else gc.unfreeze)()  # Python then lists nothing of what there was
    with global_state_restored({KERNELS}, lambda value: value is FAKE):
        kernels.kept = kernels.Table.kept = kernels.new = FAKE
        kernels.tables["b"] = kernels.Table.by_size[3] = FAKE
        kernels.nested["cpu"].append(FAKE)
        kernels.tables_of_others = {"c": 3}
        kernels.workspace.kept = kernels.workspace.new = FAKE
        kernels.cache(1)
    gc.freeze()
    assert (kernels.kept, kernels.Table.kept, hasattr(kernels, "new")) == (None, None, False)
    assert (kernels.tables, kernels.Table.by_size, kernels.nested) == ({"a": 1}, {}, {"cpu": [2]})
    assert vars(kernels.workspace) == {"kept": None}
    assert kernels.tables_of_others == {"c": 3} and kernels.cache.cache_info().currsize == 0
    assert other.cache_info().currsize == 1


def test_modules_may_come_and_go_while_garbage_is_collected():
    """As generated code does, which is a module and goes with its graph."""

    def come(phase, info):
        sys.modules[f"accel_test_module_{len(sys.modules)}"] = types.ModuleType("accel_test_module")

    before, thresholds = sys.modules.copy(), gc.get_threshold()
    gc.callbacks.append(come)
    gc.set_threshold(1, 1 << 30)  # of the youngest objects alone, which is quick
    try:
        with global_state_restored({KERNELS}, lambda value: False):
            pass
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(come)
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]
