"""Thirteen defects put into a copy of the working tree, one at a time: is each caught by the quick test that should?

    .venv/bin/python tests/mutations.py [part of a name]

prints a table, and ends with 0 only if the tests pass as things are and each defect fails its own. A defect is a text
that must occur exactly once in the pack, so one that has gone stale ends this with an error. pytest collects none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MUTATED = ("accel", "nodes", "locales")
TESTS_FAILED = 1
"""pytest's exit code; others mean that nothing ran, such as for a test that is no more."""


class Mutation(NamedTuple):
    """A defect: text before and after, and the test that must fail."""

    name: str
    before: str
    after: str
    test: str


MUTATIONS = [
    Mutation(
        "key without dtype",
        "return TensorSpec(tensor.dtype, tensor.device,",
        "return TensorSpec(torch.float32, tensor.device,",
        "unit/test_kinds.py::test_training_mode_dtype_and_layout_make_another_kind",
    ),
    Mutation(
        "stand-in left in place after an exception",
        "            yield\n        finally:\n            with _changing:\n                there = list(",
        "            yield\n        except ArithmeticError:\n            raise\n        else:\n"
        "            with _changing:\n                there = list(",
        "unit/test_substitution.py::test_exception_puts_modules_back",
    ),
    Mutation(
        "stale weight used by a graph",
        "weights = list(map(operator.getitem, self.holders, self.names))",
        'weights = self.__dict__.setdefault("kept", list(map(operator.getitem, self.holders, self.names)))',
        "unit/test_block_compiler.py::test_new_weights_are_seen_at_the_next_call",
    ),
    Mutation(
        "graph run though its code has been replaced",
        "            holds = self._now is self._first and stands(self._first.survey)\n",
        "            holds = True\n",
        "unit/test_code_snapshot.py::test_code_that_changes_again_and_again_runs_eagerly_after_a_while",
    ),
    Mutation(
        "graph used at a wrong size",
        "        if not self.facts.allow(tensors):\n            return False\n",
        "        return True\n",
        "unit/test_block_compiler.py::test_size_that_was_one_is_not_taken_for_granted",
    ),
    Mutation(
        "lease on the cache kept after its run",
        "                self._leases.remove(lease)\n",
        "",
        "unit/test_graph_cache.py::test_next_run_may_replace_what_the_last_one_used",
    ),
    Mutation(
        "interrupt swallowed",
        "if isinstance(error, self._interrupts) or (self.observer",
        "if (self.observer",
        "comfyui/test_faults.py::test_comfyuis_interrupt_inside_a_compiled_block_is_not_swallowed",
    ),
    Mutation(
        "unsealed saved graph accepted",
        "    if not seals.check(seal, manifest.canonical()):\n",
        "    if seal and not seals.check(seal, manifest.canonical()):\n",
        "unit/test_store_hostile.py::test_hostile_bundle_is_not_opened_unless_it_is_trusted",
    ),
    Mutation(
        "DeepCache feature of another CFG branch",
        "features = [self._histories[key, part].value(self._angle) for key in keys]",
        "features = [self._histories[key, part].value(self._angle) for key in reversed(keys)]",
        "unit/test_deep_cache.py::test_new_branch_recomputes_and_the_old_one_in_its_batch_does_not",
    ),
    Mutation(
        "wrong locale key",
        '"noMatch": "No block type',
        '"noMatches": "No block type',
        "comfyui/test_texts.py::test_both_languages_have_the_same_texts_with_the_same_blanks",
    ),
    Mutation(
        "node input without tooltip",
        'make_input(io.Model, "model", tooltip="The model to make faster. It is not changed itself.")',
        'make_input(io.Model, "model")',
        "comfyui/test_texts.py::test_every_input_and_output_has_a_tooltip_and_both_languages",
    ),
    Mutation(
        "route that serves another site's page",
        '    if urllib.parse.urlsplit(origin).netloc.lower() != headers.get("Host", "").lower():\n',
        "    if not urllib.parse.urlsplit(origin).scheme:\n",
        "comfyui/test_routes.py::test_foreign_origin_is_refused_on_any_address",
    ),
    Mutation(
        "VAE compiled though its node says skip",
        "            return _nothing_compiled() if self._policy.compiled in (SKIP, AUTO) else nullcontext()\n",
        "            return nullcontext()\n",
        "comfyui/test_vae_beside_others.py::test_skipped_vae_is_not_compiled_even_if_somebody_asked_for_it",
    ),
]


def copied(folder: Path) -> Path:
    """A copy of what git knows, or could, with the links that dev.py needs to find what it has brought."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if not (folder / ".work").exists() and (ROOT / ".work").exists():
        (folder / ".work").symlink_to((ROOT / ".work").resolve())
    return folder


def the_file(root: Path, text: str) -> Path:
    """The one file of the pack with this text in it, once."""
    paths = [path for part in MUTATED for path in (root / part).rglob("*") if path.suffix in (".py", ".json")]
    found = [path for path in paths for _ in range(path.read_text(encoding="utf-8").count(text))]
    if len(found) != 1:
        sys.exit(f"Stale: {text.strip()!r} is there {len(found)} times, and should be once.")
    return found[0]


def run(root: Path, *tests: str) -> subprocess.CompletedProcess:
    arguments = [f"tests/{test}" for test in tests]
    command = [sys.executable, "dev.py", "test", "--python", sys.executable, "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([*command, *arguments], cwd=root, env=environment, capture_output=True, text=True)


def main(wanted: str) -> int:
    chosen = [mutation for mutation in MUTATIONS if wanted in mutation.name]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations") as folder:
        root = copied(Path(folder))
        places = [the_file(root, mutation.before) for mutation in chosen]
        plain = run(root, *(mutation.test for mutation in chosen))
        if plain.returncode:
            sys.exit(f"A test fails without any defect:\n{plain.stdout[-3000:]}{plain.stderr[-1000:]}")
        for mutation, path in zip(chosen, places, strict=True):
            text, started = path.read_text(encoding="utf-8"), time.monotonic()
            path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
            done = run(root, mutation.test)
            path.write_text(text, encoding="utf-8")
            is_caught = done.returncode == TESTS_FAILED
            missed += not is_caught
            said = "caught" if is_caught else f"MISSED ({done.returncode})"
            print(f"{said:12} {time.monotonic() - started:4.0f} s  {mutation.name:44} {mutation.test}", flush=True)
            if done.returncode not in (0, TESTS_FAILED):
                print(done.stdout[-2000:], done.stderr[-1000:])
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
