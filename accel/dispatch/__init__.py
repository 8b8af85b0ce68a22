"""From a block's call to its graph."""
