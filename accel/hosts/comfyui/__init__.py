"""ComfyUI as a host: model patchers, VAE objects, versions, routes."""

from . import words  # noqa: F401  # puts its sentences into force
