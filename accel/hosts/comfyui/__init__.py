"""ComfyUI as a host: model patchers, VAE objects, versions, routes."""
