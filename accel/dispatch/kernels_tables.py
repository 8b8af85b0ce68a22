"""Takes tensors without values out of the tables that quantised weights' kernels keep.

Torch cannot follow the classes of quantised weights and runs their code as it traces. What that code keeps by size and
device (a Hadamard matrix, a workspace) must not be there for the next real call to find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ..modules.code_owner import package_of


@contextmanager
def tables_restored(packages: Collection[str], foreign: Callable[[Any], bool]) -> Iterator[None]:
    """On exit, no table (dict) that is a global of these packages has a foreign value, or a tuple with one.

    foreign: whether a value must not stay.
    """
    try:
        yield
    finally:
        for table in _tables(packages):
            for key, value in list(table.items()):
                if any(map(foreign, value if type(value) is tuple else (value,))):
                    del table[key]


def _tables(packages: Collection[str]) -> Iterator[dict]:
    for name, module in sys.modules.copy().items():  # collecting garbage may drop generated code
        if package_of(name) in packages:
            yield from [value for value in list(vars(module).values()) if type(value) is dict]
