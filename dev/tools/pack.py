"""This pack as the package `comfy_accel`, loaded the way ComfyUI loads it: by file. Standard library only."""

import importlib.util
import sys
from types import ModuleType

from dev import ROOT

NAME = "comfy_accel"


def load() -> ModuleType:
    """The pack's package; afterwards `import comfy_accel.accel...` works.

    The pack's root is deliberately not put on `sys.path`: it holds a `nodes` package, and ComfyUI's own
    nodes.py must stay `import nodes`. In such a process `comfy_accel` is never the wheel of that name.
    """
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        package = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = package
        spec.loader.exec_module(package)
    return sys.modules[NAME]
