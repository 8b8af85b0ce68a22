"""DeepCache in ComfyUI: wrappers on a clone of the model, and a DeepCacheRun for every sampler run."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import comfy.model_management
import torch
from comfy.model_sampling import CONST, EPS
from comfy.patcher_extension import WrappersMP, get_wrappers_with_key
from comfy.samplers import CFGGuider

from ....core.events import emit, log
from ....modules.substitution import Order, substituted
from ....report.headline import FEW_STEPS, why_none_skipped
from ....report.run import Skipping
from ....step_cache.cached_call import cached_call
from ....step_cache.config import DeepCacheSettings
from ....step_cache.policies.sensitivity import learnt_in
from ....step_cache.predictions.correction import Correction
from ....step_cache.predictions.guidance import MOST_STEPS, Guidance
from ....step_cache.run import BranchKey, DeepCacheRun
from ....step_cache.split_points import find_split, why_no_split
from ....step_cache.step_schedule import angle
from ....store import location
from ..home import running_home
from ..sizes.shape_errors import sizes_explained
from ..versions import unrecorded_context
from ..words import NOISY, none_skipped
from .late_control import LateControl, can_wait, postponed
from .options import CAPTURE, CORE_CACHE, CORE_COMPILE, INTERRUPTS, WARMS_UP, asks_wrappers, compiles_whole
from .run_events import run_events, sampling_begins
from .samplers import NoiseLevels, is_of_core, reckons, sampler_response

if TYPE_CHECKING:
    from ....cuda_graphs.model_capture import ModelCapture

KEY = "accel_deep_cache"
"""Key of our wrappers, and of the run in its transformer_options."""

_WRAPPED = (WrappersMP.OUTER_SAMPLE, WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE)
_WRAPPED += (WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)

_EXTRAPOLATE = ("_2m", "_3m", "multistep", "ipndm", "deis", "lms", "unipc", "sa_solver", "gradient_estimation")
"""Parts of the names of samplers that go beyond their newest prediction."""

_FARTHEST = {"ge_gamma": 2, "order": 4}
"""The most of sampler options (of gradient_estimation and lms) with which a quality was kept. Above, it missed by up to
15 dB."""

_GUIDANCE = ("sampler_pre_cfg_function", "sampler_cfg_function", "sampler_post_cfg_function")
"""Keys of model_options: functions of other nodes that change how predictions are combined."""

_PREDICTS = (*_GUIDANCE, "sampler_calc_cond_batch_function")
"""Keys of model_options: the same, and functions that make the predictions."""

_ASKS_BOTH = (*_PREDICTS, "disable_cfg1_optimization")
"""Keys of model_options: other nodes make the predictions, or need both where one would do, as NAG."""


def apply_deep_cache(model_patcher: Any, settings: DeepCacheSettings, node_id: str | None = None) -> Any:
    """A clone of the ModelPatcher that samples with DeepCache, in place of any earlier settings.

    When the settings skip nothing, or the model has no split, the clone samples as without this pack. Raises
    ValueError when the depth is beyond the model. node_id: the node in the page that shows what was skipped.
    """
    clone = model_patcher.clone()
    for kind in _WRAPPED:
        clone.remove_wrappers_with_key(kind, KEY)
    model = clone.get_model_object("diffusion_model")
    if find_split(model, settings.depth) is None:
        log.warning("DeepCache: %s: %s; every step runs in full.", type(model).__name__, why_no_split(model))
        return clone
    if not settings.is_off:
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _run_wrapper(settings, node_id))
        clone.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, sampling_begins)
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, _begin_evaluation)
        clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, _predict)
        if asks_wrappers(_uncompiled(model)):
            clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, _call_model)
        else:
            clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, _stand_in_for_model)
    return clone


def _uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` was given, where `model` is what it returned."""
    return getattr(model, "_orig_mod", model)


def _run_wrapper(settings: DeepCacheSettings, node_id: str | None) -> Callable[..., Any]:
    def sample_in_run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        # The guider's model_options belong to this run; core copies them, with our state by reference.
        options = executor.class_obj.model_options.setdefault("transformer_options", {})
        before = options.get(KEY)
        run = options[KEY] = DeepCacheRun(settings)
        sampling = executor.class_obj.model_patcher.get_model_object("model_sampling")
        run.window = tuple(float(sampling.percent_to_sigma(p)) for p in (settings.start_percent, settings.end_percent))
        run.is_flow = isinstance(sampling, CONST)
        patcher = executor.class_obj.model_patcher
        sampler = args[2] if len(args) > 2 else None
        name = _name(sampler)
        run.carries = _carried_by(name)
        run.adds_noise = _may_add_noise(sampler)
        mask = args[4] if len(args) > 4 else kwargs.get("denoise_mask")
        run.sampler = sampler if mask is None else None  # masked places take other ways to the latent
        if run.target is not None and not location.is_off():
            run.learnt = learnt_in(running_home())
        scales = [getattr(executor.class_obj, scale, None) for scale in ("cfg", "cfg1", "cfg2")]
        run.guided_by = f"{type(executor.class_obj).__name__} {scales}"
        run.levels = NoiseLevels(reckons(sampler, patcher.load_device))
        against = _against_quality(sampler, options)
        if run.target is not None and against is not None:
            run.run_in_full(f"no quality can be kept {against}")
        if any(map(compiles_whole, get_wrappers_with_key(WrappersMP.APPLY_MODEL, CORE_COMPILE, options))):
            log.warning("DeepCache: TorchCompileModel compiles nothing beside it; use Accelerate Model instead.")
            # Newer cores' does not look at patches: what it compiled without DeepCache would run in place of it.
            wrappers = options["wrappers"]
            others = {key: own for key, own in wrappers[WrappersMP.APPLY_MODEL].items() if key != CORE_COMPILE}
            options["wrappers"] = {**wrappers, WrappersMP.APPLY_MODEL: others}
        is_finished = False
        with run_events(executor, args, caching={**asdict(settings), "node": node_id}):
            try:
                with sizes_explained(executor, args):
                    out = executor(*_showing(run, args), **kwargs)
                is_finished = True
                return out
            finally:
                if before is None:
                    options.pop(KEY, None)
                else:
                    options[KEY] = before
                has_many = is_finished and len(run.schedule) > FEW_STEPS
                if has_many and not run.has_skipped and not run.why_full and CORE_CACHE in options:
                    run.why_full = "EasyCache or LazyCache skips steps of its own (use one of the two)"
                _report(run, name.removeprefix("sample_"), not is_finished or bool(options.get(WARMS_UP)))
                run.close()

    return sample_in_run


def _showing(run: DeepCacheRun, args: tuple) -> tuple:
    """The arguments of a sampling with a callback that gets predictions alone, for previews and denoised outputs,
    without what was added to them for the latent's sake."""
    if len(args) < 6 or args[5] is None:
        return args
    callback = args[5]

    def show(step: int, denoised: Any, *rest: Any) -> None:
        prediction = run.prediction_in(denoised)
        if prediction is denoised:
            callback(step, denoised, *rest)
        else:
            shown = prediction.clone()
            callback(step, shown, *rest)
            denoised += shown - prediction  # some packs change it in place, for the sampler to go on with

    return (*args[:5], show, *args[6:])


def _name(sampler: Any) -> str:
    return getattr(getattr(sampler, "sampler_function", None), "__name__", "")


def _against_quality(sampler: Any, options: dict[str, Any]) -> str | None:
    """Where no quality can be kept: the circumstances, if there are any."""
    if "dpm_adaptive" in _name(sampler):
        return "with DPM adaptive, which chooses steps of its own"
    if CORE_CACHE in options:
        return "beside EasyCache or LazyCache, which skip steps of their own"
    given = sampler.extra_options if is_of_core(sampler) else {}
    far = (name for name, most in _FARTHEST.items() if abs(given.get(name) or 0) > most)
    return next((f"where {name} is above {_FARTHEST[name]}: it enlarges errors" for name in far), None)


def _may_add_noise(sampler: Any) -> bool:
    """Whether it adds noise in a step, is none of core's, or is asked for noise of its own."""
    options = getattr(sampler, "extra_options", None) or {}
    is_plain = is_of_core(sampler) and _carried_by(_name(sampler))[0] == 1.0
    return not is_plain or bool(options.get("eta") or options.get("s_churn"))


def _carried_by(name: str) -> tuple[float, float]:
    """How the sampler function of this name carries errors on: `kept` and `beyond` of `policies.quality.Carried`."""
    if name.startswith("sample_lcm"):
        return math.inf, 0.0
    is_noisy, extrapolates = (any(part in name for part in parts) for parts in (NOISY, _EXTRAPOLATE))
    return 2.0 if is_noisy else 1.0, 1.0 if extrapolates else 0.0


def _report(run: DeepCacheRun, sampler: str, is_quiet: bool) -> None:
    """Emit what the run came to, and log it unless `is_quiet`, as where it was stopped and its steps say little."""
    facts = run.quality_facts()
    skipping = Skipping(run.letters, run.why_full, **facts)
    emit("deep_cache_run", skipping=skipping, began=run.began)
    if is_quiet or run.log_quality(facts):
        return
    may_advise = run.why_full or run.policy.uses_drift or run.target is not None
    if run.skipped_steps or run.failed or not may_advise:
        log.info("DeepCache: %d of %d steps ran in full.", run.full_steps, run.full_steps + run.skipped_steps)
    else:
        log.info("%s", none_skipped(why_none_skipped(skipping, run.full_steps), run.full_steps, sampler))


def _begin_evaluation(executor: Any, x: Any, timestep: Any, model_options: dict | None = None, seed: Any = None) -> Any:
    """Around every evaluation of the guider, however many model calls it makes.

    The one place that reads sigmas, since that may wait for the GPU.
    """
    model_options = {} if model_options is None else model_options
    options = model_options.get("transformer_options", {})
    run: DeepCacheRun | None = options.get(KEY)
    if run is not None:
        schedule = options.get("sample_sigmas")
        if not run.schedule and schedule is not None:
            run.guidance = _guidance_of(run, len(schedule) - 1, executor.class_obj, model_options)
            _note_other_nodes(run, executor.class_obj, model_options)
            _correct(run, executor.class_obj, model_options, schedule)
            run.set_schedule(schedule.tolist())
        level = run.levels.read(torch.as_tensor(timestep), run.schedule)
        run.begin_evaluation(level)
        if run.is_probing:
            evaluate = functools.partial(_evaluate, executor, x, timestep, model_options, seed)
            out = run.probed(evaluate, lambda error: isinstance(error, INTERRUPTS))
        else:
            out = executor(x, timestep, model_options, seed)
        return run.corrected(x, level, out, getattr(executor.class_obj, "cfg", None))
    return executor(x, timestep, model_options, seed)


def _correct(run: DeepCacheRun, guider: Any, model_options: dict[str, Any], schedule: torch.Tensor) -> None:
    """Let the run correct what the sampler is given, where nothing else has a part in it."""
    if run.sampler is None or not run.may_correct or not _is_plain(guider):
        return
    if CORE_CACHE in model_options.get("transformer_options", {}):
        return
    if any(model_options.get(name) for name in _PREDICTS):
        return
    sampling = type(guider.model_patcher.get_model_object("model_sampling"))
    if sampling.calculate_denoised not in (EPS.calculate_denoised, CONST.calculate_denoised):
        return  # forecasts of other kinds of predictions follow the latent less
    try:
        changes = _changes(run, guider)
        response = sampler_response(run.sampler, guider, schedule)
    except Exception as error:  # a sampler that needs more of the model than its predictions, or another pack's prompt
        log.debug("DeepCache corrects nothing with %s: %s", _name(run.sampler), error)
        return
    if response is not None:
        run.correction = Correction(response, changes)


def _note_other_nodes(run: DeepCacheRun, guider: Any, model_options: dict[str, Any]) -> None:
    conds = _conds(guider)
    controls = [cond["control"] for cond in conds if cond.get("control") is not None]
    run.has_controls = bool(controls)
    run.has_other_nodes = any(cond.get("hooks") for cond in conds)
    run.has_other_nodes |= any(not can_wait(control, model_options) for control in controls)


def _evaluate(
    executor: Any, x: Any, timestep: Any, model_options: dict, seed: Any, is_probe: bool
) -> tuple[Any, torch.Tensor | None]:
    """The evaluation's result and what of it is compared: the guided prediction before guidance of other nodes.

    Such guidance may keep a state, as APG's momentum, or call the model itself, so a probe goes without it.
    """
    if not any(model_options.get(name) for name in _GUIDANCE):
        out = executor(x, timestep, model_options, seed)
        return out, out
    guided = []

    def note(args: dict[str, Any]) -> Any:
        if len(args["conds_out"]) == 2:
            cond, uncond = args["conds_out"]
            guided.append(uncond + (cond - uncond) * args["cond_scale"])
        return args["conds_out"]

    options = {name: value for name, value in model_options.items() if not is_probe or name not in _GUIDANCE}
    options[_GUIDANCE[0]] = [note, *options.get(_GUIDANCE[0], ())]
    out = executor(x, timestep, options, seed)
    return out, guided[0] if guided else None


def _guidance_of(run: DeepCacheRun, steps: int, guider: Any, model_options: dict[str, Any]) -> Guidance | None:
    """What lets a short run whose sampler adds noise leave out predictions without the prompt, where a quality is
    asked; None where another node has a part in the guidance."""
    if run.target is None or steps > MOST_STEPS or not run.adds_noise or not _is_plain(guider):
        return None
    is_guided = guider.conds.get("negative") is not None and not math.isclose(guider.cfg, 1.0)
    if not is_guided or any(model_options.get(name) for name in _ASKS_BOTH):
        return None
    return Guidance(lambda: guider.cfg, _changes(run, guider))


def _is_plain(guider: Any) -> bool:
    """Whether it combines predictions as core's CFGGuider does."""
    return getattr(type(guider), "predict_noise", None) is CFGGuider.predict_noise


def _conds(guider: Any) -> list[dict[str, Any]]:
    """Its prompts, positive, negative and any other."""
    return [cond for group in getattr(guider, "conds", {}).values() for cond in group or ()]


def _changes(run: DeepCacheRun, guider: Any) -> list[float]:
    """The noise levels, as angles, at which what the model is asked becomes another."""
    return [angle(float(level), run.is_flow) for cond in _conds(guider) for level in _levels_of_change(cond)]


def _levels_of_change(cond: dict[str, Any]) -> Iterator[float]:
    """The noise levels at which a prompt, its ControlNets or its hooks begin, end or change in strength."""
    yield from (cond[name] for name in ("timestep_start", "timestep_end") if cond.get(name) is not None)
    control = cond.get("control")
    while control is not None:
        yield from getattr(control, "timestep_range", None) or ()
        control = getattr(control, "previous_controlnet", None)
    for hook in getattr(cond.get("hooks"), "hooks", ()):
        yield from (keyframe.start_t for keyframe in hook.hook_keyframe.keyframes)


def _predict(executor: Any, model: Any, conds: list, x: torch.Tensor, timestep: Any, model_options: dict) -> Any:
    """Around the predictions with and without the prompt, and any that other nodes ask for."""
    run: DeepCacheRun | None = model_options.get("transformer_options", {}).get(KEY)
    if run is not None and run.leaves_controls_out:
        conds = postponed(conds, model_options)
    if run is None or run.guidance is None or len(conds) != 2 or None in conds:
        return executor(model, conds, x, timestep, model_options)

    def evaluate(both: bool) -> list[torch.Tensor]:
        return executor(model, conds if both else [conds[0], None], x, timestep, model_options)

    return run.guided(x.shape, evaluate, _must_raise)


def _stand_in_for_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `apply_model`, for models that run no wrappers themselves."""
    model = _uncompiled(executor.class_obj.diffusion_model)

    @torch.compiler.disable
    def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _cached(inner, model, args, kwargs, _names(type(model).forward)[1:])

    with substituted({model: call}, Order.CACHED):
        return executor(*args, **kwargs)


@torch.compiler.disable
def _call_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Around every call of the model's forward.

    Not for Dynamo: what `TorchCompileModel` traced on a full step would be wrong on a skipped one.
    """
    return _cached(executor, executor.class_obj, args, kwargs, _names(executor.original))


def _cached(call: Callable[..., Any], model: torch.nn.Module, args: tuple, kwargs: dict, names: Sequence[str]) -> Any:
    """One call of the model: skipped, full with its features stored, or plain. names: of the positional arguments."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    options = named.get("transformer_options") or {}
    run: DeepCacheRun | None = options.get(KEY)
    if run is not None:
        depth, adds_noise = run.settings.depth, run.adds_noise
        run = run.of(model, functools.partial(find_split, depth=depth, adds_noise=adds_noise))
    split = None if run is None else run.split
    x = args[0] if args else named.get("x")
    if type(x) is list and x and all(isinstance(part, torch.Tensor) for part in x):
        x = x[0]  # of several latents that are sampled together, the video's
    if split is not None and not isinstance(x, torch.Tensor):
        run.run_in_full(f"{type(model).__name__} takes several latents at once")

    def full() -> Any:
        given, named = _with_control(args, kwargs, names, _computed)
        return call(*given, **named)

    if split is None:
        return full()

    def skipped() -> Any:
        def withhold(control: Any) -> Any:
            return None if isinstance(control, LateControl) else split.withhold(control)

        kept, named = _with_control(args, kwargs, names, withhold)
        return call(*kept, **named)

    keys = _branches(run, x, options)
    capture: ModelCapture | None = options.get(CAPTURE)
    within = None if capture is None else capture.during
    return cached_call(run, split, keys, x, full, skipped, _must_raise, within, unrecorded_context())


def _computed(control: Any) -> Any:
    return control.computed if isinstance(control, LateControl) else control


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


def _branches(run: DeepCacheRun, x: torch.Tensor, options: dict[str, Any]) -> list[BranchKey] | None:
    window = options.get("context_window")
    if window is not None and not hasattr(window, "index_list"):
        return None
    frames: Hashable = None if window is None else tuple(window.index_list)
    animate_diff = options.get("ad_params") or {}
    if animate_diff.get("sub_idxs") is not None:
        frames = (frames, tuple(animate_diff["sub_idxs"]))
    variant = (frames, _replaced(options.get("patches_replace") or {}))
    return run.branches(x, options.get("uuids"), options.get("cond_or_uncond", ()), variant)


def _replaced(patches: dict[str, dict[Hashable, Any]]) -> frozenset[Hashable]:
    """The replaced blocks with the names of their replacements: guidance makes new functions for every call."""
    return frozenset(
        (kind, block, getattr(patch, "__qualname__", type(patch).__qualname__))
        for kind, blocks in patches.items()
        for block, patch in blocks.items()
    )


def _must_raise(error: Exception) -> bool:
    """Whether it is an interrupt, or out of memory, which core handles itself."""
    out_of_memory = comfy.model_management.OOM_EXCEPTION
    if out_of_memory is not Exception and isinstance(error, out_of_memory):
        return True
    return isinstance(error, INTERRUPTS)
