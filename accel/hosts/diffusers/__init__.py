"""Diffusers as a host: pipelines."""
