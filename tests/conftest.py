"""Makes the pack importable as `comfy_accel`, the way ComfyUI loads it: by file, as a package.

The pack's root is deliberately not on `sys.path`: it holds a `nodes` package, and ComfyUI's own
nodes.py must stay `import nodes`.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if "comfy_accel" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "comfy_accel", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["comfy_accel"] = package
    spec.loader.exec_module(package)

# At the end, so that `bench` can be imported and `nodes` still means ComfyUI's nodes.py.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
