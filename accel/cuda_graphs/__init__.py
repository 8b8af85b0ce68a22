"""Whole model calls captured as CUDA graphs and replayed."""
