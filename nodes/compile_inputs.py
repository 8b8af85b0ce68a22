"""The inputs that all compiling nodes share, and the settings they give."""

from typing import Any

from comfy_api.latest import io

from ..accel.compile.registry import BACKENDS, DEFAULT, backend_named
from ..accel.core.compile_settings import CompileSettings
from ..accel.hosts.comfyui.versions import make_input

SHAPES = ANY_SIZE, EXACT_SIZE = ("any size", "exact size")
ON_TROUBLE = RUN_EAGERLY, STOP = ("run eagerly", "stop with the reason")


def how_to_compile() -> list[Any]:
    """The inputs shapes, backend, on_trouble and check_gain."""
    return [
        make_input(
            io.Combo,
            "shapes",
            options=list(SHAPES),
            default=ANY_SIZE,
            advanced=True,
            tooltip=(
                "any size: compile once; every size and batch then runs without compiling again. exact size: compile "
                "for each size; only worth trying if you use a single size."
            ),
        ),
        make_input(
            io.Combo,
            "backend",
            options=list(BACKENDS),
            default=DEFAULT,
            advanced=True,
            tooltip=(
                "inductor: torch's compiler. eager: trace the blocks without compiling them, to find out whether a "
                "problem comes from the compiler; no faster."
            ),
        ),
        make_input(
            io.Combo,
            "on_trouble",
            options=list(ON_TROUBLE),
            default=RUN_EAGERLY,
            advanced=True,
            tooltip=(
                "What to do when a block cannot be compiled. run eagerly: run it as without this node and log why. "
                "stop with the reason: end the prompt with the reason."
            ),
        ),
        make_input(
            io.Boolean,
            "check_gain",
            default=True,
            optional=True,
            advanced=True,
            tooltip=(
                "Time compiled against normal during the first calls and keep whichever is faster. A compiled block "
                "whose result differs by more than rounding is never used."
            ),
        ),
    ]


def settings(shapes: str, backend: str, on_trouble: str, check_gain: bool = True) -> CompileSettings:
    """The settings for values of these inputs."""
    return CompileSettings(
        backend=backend,
        any_size=shapes == ANY_SIZE,
        stop_on_trouble=on_trouble == STOP,
        measured=check_gain and backend_named(backend).is_faster,  # without a compiler there is nothing to gain
        beside=True,
    )
