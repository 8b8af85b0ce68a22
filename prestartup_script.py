"""ComfyUI runs this before it imports torch: torch gets its own allocator, where a person has turned on CUDA graphs.

On most NVIDIA cards ComfyUI has torch allocate with cudaMallocAsync, whose memory no CUDA graph can keep. torch reads
that choice once, as it is imported. The standard library alone is used here, and nothing is ever raised.
"""

import importlib.util
import json
import logging
import os
import sys

_CONF, _CORES = "PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"
_CHOICES = {**dict.fromkeys(("on", "1", "true", "yes"), True), **dict.fromkeys(("off", "0", "false", "no"), False)}
_INSTEAD = {
    "flag": "ComfyUI was started with --cuda-malloc",
    "configuration": "PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF names another allocator",
    "torch_loaded": "another extension has imported PyTorch already",
}


def _is_wanted():
    """Whether CUDA graphs are on: what ACCEL_CUDA_GRAPHS says, else the pack's own settings."""
    named = os.environ.get("ACCEL_CUDA_GRAPHS", "").strip().lower()
    if named in _CHOICES:
        return _CHOICES[named]
    if named:
        logging.warning("Accel: ACCEL_CUDA_GRAPHS is neither on nor off: it counts as not set.")
    import folder_paths

    file = os.path.join(folder_paths.get_user_directory(), "__accel", "preferences.json")
    if not os.path.isfile(file):  # a pipe might never end
        return False
    with open(file, "rb") as opened:
        return json.loads(opened.read(1 << 16)).get("cuda_graphs") == "on"


def _is_built_for_cuda():
    for folder in importlib.util.find_spec("torch").submodule_search_locations:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            return "+cu" in file.read()


def _parts(variable):
    return [part for part in os.environ.get(variable, "").replace(" ", "").split(",") if part]


def _choose(args):
    """Have torch use its own allocator, unless somebody chose. Returns "native", a key of `_INSTEAD`, or None."""
    has_chosen = "cuda_malloc" in sys.modules  # newer cores choose before this runs, older ones after
    if any("--cuda-malloc".startswith(flag) and flag > "--cuda-" for flag in sys.argv[1:]):  # argparse takes its start
        return "flag"
    # A ComfyUI that Manager restarts finds core's part in its environment, as if the person had put it there.
    parts = [part for part in _parts(_CONF) if part not in (_CORES, "backend:native")]
    others = [part for part in _parts("PYTORCH_ALLOC_CONF") if part != "backend:native"]
    if any(part.startswith("backend:") for part in (*parts, *others)):
        return "configuration"
    if has_chosen and "torch" in sys.modules and _CORES in _parts(_CONF):
        return "torch_loaded"  # which must not find another choice than it was imported with
    is_native = _CORES not in _parts(_CONF) and (has_chosen or args.disable_cuda_malloc)
    if args.cpu or is_native or not _is_built_for_cuda() or not _is_wanted():
        return None
    if "torch" not in sys.modules:
        os.environ[_CONF] = ",".join(parts)
        if not parts:
            del os.environ[_CONF]
    args.disable_cuda_malloc, args.cuda_malloc = True, False
    return "native"


try:
    from comfy.cli_args import args

    if not hasattr(args, "accel_allocator"):  # else another copy of this pack has run
        args.accel_allocator = "failed"
        args.accel_allocator = _choose(args)
        if args.accel_allocator == "native":
            logging.info("Accel: CUDA graphs are turned on, so torch uses its own allocator.")
        elif args.accel_allocator and _is_wanted():
            logging.warning("Accel: CUDA graphs stay off, although turned on: %s.", _INSTEAD[args.accel_allocator])
except Exception as error:
    logging.warning("Accel: torch's allocator is left as it is: %r", error)
