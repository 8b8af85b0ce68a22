"""Sizes in pixels, and the nearest one that a model supports."""
