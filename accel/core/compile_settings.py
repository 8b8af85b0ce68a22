"""How blocks are compiled, as a person sets it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CompileSettings:
    """How blocks are compiled.

    backend: a name of `registry.BACKENDS`, or any that torch knows.
    any_size: one graph for all sizes; False compiles one for each size.
    stop_on_trouble: raise `Trouble` where a block would fall back to eager.
    min_repetitions: kinds with fewer blocks in the model run eagerly.
    beside: make code in another process where the machine has room for one, and run blocks as they are until then.
    measured: time each new graph against its block (`compile.benchmark`) and drop one that is not faster.
    """

    backend: str = "inductor"
    any_size: bool = True
    stop_on_trouble: bool = False
    min_repetitions: int = 1
    measured: bool = False
    beside: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.min_repetitions < 1:
            raise ValueError(f"min_repetitions is {self.min_repetitions}; it must be 1 or more")


class Trouble(RuntimeError):
    """Raised instead of running eagerly, where the user asked to stop."""
