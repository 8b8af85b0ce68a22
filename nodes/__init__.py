"""The pack's nodes, and the extension that registers them."""

from comfy_api.latest import ComfyExtension, io

from .accelerate_model import AccelModel
from .clear_cache import AccelClearGraphCache
from .controlnet import AccelControlNet
from .deep_cache import AccelDeepCache
from .report import AccelReport
from .resolution import AccelResolutionRestore, AccelResolutionSnap
from .speed_up import AccelSpeedUp
from .text_encoder import AccelTextEncoder
from .vae import AccelVAESkipCompile
from .warm_up import AccelWarmUpGraphs

NODES: list[type[io.ComfyNode]] = [
    AccelSpeedUp,
    AccelModel,
    AccelDeepCache,
    AccelControlNet,
    AccelTextEncoder,
    AccelVAESkipCompile,
    AccelResolutionSnap,
    AccelResolutionRestore,
    AccelWarmUpGraphs,
    AccelClearGraphCache,
    AccelReport,
]


class AccelExtension(ComfyExtension):
    """The extension that ComfyUI loads: the nodes and, on a running server, the routes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        from ..accel.hosts.comfyui.server import routes

        routes.register()
        return NODES
