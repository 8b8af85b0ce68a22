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


def _wanted():
    """Whether CUDA graphs are on: what ACCEL_CUDA_GRAPHS says, else the pack's own settings."""
    named = os.environ.get("ACCEL_CUDA_GRAPHS", "").strip().lower()
    if named in ("on", "off"):
        return named == "on"
    import folder_paths

    file = os.path.join(folder_paths.get_user_directory(), "__accel", "preferences.json")
    try:
        with open(file, encoding="utf-8") as opened:
            return json.load(opened).get("cuda_graphs") == "on"
    except FileNotFoundError:
        return False


def _is_built_for_cuda():
    for folder in importlib.util.find_spec("torch").submodule_search_locations:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            return "+cu" in file.read()


def _choose(args):
    """Have torch use its own allocator, unless somebody chose. Returns "native", why not in a word, or None."""
    if not _wanted() or args.cpu or args.disable_cuda_malloc or not _is_built_for_cuda():
        return None
    if any(flag.split("=")[0] == "--cuda-malloc" for flag in sys.argv[1:]):
        return "flag"
    parts = [part for part in os.environ.get(_CONF, "").split(",") if part.strip()]
    has_chosen = "cuda_malloc" in sys.modules  # newer cores choose before this runs, older ones after
    if has_chosen and args.cuda_malloc and _CORES in parts:
        parts.reverse()
        parts.remove(_CORES)  # the last one is core's own
        parts.reverse()
    others = (*parts, *os.environ.get("PYTORCH_ALLOC_CONF", "").split(","))
    if any(part.strip().startswith("backend:") for part in others):
        return "configuration"
    if has_chosen and not args.cuda_malloc:
        return None
    if has_chosen:
        if "torch" in sys.modules:
            return "torch_loaded"  # which must not find another choice than it was imported with
        if parts:
            os.environ[_CONF] = ",".join(parts)
        else:
            os.environ.pop(_CONF, None)
    args.disable_cuda_malloc, args.cuda_malloc = True, False
    return "native"


try:
    from comfy.cli_args import args

    args.accel_allocator = _choose(args)
    if args.accel_allocator == "native":
        logging.info("Accel: CUDA graphs are turned on, so torch uses its own allocator (--disable-cuda-malloc).")
except Exception as error:
    logging.warning("Accel: torch's allocator is left as it is: %r", error)
