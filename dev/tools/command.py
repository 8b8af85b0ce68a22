"""How every command here ends: with 0, or with one sentence and 1. Standard library only: dev.py uses it too."""

import argparse
import errno
import signal
import sys
import traceback
from collections.abc import Callable

from dev import WORK, Problem


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as everything here does."""

    def error(self, message: str) -> None:
        raise Problem(f"{message[:1].upper()}{message[1:]}; {self.prog} --help lists what there is.")


def run(main: Callable[[], int | None]) -> int:
    """Call `main` and return the exit code; whatever it raises becomes one sentence on stderr.

    Being asked to end (SIGTERM) unwinds like Ctrl-C, so that servers are stopped.
    """
    handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return main() or 0
    except KeyboardInterrupt:
        sentence = "Stopped."
    except Problem as problem:
        sentence = str(problem)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            sentence = "The disk is full: free some space and run this again."
        else:
            sentence = f"{error.strerror or error}: {error.filename or 'check your system'}."
    except Exception as error:
        sentence = f"A mistake of ours, {type(error).__name__}: {error}. {_keep_traceback()}"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    print(sentence, file=sys.stderr, flush=True)
    return 1


def _interrupt(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A second request must not cut the unwinding short.
    raise KeyboardInterrupt


def _keep_traceback() -> str:
    try:
        WORK.mkdir(exist_ok=True)
        (WORK / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        return "Please report it."
    return f"Please report it with {WORK / 'traceback.txt'}."
