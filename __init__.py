"""ComfyUI's way in: the extension it asks for, and the folder whose pages it serves."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """The extension with this pack's nodes; imported here so that tools can import the package without ComfyUI."""
    from .nodes import AccelExtension

    return AccelExtension()
