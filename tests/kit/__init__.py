"""Tiny models and a made-up device, for tests and measurements. `tests` is on the path of both."""
