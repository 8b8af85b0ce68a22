"""DeepCache in ComfyUI: wrappers on a clone of the model, and a DeepCacheRun for every sampler run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrappersMP

from ....core.errors import one_line
from ....core.events import emit, log
from ....report.facts import make_skip_fact
from ....report.run import Skipping
from ....step_cache.config import DeepCacheSettings
from ....step_cache.noise_levels import angle
from ....step_cache.run import DeepCacheRun
from ..running_prompt import find_upstream_node
from ..versions import put_wrappers
from ..words import add_advice
from .options import CORE_CACHE, WARMS_UP
from .options import SKIPS as KEY
from .run_events import note_sampling, run_events
from .samplers import NoiseLevels, facts_of, follows_schedule

_SKIPPERS = {
    CORE_CACHE: "EasyCache or LazyCache",
    **dict.fromkeys(("cache_dit_turbo", "ltx2_cache", "wan_cache"), "CacheDiT"),
    "spectrum": "Spectrum",
}
"""Key in `transformer_options` → what skips steps itself, by wrappers around the model that do not show it."""

_POST_CFG, _PARTS = "sampler_post_cfg_function", ("cond_denoised", "uncond_denoised")


def apply_deep_cache(
    model_patcher: Any, settings: DeepCacheSettings, made_by: str | None = None, **choices: Any
) -> Any:
    """A clone of the ModelPatcher that samples with DeepCache by these settings, in place of earlier ones. made_by: the
    class of the node that shows what was skipped; choices: its inputs, which tell it from others of that class."""
    clone = model_patcher.clone()
    wrappers: dict[Any, Callable[..., Any]] = {
        WrappersMP.OUTER_SAMPLE: _wrap_sampling(settings, made_by, choices),
        WrappersMP.SAMPLER_SAMPLE: _begin_sampling,
        WrappersMP.PREDICT_NOISE: _evaluate,
    }
    put_wrappers(clone, KEY, {} if settings.is_off else wrappers)
    return clone


def _wrap_sampling(settings: DeepCacheSettings, made_by: str | None, choices: dict[str, Any]) -> Callable[..., Any]:
    def sample_in_run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        """OUTER_SAMPLE wrapper: one run, from loading the model to its last step."""
        mask = args[4] if len(args) > 4 else kwargs.get("denoise_mask")
        sampling = _Sampling(settings, args[2] if len(args) > 2 else None, mask is not None)
        node_id = find_upstream_node(made_by, "MODEL", **choices)
        with run_events(executor, args, KEY, caching={**asdict(settings), "node": node_id}) as options:
            options[KEY] = sampling
            try:
                out = executor(*sampling.wrap_callback(args), **kwargs)
                sampling.is_quiet = bool(options.get(WARMS_UP))
                return out
            finally:
                sampling.end()

    return sample_in_run


class _Sampling:
    """One call of a sampler, and its run. is_masked: whether masked places take other ways to the latent."""

    def __init__(self, settings: DeepCacheSettings, sampler: Any, is_masked: bool):
        self._settings, self._sampler, self._is_masked = settings, sampler, is_masked
        self.levels: NoiseLevels | None = None
        self.run: DeepCacheRun | None = None
        self.functions = 0  # how many functions after guidance are not the sampler's
        self.seen: dict[str, Any] = {}
        """What the sampler's functions after guidance were called with in the last full evaluation."""
        self.is_quiet = True  # whether the log says nothing: a run that was stopped has few steps, which say little

    def begin(self, guider: Any, schedule: torch.Tensor, model_options: dict[str, Any]) -> None:
        """Make the run, when the guider has its model and the sampler its schedule."""
        patcher, settings = guider.model_patcher, self._settings
        of_model = patcher.get_model_object("model_sampling")
        self.functions = len(model_options.get(_POST_CFG) or ())
        is_flow, levels = isinstance(of_model, CONST), schedule.tolist()
        self.levels = NoiseLevels(follows_schedule(self._sampler, patcher.load_device))
        facts = facts_of(self._sampler, guider, levels, is_flow)
        conds = [cond for group in getattr(guider, "conds", {}).values() for cond in group or ()]
        percents = settings.start_percent, settings.end_percent
        self.run = DeepCacheRun(
            settings,
            replace(facts, response=None) if self._is_masked else facts,
            window=tuple(float(of_model.percent_to_sigma(percent)) for percent in percents),
            changes=[angle(float(level), is_flow) for cond in conds for level in _find_levels_of_change(cond)],
            why_full=_find_other_skipper(model_options),
        )

    def wrap_callback(self, args: tuple) -> tuple:
        """The sampling's arguments, with a callback that gets predictions without what the latent needs added."""
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
                # Some packs change it in place, for the sampler to go on with.
                denoised.copy_(torch.where(shown == prediction, denoised, denoised + (shown - prediction)))

        return (*args[:5], show, *args[6:])

    def end(self) -> None:
        """Emit and log what the run came to, and drop it."""
        run, self.run = self.run, None
        skipping = Skipping(target_db=self._settings.quality) if run is None else Skipping.from_lease(run)
        is_unknown = not skipping.steps_taken and skipping.why_full is None
        if is_unknown:
            skipping = replace(skipping, why_full="another node or its sampler calls the model in a way of its own")
        emit("deep_cache_run", skipping=skipping, began=() if run is None else run.began)
        if skipping.steps_taken and not self.is_quiet:
            sampler = getattr(getattr(self._sampler, "sampler_function", None), "__name__", "").removeprefix("sample_")
            log.info("%s", add_advice(make_skip_fact(skipping), sampler))
        elif is_unknown and not self.is_quiet:
            log.warning("DeepCache: %s; every step ran in full.", skipping.why_full)
        if run is not None:
            run.close()


def _begin_sampling(executor: Any, guider: Any, sigmas: Any, extra_args: dict, *args: Any, **kwargs: Any) -> Any:
    """SAMPLER_SAMPLE wrapper: makes the run. The sampler is measured here and not within it: it may keep a state."""
    options = extra_args.get("model_options", {})
    sampling: _Sampling | None = options.get("transformer_options", {}).get(KEY)
    if sampling is not None:
        try:
            sampling.begin(guider, sigmas, options)
        except Exception as error:  # a guider or a prompt of another pack, laid out in a way of its own
            log.warning("DeepCache: this run cannot be read (%s); every step runs in full.", one_line(error))
    return note_sampling(executor, guider, sigmas, extra_args, *args, **kwargs)


def _evaluate(executor: Any, x: Any, timestep: Any, model_options: dict | None = None, seed: Any = None) -> Any:
    """PREDICT_NOISE wrapper: one evaluation, and the one place that reads sigmas, which may wait for the GPU."""
    model_options = {} if model_options is None else model_options
    sampling: _Sampling | None = model_options.get("transformer_options", {}).get(KEY)
    if sampling is None or sampling.run is None:
        return executor(x, timestep, model_options, seed)
    run = sampling.run
    level = sampling.levels.read(torch.as_tensor(timestep), run.facts.levels)
    run.begin(level, getattr(executor.class_obj, "cfg", None))
    if len(model_options.get(_POST_CFG) or ()) > sampling.functions:
        return _evaluate_by_parts(executor, sampling, x, timestep, model_options, seed)
    given = run.forecast(x)
    return run.end(x, executor(x, timestep, model_options, seed)) if given is None else given


def _evaluate_by_parts(
    executor: Any, sampling: _Sampling, x: Any, timestep: Any, model_options: dict[str, Any], seed: Any
) -> Any:
    """One evaluation for CFG++ samplers, which get the predictions with and without the prompt too."""
    run, functions, seen = sampling.run, model_options[_POST_CFG], {}

    def see(given: dict[str, Any]) -> Any:
        seen.update(given)
        return given["denoised"]

    given = run.forecast(x) if run.has_parts else None
    if given is None:
        prediction = executor(x, timestep, {**model_options, _POST_CFG: [*functions, see]}, seed)
        parts = [seen[name] for name in _PARTS if isinstance(seen.get(name), torch.Tensor)]
        if len(parts) < len(_PARTS):
            run.run_in_full("the guider does not tell what this sampler goes by")
            return prediction
        sampling.seen = seen
        return run.end(x, prediction, parts)
    foretold = zip(_PARTS, run.forecast_parts(x), strict=True)
    args = {**sampling.seen, **dict(foretold), "denoised": given, "sigma": timestep, "input": x}
    for function in functions[sampling.functions :]:
        args["denoised"] = function(args)
    return args["denoised"]


def _find_other_skipper(model_options: dict[str, Any]) -> str | None:
    """Why nothing may be skipped: what else takes part in the model's calls, and may skip some of its own."""
    of_call = model_options.get("transformer_options", {})
    name = next((name for key, name in _SKIPPERS.items() if key in of_call), None)
    if name is not None:
        return f"{name} skips steps of its own (use one of the two)"
    wrapper = model_options.get("model_function_wrapper")
    if wrapper is not None:
        # Core names a pack's modules by its folder's path; some packs import theirs by the folder of all packs.
        module = (getattr(wrapper, "__module__", None) or type(wrapper).__module__).removeprefix("custom_nodes.")
        pack = os.path.basename(module.split(".")[0])
        return f"another node ({pack}) makes the model's calls, and may skip some itself (use one of the two)"
    return None


def _find_levels_of_change(cond: dict[str, Any]) -> Iterator[float]:
    """The noise levels at which a prompt, its ControlNets or its hooks begin, end or change in strength."""
    yield from (cond[name] for name in ("timestep_start", "timestep_end") if cond.get(name) is not None)
    control = cond.get("control")
    while control is not None:
        yield from getattr(control, "timestep_range", None) or ()
        control = getattr(control, "previous_controlnet", None)
    for hook in getattr(cond.get("hooks"), "hooks", ()):
        yield from (keyframe.start_t for keyframe in hook.hook_keyframe.keyframes)
