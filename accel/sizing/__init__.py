"""Sizes: snapping, fitting and padding, and when to compile a VAE."""
