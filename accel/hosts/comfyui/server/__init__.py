"""ComfyUI's server: routes, panel, report, settings."""
