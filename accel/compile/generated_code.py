"""The code that inductor generates: at which stage that is, the modules it keeps for good, and how to drop some."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core import torch_internals
from ..core.events import emit

TRACE, GENERATE, BUILD = STAGES = ("trace", "generate", "build")
"""The stages of a compilation: a block is traced, its code is generated, and kernels are built from that."""

BESIDE = "beside"
"""The stage of blocks that no image waits for."""


@contextmanager
def building_told() -> Iterator[None]:
    """A context that emits "compile_stage" when inductor begins to build kernels from a graph's code."""
    generate = torch_internals.GENERATED_CODE.get(None)
    if generate is None:
        yield
        return
    wrapper = torch_internals.PYTHON_WRAPPER.get()

    def generate_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        code = generate(self, *args, **kwargs)
        if type(self) is wrapper:  # else of a part of a graph
            emit("compile_stage", stage=BUILD)
        return code

    with torch_internals.GENERATED_CODE.replace(generate_and_tell):
        yield


@contextmanager
def own_settings() -> Iterator[None]:
    """A context in which inductor launches our kernels as fast as its own (`STATIC_LAUNCH`), where torch can.

    On Windows, where a path has 260 characters, its GPU kernels have numbers for names. Described by what they compute,
    they have up to 115, and the files in Triton's cache, behind two hashes and the user's folder, 254 to 292.
    """
    from torch._inductor import config

    changed = {"triton.descriptive_names": False} if sys.platform == "win32" else {}
    if torch_internals.STATIC_LAUNCH.is_there:
        changed[torch_internals.STATIC_LAUNCH.name] = True
    with config.patch(changed):
        yield


def all_modules() -> list[types.ModuleType]:
    """All modules of generated code that inductor keeps; none before anything was compiled or loaded."""
    if torch_internals.CODE_CACHE.module not in sys.modules:  # importing it takes seconds
        return []
    cache = torch_internals.CODE_CACHE.get(None)
    return [] if cache is None else [*cache.modules, *getattr(cache, "modules_no_attr", {}).values()]


@contextmanager
def collect_modules() -> Iterator[list[types.ModuleType]]:
    """A list that has, at the end, the modules added meanwhile; the caller lets nobody else compile."""
    before, added = set(all_modules()), []
    yield added
    added.extend(module for module in all_modules() if module not in before)


def load_entry(entry: Any) -> Callable:
    """What runs a saved graph, given the entry of torch's cache that is saved of it."""
    entry.compiled_fw = LoadedCode(entry.compiled_fw.result)
    return torch_internals.LOADED_ENTRY.get()(entry)


class LoadedCode:
    """Loads and calls one graph's generated code, as torch's classes do, but without the compiler: they import it to
    ask whether tests or a debugger want to see the code or the call, which takes 0.7 s."""

    def __init__(self, graph: Any):
        self._graph = graph

    def load(self, inputs: Sequence[Any]) -> LoadedCode:
        return self

    def post_compile(self, _: LoadedCode, settings: Any) -> LoadedCode:
        graph, constants = self._graph, torch_internals.LOADED_CONSTANTS.get()()
        if graph._triton_bundle:
            torch_internals.LOADED_KERNELS.get()(graph._triton_bundle)
        graph.after_deserialization(constants)
        graph.post_compile([], constants, settings)
        self.current_callable = graph.current_callable
        return self

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.current_callable(inputs)


def bytes_of(modules: Sequence[types.ModuleType]) -> int:
    """Size of the generated code, bytes: its source files and the libraries built from them."""
    files = set()
    for module in modules:
        files.add(module.__file__)
        for value in vars(module).values():
            files.add(getattr(getattr(value, "lib", None), "_name", None))
    return sum(os.path.getsize(file) for file in files if file and os.path.isfile(file))


def release(scope: dict, modules: Sequence[types.ModuleType]) -> None:
    """Free a dropped graph's memory: torch would keep its code for good. scope: globals of the function compiled."""
    scope.update(dict.fromkeys(scope))  # the names stay: torch deletes some itself, later
    if not modules:
        return
    cache = torch_internals.CODE_CACHE.get()
    gone = set(map(id, modules))
    cache.modules[:] = [module for module in cache.modules if id(module) not in gone]
    without_attributes = getattr(cache, "modules_no_attr", {})
    for path in [path for path, module in without_attributes.items() if id(module) in gone]:
        del without_attributes[path]
    kept = {module.__file__ for module in all_modules()}
    for module in modules:
        if module.__file__ not in kept:
            getattr(cache, "linemaps", {}).pop(module.__file__, None)
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]
