"""Compiles graphs in a process beside the one that makes images."""
