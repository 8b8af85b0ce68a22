"""Sizes of ComfyUI's models, latents and images."""
