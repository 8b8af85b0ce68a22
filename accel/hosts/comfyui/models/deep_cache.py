"""DeepCache in ComfyUI: wrappers on a clone of the model, and a DeepCacheRun for every sampler run."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrappersMP, get_wrappers_with_key
from comfy.samplers import CFGGuider

from ....core.errors import one_line
from ....core.events import emit, log
from ....modules.blocks import uncompiled
from ....modules.substitution import Order, drop_restored_forwards, has_foreign_forward, substituted
from ....report.facts import skipping_fact
from ....report.run import Skipping
from ....step_cache.cached_call import cached_call, with_own_lists
from ....step_cache.config import DeepCacheSettings
from ....step_cache.features import BranchKey, Features
from ....step_cache.noise_levels import angle
from ....step_cache.run import DeepCacheRun
from ....step_cache.sampler_facts import SamplerFacts
from ....step_cache.splits.layouts import find_split, numbers_kept, why_no_split
from ..recording import unrecorded_context
from ..running_prompt import leading_node
from ..sizes.shape_errors import sizes_explained
from ..versions import forget_prefetched, put_wrappers
from ..words import advised
from .late_control import LateControl, postponed
from .options import CAPTURE, CORE_CACHE, CORE_COMPILE, INTERRUPTS, WARMS_UP, asks_wrappers, compiles_whole
from .options import SKIPS as KEY
from .run_events import run_events, sampling_begins
from .samplers import NoiseLevels, facts_of, follows_schedule

if TYPE_CHECKING:
    from ....cuda_graphs.model_capture import ModelCapture

_MUCH = 1 << 29
"""Bytes kept from which on it is told before the run."""

_PREDICTS = (
    "sampler_pre_cfg_function",
    "sampler_cfg_function",
    "sampler_post_cfg_function",
    "sampler_calc_cond_batch_function",
)
"""Keys of model_options: functions of other nodes that change how predictions are made or combined."""


def apply_deep_cache(
    model_patcher: Any, settings: DeepCacheSettings, made_by: str | None = None, **choices: Any
) -> Any:
    """A clone of the ModelPatcher that samples with DeepCache, in place of any earlier settings.

    When the settings skip nothing, or the model has no split, the clone samples as without this pack. made_by: the
    class of the node that shows what was skipped; choices: what tells it from others of that class before the sampler
    (`leading_node`).
    """
    clone = model_patcher.clone()
    model, wrappers = clone.get_model_object("diffusion_model"), {}
    if find_split(model) is None:
        log.warning("DeepCache: %s: %s; every step runs in full.", type(model).__name__, why_no_split(model))
    elif not settings.is_off:
        asks = asks_wrappers(uncompiled(model))
        wrappers = {
            WrappersMP.OUTER_SAMPLE: _run_wrapper(settings, made_by, choices),
            WrappersMP.PREPARE_SAMPLING: _make_room,
            WrappersMP.SAMPLER_SAMPLE: _begin_sampling,
            WrappersMP.PREDICT_NOISE: _begin_evaluation,
            WrappersMP.CALC_COND_BATCH: _later_controls,
            **({WrappersMP.DIFFUSION_MODEL: _call_model} if asks else {WrappersMP.APPLY_MODEL: _stand_in_for_model}),
        }
    put_wrappers(clone, KEY, wrappers)
    return clone


def _run_wrapper(settings: DeepCacheSettings, made_by: str | None, choices: dict[str, Any]) -> Callable[..., Any]:
    def sample_in_run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        """OUTER_SAMPLE wrapper: one run, from loading the model to its last step."""
        # The guider's model_options belong to this run; core copies them, with our state by reference.
        options = executor.class_obj.model_options.setdefault("transformer_options", {})
        before = options.get(KEY)
        mask = args[4] if len(args) > 4 else kwargs.get("denoise_mask")
        sampler, cfg = args[2] if len(args) > 2 else None, getattr(executor.class_obj, "cfg", None)
        sampling = options[KEY] = _Sampling(settings, sampler, mask is not None, cfg)
        if any(map(compiles_whole, get_wrappers_with_key(WrappersMP.APPLY_MODEL, CORE_COMPILE, options))):
            log.warning("DeepCache: TorchCompileModel compiles nothing beside it; use Accelerate Model instead.")
            # Newer cores' does not look at patches: what it compiled without DeepCache would run in place of it.
            wrappers = options["wrappers"]
            others = {key: own for key, own in wrappers[WrappersMP.APPLY_MODEL].items() if key != CORE_COMPILE}
            options["wrappers"] = {**wrappers, WrappersMP.APPLY_MODEL: others}
        is_finished = False
        node_id = leading_node(made_by, "MODEL", **choices)
        with run_events(executor, args, caching={**asdict(settings), "node": node_id}):
            try:
                with sizes_explained(executor, args):
                    out = executor(*sampling.showing(args), **kwargs)
                is_finished = True
                return out
            finally:
                if before is None:
                    options.pop(KEY, None)
                else:
                    options[KEY] = before
                sampling.end(not is_finished or bool(options.get(WARMS_UP)))

    return sample_in_run


class _Sampling:
    """One call of a sampler, and its run. is_masked: whether masked places take other ways
    to the latent."""

    def __init__(self, settings: DeepCacheSettings, sampler: Any, is_masked: bool, cfg: float | None):
        self._settings, self._sampler, self._is_masked, self._cfg = settings, sampler, is_masked, cfg
        self._levels: NoiseLevels | None = None
        self.run: DeepCacheRun | None = None

    def will_keep(self, model: Any, noise_shape: Sequence[int], conds: Mapping[str, Sequence[Any]]) -> int:
        """Bytes that the run will keep of the BaseModel at most, by estimate."""
        split = find_split(uncompiled(model.diffusion_model))
        unused = "negative" if self._cfg == 1 else None  # core leaves it out
        branches = sum(len(group or ()) for name, group in conds.items() if name != unused)
        copies = self._settings.plan().points + 1  # and what a skipped step goes on with
        return (
            copies
            * branches
            * numbers_kept(split, noise_shape)
            * (model.manual_cast_dtype or model.get_dtype()).itemsize
        )

    def begin(self, guider: Any, schedule: torch.Tensor, model_options: dict[str, Any]) -> None:
        """Make the run, when the guider has its model and the sampler its schedule."""
        patcher, settings = guider.model_patcher, self._settings
        of_model = patcher.get_model_object("model_sampling")
        is_flow, levels = isinstance(of_model, CONST), schedule.tolist()
        percents = settings.start_percent, settings.end_percent
        self._levels = NoiseLevels(follows_schedule(self._sampler, patcher.load_device))
        facts = facts_of(self._sampler, guider, levels, is_flow)
        conds = [cond for group in getattr(guider, "conds", {}).values() for cond in group or ()]
        may_correct = not self._is_masked and _is_plain(guider) and not any(map(model_options.get, _PREDICTS))
        self.run = DeepCacheRun(
            settings,
            facts,
            find_split,
            window=tuple(float(of_model.percent_to_sigma(percent)) for percent in percents),
            follows=_follows(of_model, facts) if may_correct else None,
            changes=[angle(float(level), is_flow) for cond in conds for level in _levels_of_change(cond)],
            why_full=_who_skips(guider, model_options),
        )

    def level(self, timestep: Any) -> float:
        """The noise level of the next evaluation."""
        return self._levels.read(torch.as_tensor(timestep), self.run.facts.levels)

    def showing(self, args: tuple) -> tuple:
        """The arguments of the sampling with a callback that gets predictions alone, for previews and denoised outputs,
        without what was added to them for the latent's sake."""
        if len(args) < 6 or args[5] is None:
            return args
        callback = args[5]

        def show(step: int, denoised: Any, *rest: Any) -> None:
            prediction = denoised if self.run is None else self.run.prediction_in(denoised)
            if prediction is denoised:
                callback(step, denoised, *rest)
            else:
                shown = prediction.clone()
                callback(step, shown, *rest)
                denoised += shown - prediction  # some packs change it in place, for the sampler to go on with

        return (*args[:5], show, *args[6:])

    def end(self, is_quiet: bool) -> None:
        """Emit what the run came to, and log it unless `is_quiet`, as where it was stopped and its steps say little."""
        run, self.run = self.run, None
        if run is None or not run.letters and run.why_full is None:
            why = "another node or its sampler calls the model in a way of its own"
        else:
            why = run.why_full
        letters = "" if run is None else run.letters
        skipping = Skipping(
            steps_taken=letters,
            why_full=why,
            target_db=self._settings.quality,
            skipped_work=0.0 if run is None else run.skipped_work,
            kept_bytes=0 if run is None else run.bytes,
        )
        emit("deep_cache_run", skipping=skipping, began=() if run is None else run.began)
        if is_quiet:
            pass
        elif letters:
            sampler = getattr(getattr(self._sampler, "sampler_function", None), "__name__", "").removeprefix("sample_")
            log.info("%s", advised(skipping_fact(skipping), sampler))
        elif run is None or run.why_full is None:
            log.warning("DeepCache: %s; every step ran in full.", why)
        if run is not None:
            run.close()


def _make_room(
    executor: Any, patcher: Any, noise_shape: Sequence[int], conds: dict[str, list], *args: Any, **kwargs: Any
) -> Any:
    """PREPARE_SAMPLING wrapper: loads the model with room for the features of skipped steps, beyond core's estimate."""
    options = kwargs.get("model_options") or (args[0] if args else None) or {}
    sampling: _Sampling | None = options.get("transformer_options", {}).get(KEY)
    try:
        kept = 0 if sampling is None else sampling.will_keep(patcher.model, noise_shape, conds)
    except Exception as error:  # a model or a prompt of another pack, laid out in a way of its own
        log.debug("DeepCache: what it will keep is not known: %s", error)
        kept = 0
    if kept >= _MUCH:
        log.info("DeepCache: keeps about %.1f GB of features for skipped steps.", kept / (1 << 30))
    with _reserving(patcher.model, kept):
        return executor(patcher, noise_shape, conds, *args, **kwargs)


@contextmanager
def _reserving(model: Any, kept: int) -> Iterator[None]:
    """Within the context the model takes `kept` bytes more of memory, as core asks it."""
    own, before = model.memory_required, vars(model).get("memory_required")
    model.memory_required = lambda *args, **kwargs: own(*args, **kwargs) + kept
    try:
        yield
    finally:
        del model.memory_required
        if before is not None:
            model.memory_required = before


def _begin_sampling(
    executor: Any, guider: Any, sigmas: Any, extra_args: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """SAMPLER_SAMPLE wrapper: makes the run. The sampler is measured here and not within it: it may keep a state."""
    options = extra_args.get("model_options", {})
    sampling: _Sampling | None = options.get("transformer_options", {}).get(KEY)
    if sampling is not None:
        try:
            sampling.begin(guider, sigmas, options)
        except Exception as error:  # a guider or a prompt of another pack, laid out in a way of its own
            log.warning("DeepCache: this run cannot be read (%s); every step runs in full.", one_line(error))
    return sampling_begins(executor, guider, sigmas, extra_args, *args, **kwargs)


def _begin_evaluation(executor: Any, x: Any, timestep: Any, model_options: dict | None = None, seed: Any = None) -> Any:
    """PREDICT_NOISE wrapper: one evaluation of the guider, however many model calls it makes.

    The one place that reads sigmas, since that may wait for the GPU.
    """
    model_options = {} if model_options is None else model_options
    sampling: _Sampling | None = model_options.get("transformer_options", {}).get(KEY)
    if sampling is None or sampling.run is None:
        return executor(x, timestep, model_options, seed)
    run, level = sampling.run, sampling.level(timestep)
    run.begin(level)
    return run.end(x, level, executor(x, timestep, model_options, seed), getattr(executor.class_obj, "cfg", None))


def _follows(of_model: Any, facts: SamplerFacts) -> tuple[float, ...]:
    """By how much a prediction of the denoised latent moves with the latent where the model's output does not, at each
    noise level of the schedule: for every kind of output that core has."""

    def moved(level: float) -> float:
        still, latent = torch.zeros(2, 1, 1, 1), torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)
        one, other = of_model.calculate_denoised(torch.full((2,), level), still, latent).flatten().tolist()
        return other - one

    return tuple(moved(level) for level in facts.levels)


def _who_skips(guider: Any, model_options: dict[str, Any]) -> str | None:
    """Why nothing may be skipped: what else takes part in the model's calls, and may skip some of its own."""
    if CORE_CACHE in model_options.get("transformer_options", {}):
        return "EasyCache or LazyCache skips steps of its own (use one of the two)"
    wrapper, net = model_options.get("model_function_wrapper"), guider.inner_model.diffusion_model
    if wrapper is not None:
        # Core names a pack's modules by its folder's path; some packs import theirs by the folder of all packs.
        module = (getattr(wrapper, "__module__", None) or type(wrapper).__module__).removeprefix("custom_nodes.")
        pack = os.path.basename(module.split(".")[0])
        return f"another node ({pack}) makes the model's calls, and may skip some itself (use one of the two)"
    drop_restored_forwards(net.modules())
    if has_foreign_forward(net) or "forward_orig" in vars(net):
        return "another node has replaced the model's forward"
    return None


def _is_plain(guider: Any) -> bool:
    """Whether it combines predictions as core's CFGGuider does."""
    return getattr(type(guider), "predict_noise", None) is CFGGuider.predict_noise


def _levels_of_change(cond: dict[str, Any]) -> Iterator[float]:
    """The noise levels at which a prompt, its ControlNets or its hooks begin, end or change in strength."""
    yield from (cond[name] for name in ("timestep_start", "timestep_end") if cond.get(name) is not None)
    control = cond.get("control")
    while control is not None:
        yield from getattr(control, "timestep_range", None) or ()
        control = getattr(control, "previous_controlnet", None)
    for hook in getattr(cond.get("hooks"), "hooks", ()):
        yield from (keyframe.start_t for keyframe in hook.hook_keyframe.keyframes)


def _later_controls(executor: Any, model: Any, conds: list, x: torch.Tensor, timestep: Any, model_options: dict) -> Any:
    """CALC_COND_BATCH wrapper: on a step that may be skipped, ControlNets are not called before they are needed."""
    sampling: _Sampling | None = model_options.get("transformer_options", {}).get(KEY)
    if sampling is not None and sampling.run is not None and sampling.run.leaves_controls_out:
        conds = postponed(conds, model_options)
    return executor(model, conds, x, timestep, model_options)


def _stand_in_for_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """APPLY_MODEL wrapper: a stand-in for the model's forward, for models that run no wrappers themselves."""
    model = uncompiled(executor.class_obj.diffusion_model)

    @torch.compiler.disable
    def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _cached(inner, model, args, kwargs, _names(type(model).forward)[1:])

    with substituted({model: call}, Order.CACHED):
        return executor(*args, **kwargs)


@torch.compiler.disable
def _call_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """DIFFUSION_MODEL wrapper: every call of the model's forward.

    Not for Dynamo: what `TorchCompileModel` traced on a full step would be wrong on a skipped one.
    """
    return _cached(executor, executor.class_obj, args, kwargs, _names(executor.original))


def _cached(call: Callable[..., Any], model: torch.nn.Module, args: tuple, kwargs: dict, names: Sequence[str]) -> Any:
    """One call of the model: skipped, full with its features stored, or plain. names: of the positional arguments."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    options = named.get("transformer_options") or {}
    sampling: _Sampling | None = options.get(KEY)
    run = None if sampling is None else sampling.run
    features = None if run is None else run.of(model)
    x = args[0] if args else named.get("x")
    if type(x) is list and x and all(isinstance(part, torch.Tensor) for part in x):
        x = x[0]  # of several latents that are sampled together, the video's
    if features is not None and not isinstance(x, torch.Tensor):
        run.run_in_full(f"{type(model).__name__} takes several latents at once")

    def full() -> Any:
        given, named = _with_control(args, kwargs, names, _computed)
        return call(*given, **named)

    if features is None:
        return full()

    def skipped() -> Any:
        def withhold(control: Any) -> Any:
            return None if isinstance(control, LateControl) else features.split.withhold(control)

        kept, named = _with_control(args, kwargs, names, withhold)
        return call(*kept, **named)

    keys = _branches(features, x, options)
    capture: ModelCapture | None = options.get(CAPTURE)
    within = None if capture is None else capture.during
    clean_up = functools.partial(forget_prefetched, model)
    return cached_call(features, keys, full, skipped, INTERRUPTS, within, unrecorded_context(), clean_up=clean_up)


def _computed(control: Any) -> Any:
    """`control` as a full call takes it."""
    if isinstance(control, LateControl):
        control = control.computed
    return with_own_lists(control) if type(control) is dict else control


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that may be given by position."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return names[1:] if inspect.ismethod(function) else names


def _with_control(args: tuple, kwargs: dict, names: Sequence[str], change: Callable[[Any], Any]) -> tuple[tuple, dict]:
    """The arguments with `change` applied to `control`, wherever it is among them."""
    if "control" in kwargs:
        return args, {**kwargs, "control": change(kwargs["control"])}
    place = names.index("control") if "control" in names else len(args)
    if place < len(args):
        return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs
    return args, kwargs


def _branches(features: Features, x: torch.Tensor, options: dict[str, Any]) -> list[BranchKey] | None:
    window = options.get("context_window")
    if window is not None and not hasattr(window, "index_list"):
        return None
    frames: Hashable = None if window is None else tuple(window.index_list)
    animate_diff = options.get("ad_params") or {}
    if animate_diff.get("sub_idxs") is not None:
        frames = (frames, tuple(animate_diff["sub_idxs"]))
    variant = (frames, _replaced(options.get("patches_replace") or {}))
    return features.branches(x, options.get("uuids"), options.get("cond_or_uncond", ()), variant)


def _replaced(patches: dict[str, dict[Hashable, Any]]) -> frozenset[Hashable]:
    """The replaced blocks with the names of their replacements: guidance makes new functions for every call."""
    return frozenset(
        (kind, block, getattr(patch, "__qualname__", type(patch).__qualname__))
        for kind, blocks in patches.items()
        for block, patch in blocks.items()
    )
