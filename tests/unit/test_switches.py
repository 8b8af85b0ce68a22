"""How torch is set: code that asks for it is traced, with the answer of the moment, and another answer is noticed.

A getter that a new torch brings is found here: in the modules that have such, whatever asks for nothing is called in a
traced function.
"""

import inspect
import sys
import types

import pytest
import torch
from comfy_accel.accel.signature import switches
from kit.code_swaps import flash_attention
from torch.backends import ContextProp

BACKENDS = {name: module for name, module in sorted(sys.modules.items()) if name.startswith("torch.backends.")}
BEGINNINGS, ENDS = ("get_", "is_", "are_", "version"), ("_enabled", "_allowed")

NO_SETTINGS = {
    *("torch.get_rng_state", "torch.get_file_path", "torch.vitals_enabled"),  # a state, a place, torch's own counters
    *("torch.is_grad_enabled", "torch.is_inference_mode_enabled"),  # modes of a call, for which graphs are not made
    *("torch.get_autocast_ipu_dtype", "torch.get_autocast_xla_dtype"),  # which nobody has here
    *("torch.is_autocast_ipu_enabled", "torch.is_autocast_xla_enabled"),
}
UNTRACED = {f"{name}.fp32_precision" for name in ("conv", "matmul", "rnn")}
"""What torch itself asks by a class that it does not trace. No model does."""


def functions():
    """(name, function) of all that asks for nothing, by their names."""
    for place, module in {"torch": torch, **BACKENDS}.items():
        for name, value in sorted(vars(vars(module).get("m", module)).items()):
            is_asking = name.startswith(BEGINNINGS) or (name.endswith(ENDS) and "set_" not in name and name[0] != "_")
            if (
                is_asking
                and isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
                and takes_nothing(value)
            ):
                yield f"{place}.{name}", value


def takes_nothing(function):
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C: some take a tensor
        try:
            return not isinstance(function(), torch.Tensor)
        except (TypeError, RuntimeError):
            return False
    return not parameters


def attributes():
    """(name, owner, attribute) of the settings that are attributes."""
    yield from ((name, torch.backends.cuda.matmul, name) for name in switches._PRODUCTS)
    for place, module in BACKENDS.items():
        found = {place: module, **{f"{name}": getattr(module, name, None) for name in ("conv", "matmul", "rnn")}}
        for path, owner in found.items():
            names = {"fp32_precision"} if type(owner).__name__ == "_FP32Precision" else dir(type(owner))
            for name in names:
                is_setting = isinstance(inspect.getattr_static(type(owner), name, None), ContextProp)
                if is_setting or type(owner).__name__ == "_FP32Precision":
                    yield f"{path}.{name}", owner, name


def traced(ask):
    torch._dynamo.reset()

    def function(x):
        return x + 1, ask()

    with switches.treat_as_constants():
        return torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))[1]


@pytest.mark.parametrize(("name", "ask"), [item for item in functions() if item[0] not in NO_SETTINGS])
def test_functions_that_answer_how_torch_is_set_are_traced(name, ask):
    assert traced(ask) == ask()


@pytest.mark.parametrize(("name", "owner", "attribute"), [item for item in attributes() if item[0] not in UNTRACED])
def test_attributes_that_say_how_torch_is_set_are_traced(name, owner, attribute):
    assert traced(lambda: getattr(owner, attribute)) == getattr(owner, attribute)


def test_torchs_table_of_constants_is_as_before_afterwards():
    from torch._dynamo.variables.torch import constant_fold_functions

    before = dict(constant_fold_functions)
    with switches.treat_as_constants():
        assert len(constant_fold_functions) > len(before)
    assert constant_fold_functions == before


def test_another_answer_is_another_setting_for_code_that_names_it_alone():
    answers = []
    for is_on in (True, False):
        with flash_attention(is_on):
            answers.append([switches.read_settings(names) for names in ({"flash_sdp_enabled"}, {"forward"})])
    (named, other), (named_later, other_later) = answers
    assert named != named_later and other == other_later == ()
