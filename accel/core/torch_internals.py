"""The private names of torch on which the engine rests. Torch may move or drop any of them in any release.

Everything else in the engine asks here, so that a new torch is checked in one place: `find_missing(ALL)`.

Outside stand, listed in `tests/unit/test_torch_internals.py`: types, settings that are left alone where torch has them
not, questions with a default answer, and what torch's own documentation uses.
"""

from __future__ import annotations

import functools
import getpass
import importlib
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch

try:
    getpass.getuser()
except (ImportError, KeyError, OSError):  # in a container, say; torch asks as its compiler is imported, in two places
    os.environ["LNAME"] = str(getattr(os, "getuid", int)())  # which Python alone reads

_ABSENT = object()

AnyFunction = TypeVar("AnyFunction")


class Lacking(ImportError):
    """This torch has no such name."""


@dataclass(frozen=True)
class Internal:
    """A private name of torch, which may have dots. without: what the engine does where it is missing. since: the first
    version in which it was seen; all of them were seen in 2.15."""

    module: str
    name: str
    without: str
    since: str = "2.10"

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_there(self) -> bool:
        return self._find() is not _ABSENT

    def get(self, default: Any = _ABSENT) -> Any:
        """The object of this name; the default where there is none. Raises Lacking without a default."""
        found = self._find()
        found = default if found is _ABSENT else found
        if found is _ABSENT:
            raise Lacking(f"this torch has no {self}")
        return found

    def replace(self, by: Any) -> Any:
        """A context in which torch has another object under this name, or with `start` the rest of the process."""
        owner, _, name = self.name.rpartition(".")
        holder = replace(self, name=owner).get() if owner else importlib.import_module(self.module)
        return patch.object(holder, name, by)

    def _find(self) -> Any:
        try:
            found: Any = importlib.import_module(self.module)
        except Exception:  # of a broken installation, of any type
            return _ABSENT
        for part in self.name.split("."):
            found = getattr(found, part, _ABSENT)
        return found


def find_missing(names: Iterable[Internal]) -> Internal | None:
    """The first of the names that this torch has not; None where it has all."""
    return next((name for name in names if not name.is_there), None)


_EAGERLY = "blocks run eagerly, and the reason names it"
_NOT_SAVED = "graphs are not saved"
_LTX = "blocks of LTX 2 run eagerly"
_COMPILED_TWICE = "a compiler around ours compiles our code too"
_BUILT_AGAIN = "saved C++ kernels are built again"

AOT_SWITCH = Internal("torch._dynamo.config", "enable_aot_compile", _EAGERLY)
AOT_FUNCTION = Internal("torch._dynamo.aot_compile", "AOTCompiledFunction", _EAGERLY)
AOT_CALLABLE = Internal("torch._dynamo.aot_compile_types", "SerializableCallable", _EAGERLY)
AOT_INDUCTOR = Internal("torch._dynamo.aot_compile_types", "BundledAOTAutogradSerializableCallable", _NOT_SAVED)
SOURCE_INFO = Internal("torch._dynamo.package", "SourceInfo", _NOT_SAVED)
READ_SOURCE = Internal("torch._dynamo.package", "SourceInfo.add_code", "tracing takes longer")
_RESULT = "torch._functorch._aot_autograd.aot_autograd_result"
LOADED_ENTRY = Internal(_RESULT, "deserialize_bundled_cache_entry", _NOT_SAVED)
LOADED_CONSTANTS = Internal("torch._inductor.output_code", "CompiledFxGraphConstants", _NOT_SAVED)
LOADED_KERNELS = Internal("torch._inductor.triton_bundler", "TritonBundler.read_and_emit", _NOT_SAVED)
LOOK_UP_BACKEND = Internal("torch._dynamo.backends.registry", "lookup_backend", _EAGERLY)
MARK_DYNAMIC = Internal("torch._dynamo", "maybe_mark_dynamic", _EAGERLY)
TRACING_CONTEXT = Internal("torch._guards", "TracingContext", _EAGERLY)
CURRENT_TRACE = Internal("torch._dynamo.symbolic_convert", "InstructionTranslator.current_tx", _EAGERLY)
_UNWATCHED = "what code reads in ways that its reading does not find is not noticed"
SOURCE_NAMES = Internal("torch._dynamo.guards", "_get_closure_vars", _UNWATCHED)
SOURCE_OF_ATTRIBUTE = Internal("torch._dynamo.source", "AttrSource", _UNWATCHED)
TRACED_CHANGES = Internal("torch._dynamo.side_effects", "SideEffects.is_modified", _EAGERLY)
CONSTANT_TRACERS = Internal("torch._dynamo.variables.builder", "SourcelessBuilder._type_handlers", _LTX)
TRACED_SLICE = Internal("torch._dynamo.variables", "SliceVariable", _LTX)
DECOMPOSITIONS = Internal("torch._decomp", "decomposition_table", "tracing takes longer")
UNSUPPORTED = Internal("torch._dynamo.exc", "Unsupported", "reasons do not name what torch cannot trace")
_SETTINGS = "blocks that ask how torch is set run eagerly"
CONSTANTS = Internal("torch._dynamo.variables.torch", "constant_fold_functions", _SETTINGS)
ALLOWED = Internal("torch._dynamo.trace_rules", "_allowed_callable_ids", _SETTINGS)

COMPILER_AROUND = Internal("torch._C._dynamo.eval_frame", "get_eval_frame_callback", _COMPILED_TWICE)
SKIP_CODE = Internal("torch._dynamo.eval_frame", "skip_code", _COMPILED_TWICE)

_FAKE = "torch._subclasses.fake_tensor"
FAKE_TENSOR = Internal(_FAKE, "FakeTensor", "caches of quantised weights may keep tensors of a trace")
FAKE_MODE = Internal(_FAKE, "FakeTensorMode", "code is not made beside")
_UNSEEN = "what others have torch do in place of its functions is not noticed"
FUNCTION_MODES = Internal("torch.overrides", "_get_current_function_mode_stack", _UNSEEN)
DEVICE_MODE = Internal("torch.utils._device", "DeviceContext", _UNSEEN)
SLEEP = Internal("torch.cuda", "_sleep", "the host's time is part of what a small block's calls are compared by")
DEVICE_GUARD = Internal("torch._C", "_ensureCUDADeviceGuardSet", "without a GPU, threads that end may crash")
TRANSFORM = Internal("torch._C._functorch", "peek_interpreter_stack", "blocks that torch.func has called stay eager")
TENSOR_GUARDS = Internal("torch._C._dynamo.guards", "TensorGuards", "each call of a block is described anew, slower")
FALLBACK_RANDOM = Internal("torch._inductor.config", "fallback_random", _EAGERLY)
INDUCTOR_SETTINGS = Internal("torch._inductor.config", "save_config_portable", _NOT_SAVED)
AUTOGRAD_SETTINGS = Internal("torch._functorch.config", "save_config_portable", _NOT_SAVED)
_STAYS = "code of dropped graphs stays, and C++ kernels are built again"
CODE_CACHE = Internal("torch._inductor.codecache", "PyCodeCache", _STAYS)
EXTERN_KERNELS = Internal("torch._inductor.select_algorithm", "extern_kernels", "a restart takes a second longer")
WRITE = Internal("torch._inductor.codecache", "write_atomic", _BUILT_AGAIN)
CACHE_FOLDER = Internal("torch._inductor.runtime.cache_dir_utils", "cache_dir", _BUILT_AGAIN)
TENSOR_ADDRESS = Internal("torch._C._dynamo.guards", "_torchinductor_pyobject_tensor_data_ptr", _BUILT_AGAIN)

_WIDE = "kernels divide by sizes of 64 bits, slower"
KERNEL_SIGNATURE = Internal("torch._inductor.codegen.triton", "signature_to_meta", _WIDE)
TRITON_KERNEL = Internal("torch._inductor.codegen.triton", "TritonKernel", _WIDE)
FITS_32_BITS = Internal("torch._inductor.utils", "expr_fits_within_32bit", _WIDE)
MODULO = Internal("torch.utils._sympy.functions", "Mod", "kernels divide by the heads of a table of positions, slower")
FLOOR_DIVISION = Internal("torch.utils._sympy.functions", "FloorDiv", _WIDE)
HIDDEN = Internal("torch.utils._sympy.functions", "Identity", _WIDE)
COMPILING = Internal("torch._inductor.virtualized", "V", _WIDE)

_CHECKED_AGAIN = "weights are checked once more in each call, slower"
_WRAPPER = "torch._inductor.codegen.wrapper"
PYTHON_WRAPPER = Internal(_WRAPPER, "PythonWrapperCodegen", "nobody is told when kernels are built")
INPUT_ASSERTS = Internal(_WRAPPER, "PythonWrapperCodegen.codegen_input_size_asserts", _CHECKED_AGAIN)
GENERATED_CODE = Internal(_WRAPPER, "PythonWrapperCodegen.generate", "nobody is told when kernels are built")
LIBRARY_CALL = Internal(_WRAPPER, "PythonWrapperCodegen.generate_fallback_kernel", "convolutions run Python, slower")
_OF_OWN = "static_launch_user_defined_triton_kernels"
STATIC_LAUNCH = Internal("torch._inductor.config", _OF_OWN, "kernels of our own are launched in Python, slower", "2.11")

_AROUND = "what torch puts around generated code runs in each call, slower"
GENERATED_CALL = Internal("torch._inductor.output_code", "CompiledFxGraph.__call__", _AROUND)
ANY_AUTOCAST = Internal("torch._C", "_is_any_autocast_enabled", _AROUND)
_LAUNCHED = "four functions of Python run for each kernel that is launched, slower"
AUTOTUNED = Internal("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.run", _LAUNCHED)
GRID = Internal("torch._inductor.runtime.triton_heuristics", "GridExpr.from_meta", _LAUNCHED)
_LAUNCHER = "torch._inductor.runtime.static_triton_launcher"
STATIC_KERNEL = Internal(_LAUNCHER, "StaticallyLaunchedTritonKernel.run", _LAUNCHED, since="2.11")
DISPATCH_MODES = Internal("torch._C", "_len_torch_dispatch_stack", _LAUNCHED)
LOADED_CODE = Internal("torch._inductor.codecache", "PyCodeCache.load", _LAUNCHED)

_WAITED_FOR = "images wait for the code of blocks"
GRAPH_PICKLER = Internal("torch.fx._graph_pickler", "GraphPickler", _WAITED_FOR)
PICKLED_NODES = Internal("torch.fx._graph_pickler", "Options", _WAITED_FOR)
SIZES_SETTINGS = Internal("torch.fx.experimental._config", "save_config_portable", _WAITED_FOR)
TRACING = Internal("torch._guards", "tracing", _WAITED_FOR)
KERNEL_BUILDER = Internal("torch._inductor.async_compile", "AsyncCompile.triton", _WAITED_FOR)
KERNEL_ASSEMBLER = Internal("torch._inductor.async_compile", "_set_triton_ptxas_path", _WAITED_FOR)
KERNEL_SOURCE = Internal("torch._inductor.async_compile", "_load_triton_kernel_from_source", _WAITED_FOR)
KERNEL_KEY = Internal("torch._inductor.async_compile", "CompiledTritonKernels.key", _WAITED_FOR)
KERNELS_SAVED = Internal("torch._inductor.triton_bundler", "TritonBundler.put_static_autotuner", _WAITED_FOR)
PATTERNS = Internal("torch._inductor.fx_passes.fuse_attention", "_get_sfdp_patterns", _WAITED_FOR)
PADDING_TIMES = Internal("torch._inductor.fx_passes.pad_mm", "should_pad_bench_key", _WAITED_FOR)
VECTORS = Internal("torch._inductor.cpu_vec_isa", "valid_vec_isa_list", "an image waits while vectors are tried out")
NO_CONTEXT = Internal("torch._subclasses.fake_tensor", "init_gpu_context", _WAITED_FOR)

_AS_TRACED = "group norms are inductor's, slower"
KNOWN_TRUE = Internal("torch.fx.experimental.symbolic_shapes", "statically_known_true", _AS_TRACED)
_NO_FP8 = "fp8 weights are not compiled on older cards"
GRAPH_PASS = Internal("torch._inductor.custom_graph_pass", "CustomGraphPass", _NO_FP8)
PRE_GRAD_PASS = Internal("torch._inductor.config", "pre_grad_custom_pass", _AS_TRACED)

_NOT_HELD = "idle memory of captures is not held"
POOL_BEGIN = Internal("torch._C", "_cuda_beginAllocateCurrentThreadToPool", _NOT_HELD)
POOL_END = Internal("torch._C", "_cuda_endAllocateToPool", _NOT_HELD)
POOL_RELEASE = Internal("torch._C", "_cuda_releasePool", _NOT_HELD)
CLEAR_WORKSPACES = Internal("torch._C", "_cuda_clearCublasWorkspaces", "no call is captured")

AHEAD_OF_TIME = tuple(value for value in list(globals().values()) if getattr(value, "without", None) == _EAGERLY)
SAVING = (AOT_FUNCTION, AOT_INDUCTOR, SOURCE_INFO, LOADED_ENTRY, LOADED_CONSTANTS, LOADED_KERNELS)
NARROW_SIZES = (KERNEL_SIGNATURE, TRITON_KERNEL, FITS_32_BITS, FLOOR_DIVISION, HIDDEN, COMPILING)
KERNELS_BESIDE = (KERNEL_ASSEMBLER, KERNEL_SOURCE, KERNEL_KEY, KERNELS_SAVED)
BESIDE = (GRAPH_PICKLER, PICKLED_NODES, FAKE_MODE, INDUCTOR_SETTINGS, AUTOGRAD_SETTINGS, AOT_INDUCTOR)
"""What sends a traced graph to the process; it asks for `IN_WORKER`, of which most takes long to import, itself."""
IN_WORKER = (TRACING, SIZES_SETTINGS, *SAVING, KERNEL_BUILDER, *KERNELS_BESIDE, PATTERNS, PADDING_TIMES, NO_CONTEXT)
REWRITING = (KNOWN_TRUE, PRE_GRAD_PASS)
LAUNCHES = (AUTOTUNED, GRID, STATIC_KERNEL, DISPATCH_MODES, LOADED_CODE)
KEYS = (INDUCTOR_SETTINGS, AUTOGRAD_SETTINGS)
BUILT_KERNELS = (CODE_CACHE, WRITE, CACHE_FOLDER, TENSOR_ADDRESS)
OF_CUDA = (POOL_BEGIN, POOL_END, POOL_RELEASE, CLEAR_WORKSPACES, DEVICE_GUARD)
"""Names that only torch for CUDA has."""

ALL = tuple(value for value in list(globals().values()) if type(value) is Internal)

_to_skip: list[Any] = []


def allow_inlining(function: AnyFunction) -> AnyFunction:
    """Mark a function of ours: a compiler around it may inline it or compile what it calls, and not it alone."""
    _to_skip.append(function)
    return function


def tell_compilers() -> None:
    """Tell torch which functions are `allow_inlining`, once its compiler is loaded: that takes a second."""
    while _to_skip and SKIP_CODE.module in sys.modules:
        function = _to_skip.pop()
        if COMPILER_AROUND.is_there and SKIP_CODE.is_there:
            SKIP_CODE.get()(function.__code__)


@functools.cache
def keep_device_guard() -> None:
    """Make tracing safe in any thread, where there is no GPU; to be called before the first.

    The first thread that traces without one gives the process a stand-in for CUDA that is gone with the thread, and
    the next thread crashes. So one that never ends comes first.
    """
    if torch.cuda.is_available() or not DEVICE_GUARD.is_there:
        return
    done = threading.Event()

    def stay() -> None:
        DEVICE_GUARD.get()()
        done.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="accel-device-guard", daemon=True).start()
    done.wait()
