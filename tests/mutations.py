"""Defects put into a copy of the working tree, one at a time: is each caught by the quick test that should?

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
        "            holds = now is self._first and now.survey.stands\n",
        "            holds = True\n",
        "unit/test_code_snapshot.py::test_code_that_changes_again_and_again_runs_eagerly_after_a_while",
    ),
    Mutation(
        "a read that nobody watches is in a graph",
        "            refuse_unwatched(of.code, weights)\n",
        "            pass\n",
        "unit/test_traced_reads.py::test_another_value_between_images_is_noticed_wherever_it_is_read",
    ),
    Mutation(
        "what the model sets between its blocks in a later image goes unnoticed",
        "return changed is not None and not changed.is_current()",
        "return False",
        "unit/test_traced_reads.py::test_what_the_model_itself_sets_before_a_block_counts",
    ),
    Mutation(
        "what the model sets between its blocks in its first image goes unnoticed",
        "self.is_due = self._between or not holds or passes is None or not passes.has_held",
        "self.is_due = self._between",
        "unit/test_traced_reads.py::test_a_model_that_sets_nothing_is_compared_before_each_block_in_its_first_pass_alone",
    ),
    Mutation(
        "another answer of torch's is no other kind",
        "        described.append(settings)\n",
        "",
        "unit/test_traced_reads.py::test_another_value_between_images_is_noticed_wherever_it_is_read",
    ),
    Mutation(
        "what a block keeps for its model is left out",
        "never_read(names, (*codes, *read)) == names",
        "never_read(names, codes) == names",
        "unit/test_traced_reads.py::test_what_a_block_keeps_for_its_model_is_kept",
    ),
    Mutation(
        "one size of a pattern stands for all",
        "SIZES = 2\n",
        "SIZES = 1\n",
        "unit/test_values_by_size.py::test_graph_that_is_wrong_at_another_size_is_not_used_there",
    ),
    Mutation(
        "weights of the first block in a graph for all",
        "return resolved.is_compared or is_last",
        "return resolved.is_compared",
        "unit/test_values_by_size.py::test_graph_with_the_weights_of_the_first_block_in_it_is_found_out_at_the_last",
    ),
    Mutation(
        "graph used at a wrong size",
        "        if not self.facts.allow(tensors):\n            return False\n",
        "        return True\n",
        "unit/test_block_compiler.py::test_size_that_was_one_is_not_taken_for_granted",
    ),
    Mutation(
        "lease on the cache kept after its run",
        "            self._leases.discard(lease)\n",
        "",
        "unit/test_graph_cache.py::test_next_run_may_replace_what_the_last_one_used",
    ),
    Mutation(
        "interrupt swallowed",
        "        pass_on(error, self._interrupts)\n        if self.observer is not None and self.observer.capturing",
        "        if self.observer is not None and self.observer.capturing",
        "comfyui/test_faults.py::test_comfyuis_interrupt_inside_a_compiled_block_is_not_swallowed",
    ),
    Mutation(
        "wrong locale key",
        '"showMore": "Show more',
        '"showMores": "Show more',
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
        '    return nullcontext() if set_stance is None else set_stance("force_eager")\n',
        "    return nullcontext()\n",
        "comfyui/test_vae.py::test_a_skipped_vae_is_compiled_in_no_call_even_if_somebody_asked_for_it",
    ),
    Mutation(
        "graph used on another device",
        "return TensorSpec(tensor.dtype, tensor.device, tensor.ndim, layout)",
        'return TensorSpec(tensor.dtype, torch.device("cpu"), tensor.ndim, layout)',
        "unit/test_kinds.py::test_tensors_of_another_type_device_or_layout_have_another_spec",
    ),
    Mutation(
        "graph used for another order of strides",
        "        layout = tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))\n",
        '        layout = "contiguous" if strides else ""\n',
        "unit/test_kinds.py::test_tensors_of_another_type_device_or_layout_have_another_spec",
    ),
    Mutation(
        "kind without the form in which a weight is stored",
        "digest.update(repr((name, _stored(tensor, form, name, references, code.attributes))).encode())",
        "_stored(tensor, form, name, references, code.attributes)",
        "unit/test_kinds.py::test_sizes_and_types_in_weights_of_a_class_of_their_own_make_another_kind",
    ),
    Mutation(
        "saved graph found though its code has changed",
        "(kind.digest, code, kind.weights, kind.varying, key.call,",
        "(kind.digest, kind.weights, kind.varying, key.call,",
        "unit/test_store_key.py::test_files_of_the_code_are_in_the_key",
    ),
    Mutation(
        "saved graph of another torch",
        '        "torch": f"{torch.__version__} {torch.version.git_version}",\n',
        '        "torch": "",\n',
        "unit/test_store_key.py::test_another_build_of_torch_is_another_environment",
    ),
    Mutation(
        "saved graph of another environment",
        "                if other is not None:\n                    raise BadEntry(other)\n",
        "",
        "unit/test_store_key.py::test_another_environment_is_a_miss_that_names_it",
    ),
    Mutation(
        "saved graph opened though its bytes have changed",
        "    if hashlib.sha256(data).hexdigest() != manifest.sha256:\n",
        "    if not manifest.sha256:\n",
        "unit/test_graph_store.py::test_every_flipped_bit_and_every_truncation_is_a_miss",
    ),
    Mutation(
        "saved graph with a damaged manifest",
        "or checksum != _checksum(text):",
        "or not checksum:",
        "unit/test_graph_store.py::test_every_flipped_bit_and_every_truncation_is_a_miss",
    ),
    Mutation(
        "saved graph of another card in this machine",
        'return f"{kind}:{index} {name}',
        'return f"{kind} {name}',
        "unit/test_store_key.py::test_cards_of_one_kind_are_told_apart_by_their_place",
    ),
    Mutation(
        "saved graph of another key under this one's name",
        "    if manifest.stem != stem:\n",
        "    if not stem:\n",
        "unit/test_graph_store.py::test_entry_renamed_to_another_key_is_a_miss",
    ),
    Mutation(
        "saved graph that cannot be opened ends the run",
        "except Exception as error:\n            pass_on(error, interrupts)\n            if isinstance(",
        "except NotPortable as error:\n            pass_on(error, interrupts)\n            if isinstance(",
        "unit/test_graph_store.py::test_full_disk_costs_the_saving_alone",
    ),
    Mutation(
        "key that leads out of the store",
        "        if not (_KEY.fullmatch(manifest.key) and _SHA256.fullmatch(manifest.sha256)):\n",
        "        if not _SHA256.fullmatch(manifest.sha256):\n",
        "unit/test_store_folder.py::test_manifest_that_says_what_cannot_be_is_not_written_nor_read",
    ),
    Mutation(
        "newest graph pruned first",
        "for file in sorted(saved, key=lambda file: file.used)",
        "for file in sorted(saved, key=lambda file: -file.used)",
        "unit/test_graph_store.py::test_least_recently_used_are_deleted_first",
    ),
    Mutation(
        "wrong output accepted at the first calls",
        "STEPS, LEAST = 4.0, 2**-7",
        "STEPS, LEAST = 4.0, 2**7",
        "unit/test_benchmark.py::test_wrong_graph_is_given_up_at_once_and_the_eager_output_goes_on",
    ),
    Mutation(
        "blocks with others' code never timed",
        "known.of(call.inputs, captured, one_way) if self._is_measured else None",
        "known.of(call.inputs, captured) if self._is_measured and not one_way else None",
        "unit/test_opaque_layers.py::test_blocks_are_timed_by_turns_around_code_of_others_which_runs_once_in_each_call",
    ),
    Mutation(
        "output compared with its largest values and not with what the block adds",
        "allowed = added.square().add_(adds)",
        "allowed = right.square().add_(adds)",
        "unit/test_output_check.py::test_faults_are_found_in_bf16_though_a_block_adds_little",
    ),
    Mutation(
        "output's values allowed the rounding of their channel",
        "(step * right).square_()",
        "(step * right).square_().mean()",
        "unit/test_output_check.py::test_faults_are_found_in_bf16_though_a_block_adds_little",
    ),
    Mutation(
        "output with a part missing everywhere accepted",
        "torch.maximum(off.sqrt(), common.abs()",
        "torch.maximum(off.sqrt(), 0 * common.abs()",
        "unit/test_output_check.py::test_faults_are_found_in_bf16_though_a_block_adds_little",
    ),
    Mutation(
        "output refused for what rounding loses",
        "LOST = 0.5",
        "LOST = 0.05",
        "unit/test_output_check.py::test_parts_that_are_shorter_than_half_a_step_may_be_lost_in_other_sums",
    ),
    Mutation(
        "output with one wrong token accepted",
        "IN_SLICE, IN_VALUE = 5.0, 3.0",
        "IN_SLICE, IN_VALUE = 50.0, 3.0",
        "unit/test_output_check.py::test_fifth_less_in_one_token_or_channel_of_many_is_found",
    ),
    Mutation(
        "output with one wrong value accepted",
        "IN_SLICE, IN_VALUE = 5.0, 3.0",
        "IN_SLICE, IN_VALUE = 5.0, 30.0",
        "unit/test_output_check.py::test_value_may_be_off_by_what_its_channel_adds_a_few_times",
    ),
    Mutation(
        "output of another shape accepted",
        "    if out.shape != expected.shape or out.dtype != expected.dtype:\n",
        "    if out.ndim != expected.ndim:\n",
        "unit/test_output_check.py::test_outputs_of_any_kind_are_compared",
    ),
    Mutation(
        "graph judged fast by its best call",
        "and max(ratios) * SLOWER < 1:",
        "and min(ratios) * SLOWER < 1:",
        "unit/test_benchmark.py::test_graph_that_is_slow_in_one_call_of_the_first_is_timed_further",
    ),
    Mutation(
        "capture replayed at another size",
        "BufferSpec(t.shape, t.dtype,",
        "BufferSpec(torch.Size((t.ndim,)), t.dtype,",
        "unit/test_model_capture.py::test_what_changes_the_work_is_captured_apart_and_what_changes_values_is_not",
    ),
    Mutation(
        "capture replayed for another attention",
        "CaptureKey(model, self.spec, self._specs, facts)",
        "CaptureKey(model, self.spec, self._specs, None)",
        "unit/test_model_capture.py::test_what_changes_the_work_is_captured_apart_and_what_changes_values_is_not",
    ),
    Mutation(
        "capture replayed on the last call's inputs",
        "        self._buffers.fill(tensors)\n        self._graph.replay()\n",
        "        self._graph.replay()\n",
        "unit/test_model_capture.py::test_third_call_is_captured_and_the_rest_are_replays_in_this_run_and_the_next",
    ),
    Mutation(
        "output of a replay that the next one overwrites",
        "[tensor.clone() for tensor in self._returned]",
        "self._returned",
        "unit/test_model_capture.py::test_output_stays_as_it_was_when_the_next_call_is_made",
    ),
    Mutation(
        "capture replayed though weights have moved",
        "if captured.digest != self._guard.weights.digest or not captured.has_kernels():",
        "if not captured.has_kernels():",
        "unit/test_model_capture.py::test_moved_weights_drop_the_capture_and_the_next_call_makes_one",
    ),
    Mutation(
        "replay used though a weight that no sample looks at has moved",
        "                if not self._guard.is_current(captured.outline):\n",
        "                if not captured.outline:\n",
        "unit/test_model_capture.py::test_weight_that_no_sample_looks_at_is_noticed_before_the_output_is_used",
    ),
    Mutation(
        "capture replayed with not all weights held",
        "if captured is None or not captured.held <= self._held:",
        "if captured is None:",
        "unit/test_model_capture.py::test_capture_is_not_replayed_while_weights_that_it_reads_are_not_held",
    ),
    Mutation(
        "failed replay ends the run",
        "        except Exception as error:\n            is_shortage = isinstance(",
        "        except ZeroDivisionError as error:\n            is_shortage = isinstance(",
        "unit/test_model_capture.py::test_failure_at_any_stage_leaves_every_output_right_and_no_memory_behind",
    ),
    Mutation(
        "LoRA added twice",
        "                made[weight] = _plus(made[weight], item)\n",
        "                made[weight] = _plus(_plus(made[weight], item), item)\n",
        "unit/test_wrapped_layers.py::test_one_graph_serves_the_block_whatever_is_around_its_layers",
    ),
    Mutation(
        "LoRA not added",
        "    if not added:\n        return weights\n    made = list(weights)\n",
        "    return weights\n    made = list(weights)\n",
        "unit/test_wrapped_layers.py::test_one_graph_serves_the_block_whatever_is_around_its_layers",
    ),
    Mutation(
        "tensors without values left in a table",
        "                    del table[key]\n",
        "                    pass\n",
        "unit/test_kernels_tables.py::test_nothing_of_a_trace_is_left_in_a_table_and_all_else_is",
    ),
    Mutation(
        "Python's random numbers left as the compiler leaves them",
        "        random.setstate(state)\n",
        "        pass\n",
        "unit/test_random_numbers.py::test_compilers_that_draw_leave_random_numbers_as_they_were",
    ),
    Mutation(
        "a compiler's random numbers taken from the image's seed",
        "    random.seed()\n",
        "    pass\n",
        "unit/test_random_numbers.py::test_two_blocks_that_are_compiled_under_one_seed_are_not_taken_for_each_other",
    ),
    Mutation(
        "dry run that goes on at an obstacle",
        "._before(func, args, kwargs)\n        if self.reason is not None:\n            raise Ended\n",
        "._before(func, args, kwargs)\n",
        "unit/test_model_capture.py::test_what_a_capture_would_not_do_again_is_told_once_and_nothing_is_captured",
    ),
    Mutation(
        "sizes of 1 taken for like others",
        "        if self.calls != other.calls:\n",
        "        if False:\n",
        "unit/test_specialization.py::test_a_graph_serves_a_batch_of_one_where_the_block_same_ops_with_with_it",
    ),
    Mutation(
        "what a block asks of the other sizes with a batch of 1 forgotten",
        "return traced.asked if traced.does_as",
        'return "" if traced.does_as',
        "unit/test_specialization.py::test_what_code_asks_of_the_other_sizes_in_a_batch_of_one_counts",
    ),
    Mutation(
        "skipped step that calls the model",
        "    given = run.forecast(x)\n    return",
        "    given = (run.forecast(x), executor(x, timestep, model_options, seed))[0]\n    return",
        "comfyui/test_deep_cache.py::test_skipped_step_calls_no_model_and_the_image_is_another",
    ),
    Mutation(
        "skipped step that calls the model of a pipeline",
        "        if self._run.skips and place < len(",
        "        if not self._run and place < len(",
        "unit/test_diffusers_host.py::test_every_image_is_a_run_whose_skipped_steps_call_no_model",
    ),
    Mutation(
        "skipped step foretold from before another thing was asked",
        "        if situation != self._situation:\n",
        "        if self._situation is None:\n",
        "unit/test_deep_cache.py::test_nothing_is_foretold_from_before_another_thing_was_asked",
    ),
    Mutation(
        "skipped step foretold from another size",
        "return bool(self._known) and self._known[0].latent.shape == latent.shape",
        "return bool(self._known)",
        "unit/test_deep_cache.py::test_nothing_is_foretold_for_another_size",
    ),
    Mutation(
        "skipped step foretold as if the noise of a sampler moved predictions",
        "self._follows = 0.0 if facts.adds_noise else None",
        "self._follows = None",
        "unit/test_deep_cache.py::test_forecast_follows_a_latent_that_is_moved_but_not_by_noise_of_the_sampler",
    ),
    Mutation(
        "predictions of a skipping run kept after it",
        '"""Drop all tensors."""\n        self.forget()\n',
        '"""Drop all tensors."""\n',
        "unit/test_deep_cache.py::test_closed_run_keeps_no_tensor",
    ),
    Mutation(
        "what skipped steps got wrong left in the latent",
        "self._note(one.index, should - made)",
        "self._note(one.index, 0 * made)",
        "unit/test_correction.py::test_latent_is_as_if_nothing_had_been_skipped",
    ),
    Mutation(
        "preview of a skipping run with what the latent lacked",
        "denoised if self.run is None else self.run.prediction_in(denoised)",
        "denoised",
        "comfyui/test_deep_cache_quality.py::test_denoised_output_of_half_a_run_is_the_prediction_alone",
    ),
    Mutation(
        "skipped step that gives a sampler the parts of the last full one",
        "parts = zip(_PARTS, run.forecast_parts(x), strict=True)",
        "parts = ()",
        "comfyui/test_deep_cache_samplers.py::test_samplers_that_go_by_both_predictions_get_both_in_skipped_steps",
    ),
    Mutation(
        "steps skipped beside a node that skips some itself",
        'if CORE_CACHE in model_options.get("transformer_options", {}):',
        "if CORE_CACHE in model_options:",
        "comfyui/test_deep_cache_beside_other_nodes.py::"
        "test_image_beside_a_node_that_may_skip_steps_itself_is_that_nodes_alone",
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


def the_file(root: Path, mutation: Mutation) -> Path:
    """The one file of the pack with the mutation's text in it, once."""
    paths = [path for part in MUTATED for path in (root / part).rglob("*") if path.suffix in (".py", ".json")]
    found = [path for path in paths for _ in range(path.read_text(encoding="utf-8").count(mutation.before))]
    if len(found) != 1:
        text = mutation.before.strip()
        sys.exit(f"Stale mutation {mutation.name!r}: {text!r} is there {len(found)} times, and should be once.")
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
        places = [the_file(root, mutation) for mutation in chosen]
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
            print(f"{said:12} {time.monotonic() - started:4.0f} s  {mutation.name:64} {mutation.test}", flush=True)
            if done.returncode not in (0, TESTS_FAILED):
                print(done.stdout[-2000:], done.stderr[-1000:])
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
