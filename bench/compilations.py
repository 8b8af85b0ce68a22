"""What was compiled, by torch's own counters, and a compiler's cache that starts empty."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"


class Counts(NamedTuple):
    """Since the process began: graphs compiled, graph breaks, calls of blocks that our engine ran uncompiled."""

    graphs: int
    breaks: int
    uncompiled: int

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def counts() -> Counts:
    from comfy_accel.accel.block_runner import fallbacks
    from torch._dynamo.utils import counters

    return Counts(
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        uncompiled=sum(row["calls"] for row in fallbacks.rows()),
    )


class RecompileLimit(logging.Handler):
    """Hears torch say that it reached its recompile limit; from then on it runs the function eagerly.

    A contender that gave up so compiles nothing more, which must not be read as needing nothing more.
    """

    def __init__(self):
        super().__init__(logging.WARNING)
        self.heard = False

    def emit(self, record: logging.LogRecord) -> None:
        self.heard |= "recompile_limit" in record.getMessage()

    def __enter__(self) -> RecompileLimit:
        logging.getLogger("torch._dynamo.convert_frame").addHandler(self)
        return self

    def __exit__(self, *_) -> None:
        logging.getLogger("torch._dynamo.convert_frame").removeHandler(self)


@contextmanager
def empty_inductor_cache() -> Iterator[None]:
    """While it lasts, inductor keeps its files in a new folder, so that nobody finds what an earlier run compiled."""
    before = os.environ.get(CACHE_DIR)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[CACHE_DIR] = folder
        try:
            yield
        finally:
            os.environ.pop(CACHE_DIR)
            if before is not None:
                os.environ[CACHE_DIR] = before
