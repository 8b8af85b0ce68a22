"""How blocks are compiled: what a person sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompileSettings:
    """How blocks are compiled.

    backend: a name of `registry.BACKENDS`, or any that torch knows.
    any_size: one graph for all sizes; False makes one for each.
    stop_on_trouble: raise `Trouble` where a block would fall back to eager.
    min_repetitions: kinds with fewer blocks in the model stay eager.
    measured: compare each new graph with its block (`probe`) and give up one that does not pay.
    """

    backend: str = "inductor"
    any_size: bool = True
    stop_on_trouble: bool = False
    min_repetitions: int = 1
    measured: bool = False

    def __post_init__(self) -> None:
        if self.min_repetitions < 1:
            raise ValueError(f"min_repetitions is {self.min_repetitions}; it must be 1 or more")


class Trouble(RuntimeError):
    """Raised instead of running eagerly, where the user asked to stop."""
