"""Weights checked together in inductor's generated code.

Inductor asserts the sizes and strides of each input at each call, a third of a microsecond each: more for a block of
twenty weights than all that dispatch adds to a call of it. One guard of torch's, made of weights that have passed the
asserts, compares all of them in a fifth of that, and they are asserted one by one only where it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core import torch_internals
from ..signature.argument_guard import has_native_guard

_OF_CONSTANT_SIZES = re.compile(r"assert_size_stride\((\w+), \([\d, ]*\), \([\d, ]*\)\)")
_FEWEST = 4
"""Inputs of constant sizes from which on a guard is quicker than asserts."""

_NAME = "known_inputs"


@contextmanager
def checked_together() -> Iterator[None]:
    """A context in which inductor generates code that checks inputs of constant sizes together.

    Where this torch lacks what that takes, nothing changes.
    """
    if torch_internals.lacking(torch_internals.CHECKED_TOGETHER) is not None or not has_native_guard():
        yield
        return
    wrapper = torch_internals.PYTHON_WRAPPER.get()
    write_asserts = wrapper.codegen_input_size_asserts

    def write(self: Any) -> None:
        if type(self) is not wrapper:  # of a part of a graph, or in C++
            return write_asserts(self)
        prefix, self.prefix = self.prefix, type(self.prefix)()
        try:
            write_asserts(self)
            lines = self.prefix.getvalue().splitlines()
        finally:
            self.prefix = prefix
        # A newer torch (2.13 does) writes them later, each before the first kernel that takes the input.
        later = getattr(self, "_pending_input_asserts", {})
        all_lines = [*lines, *(f"assert_size_stride({name}, {', '.join(layout)})" for name, layout in later.items())]
        known = {found[1]: line for line in all_lines if (found := _OF_CONSTANT_SIZES.fullmatch(line))}
        if len(known) < _FEWEST:
            prefix.writelines(lines)
            return
        for name in known:
            later.pop(name, None)
        self.header.writeline(f"{_NAME} = []")
        prefix.writelines(line for line in lines if not _OF_CONSTANT_SIZES.fullmatch(line))
        given = ", ".join(known)
        prefix.writeline(f"if not {_NAME} or not {_NAME}[0].check({given}):")
        with prefix.indent():
            prefix.writelines(known.values())
            prefix.writeline(f"if not {_NAME}:")
            with prefix.indent():
                guard = f"{torch_internals.TENSOR_GUARDS}({given}, dynamic_dims_sizes=None, dynamic_dims_strides=None)"
                prefix.writeline(f"{_NAME}.append({guard})")

    with torch_internals.INPUT_ASSERTS.replaced(write):
        yield
