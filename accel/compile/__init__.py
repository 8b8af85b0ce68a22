"""Compiles a block into a graph, given an example of a call."""
