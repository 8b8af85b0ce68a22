"""The part "cold" of `bench gpu`: the first image with nothing compiled, the next one, and the first of a new process.

A contender's folders are its own, and empty at first; the clock starts once the model is loaded.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tools import Problem, command, pack
from tools.inprocess import boot

from . import child
from .compilations import RecompileLimit, fresh_folders
from .gpu_cases import COLD, EAGER, NEW_PROCESS, SAMPLED, WARM, Case, TimeBudget, skipped
from .report import Row

ANSWER = "eager.pt"


def rows(
    name: str,
    contenders: Sequence[str],
    case: Case,
    quick: bool,
    budget: TimeBudget,
    begun: Path | None = None,
    answered: Collection[str] = (),
) -> Iterator[Row]:
    """Three rows for each contender, eager first.

    begun: folder in which the contenders `answered` have left what they compiled at their cold start, the rows of
    which are there already. Only the new process is started then.
    """
    expected = 0.0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for contender in contenders:
            is_begun = contender in answered
            folder = begun if is_begun and begun else Path(work) / contender
            answer = (begun if EAGER in answered and begun else Path(work)) / ANSWER
            for start in (NEW_PROCESS,) if is_begun else (COLD, NEW_PROCESS):
                if not budget.fits(expected):
                    yield skipped("cold", name, f"{start} start", contender)
                    continue
                started = time.monotonic()
                try:
                    yield from _in_a_new_process(name, contender, start, case, quick, folder, answer)
                except Problem as problem:
                    where = {"contender": contender, "start": start, "size": case.size}
                    yield {"part": "cold", "model": name, **where, "failed": str(problem)}
                if contender == EAGER:
                    expected = time.monotonic() - started  # what a process takes at least


def _in_a_new_process(
    name: str, contender: str, start: str, case: Case, quick: bool, folder: Path, answer: Path
) -> list[Row]:
    given = {"model": name, "contender": contender, "start": start, "quick": quick, "answer": str(answer)}
    given["case"] = [case.width, case.height, case.batch]
    environment = {**fresh_folders(folder), "ACCEL_STORE": str(folder / "graphs")}
    return child.result_of("bench.gpu_cold", [json.dumps(given)], f"{name}, {contender}, {start}", environment)


def measure(given: dict) -> list[Row]:
    """The rows of one process: of the cold one two, since its second image is the warm one."""
    began = time.perf_counter()
    boot(cpu=given["quick"])
    pack.load()
    import torch
    from comfy_accel.accel.cache.graph_cache import shared
    from comfy_accel.accel.hosts.comfyui import preferences

    from . import gpu_device, gpu_models
    from .gpu_cases import CONTENDERS
    from .gpu_contenders import CACHE_BYTES, Lineup, ran_as
    from .gpu_runs import Runs, difference, tolerance
    from .gpu_steps import WARM_UP

    if given["quick"]:
        torch.set_num_threads(1)
    preferences.current()  # or it would set the budget later
    shared.set_budget(max_bytes=CACHE_BYTES)
    subject = (gpu_models.QUICK if given["quick"] else gpu_models.FULL)[given["model"]]
    name, case = given["contender"], Case(*given["case"])
    runs = Runs(subject)
    loaded_s = time.perf_counter() - began
    made = []
    with RecompileLimit() as limit:
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        lineup = Lineup(runs.model, "eager" if given["quick"] else "inductor", folder, limit, shared)
        for start in (COLD, WARM) if given["start"] == COLD else (NEW_PROCESS,):
            gpu_device.forget_peak(subject.device)
            if start == WARM and CONTENDERS[name].has_graphs:
                with lineup.running(name):
                    runs.run(lineup.patcher(name), case, WARM_UP)  # recorded calls are part of a warm process
            loaded = shared.statistics()["loaded"]
            with lineup.running(name) as spent:
                run = runs.run(lineup.patcher(name), case, SAMPLED)
            answer = Path(given["answer"])
            if name == EAGER and start == COLD:
                torch.save(run.answer, answer)
            made.append(
                {
                    "part": "cold",
                    "model": given["model"],
                    "contender": name,
                    "start": start,
                    "size": case.size,
                    "batch": case.batch,
                    "first_image_s": round(run.seconds, 3),
                    "loaded": shared.statistics()["loaded"] - loaded,
                    "process_s": round(loaded_s, 1),
                    "peak_mb": gpu_device.peak_mb(subject.device),
                    "held_mb": gpu_device.held_mb(subject.device),
                    "answer_diff": difference(run.answer, torch.load(answer)) if answer.exists() else None,
                    "tolerance": tolerance(subject.dtype),
                    "ran_as": ran_as(name, spent["replays"], SAMPLED),
                    **spent,
                }
            )
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", required=True)
    options = parser.parse_args()
    sys.exit(command.run(lambda: print(json.dumps(measure(json.loads(options.child))))))
