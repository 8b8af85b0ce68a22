"""The names under which graphs of two small models would be saved, for tests that compare processes."""

from comfy_accel.accel.cache.graph_cache import GraphCache, NoGraph
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.store.key import key_digest

from kit import families, tiny_models


class Asked:
    """A store that has nothing, nor lets anything be compiled, and keeps what it is asked for."""

    def __init__(self):
        self.digests = set()

    def candidates(self, key, name, devices, values, *_):
        self.digests.add(f"{name} {key_digest(key, values)}")
        raise NoGraph(key, Reason("interrupted"))


def asked(model, *samples) -> list[list[str]]:
    told = []
    for sample in samples:
        cache = GraphCache()
        cache.store = Asked()
        sample(accelerate(model, CompileSettings(), cache))
        told.append(sorted(cache.store.digests))
    return told


def asked_keys() -> list[list[list[str]]]:
    """Of each model, what is asked for at a small size, and at a large one with a batch."""
    flux = families.DITS["Flux"]
    return [
        asked(
            tiny_models.small_unet(),
            lambda model: tiny_models.sample(model, 64, 64, steps=1),
            lambda model: tiny_models.sample(model, 96, 72, batch=3, tokens=154, steps=1),
        ),
        asked(
            flux.load(), lambda model: flux.sample(model, 0, steps=1), lambda model: flux.sample(model, 1, 2, steps=1)
        ),
    ]
