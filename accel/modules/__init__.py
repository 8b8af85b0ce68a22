"""The module tree: finding parts of a model, standing in for them during a call, noticing that it changed."""
