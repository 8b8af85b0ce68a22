"""The inputs that all compiling nodes share, and the settings they give."""

from typing import Any

from comfy_api.latest import io

from ..accel.compile.registry import BACKENDS, DEFAULT, backend_named
from ..accel.core.compile_settings import CompileSettings
from ..accel.hosts.comfyui.versions import check_options, make_input

SHAPES = ANY_SIZE, EXACT_SIZE = ("any size", "exact size")
ON_TROUBLE = RUN_EAGERLY, STOP = ("run eagerly", "stop with the reason")


def how_to_compile() -> list[Any]:
    """The inputs shapes, backend and on_trouble."""
    return [
        make_input(
            io.Combo,
            "shapes",
            options=list(SHAPES),
            default=ANY_SIZE,
            tooltip=(
                "any size: compile once, then every image size and batch runs without compiling again. "
                "exact size: compile anew for each size; only worth it when one size is all you use."
            ),
        ),
        make_input(
            io.Combo,
            "backend",
            options=list(BACKENDS),
            default=DEFAULT,
            tooltip=(
                "inductor: torch's compiler, the fast one. eager: capture the blocks without compiling "
                "them, to find out whether a problem comes from the compiler."
            ),
        ),
        make_input(
            io.Combo,
            "on_trouble",
            options=list(ON_TROUBLE),
            default=RUN_EAGERLY,
            advanced=True,
            tooltip=(
                "What happens when a block cannot be compiled. run eagerly: it runs as without this node and "
                "the log says why. stop with the reason: the prompt ends with the reason."
            ),
        ),
    ]


def check_gain_input() -> Any:
    """The input check_gain."""
    return make_input(
        io.Boolean,
        "check_gain",
        default=True,
        optional=True,
        advanced=True,
        tooltip=(
            "Run a few calls of each compiled kind both ways, again where images are twice as large or "
            "half, and leave it uncompiled at sizes where that is faster on this machine, or everywhere "
            "if the result is another."
        ),
    )


def check(shapes: str | None, backend: str | None, on_trouble: str | None) -> bool | str:
    """For `validate_inputs`: True, or one sentence about the first value that is not among its options."""
    return check_options(shapes=(shapes, SHAPES), backend=(backend, BACKENDS), on_trouble=(on_trouble, ON_TROUBLE))


def settings(shapes: str, backend: str, on_trouble: str, check_gain: bool, min_repetitions: int = 1) -> CompileSettings:
    """The settings for values of these inputs."""
    return CompileSettings(
        backend=backend,
        any_size=shapes == ANY_SIZE,
        stop_on_trouble=on_trouble == STOP,
        min_repetitions=min_repetitions,
        measured=check_gain and backend_named(backend).is_faster,  # without a compiler there is nothing to gain
    )
