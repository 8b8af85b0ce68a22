"""From a block and an example of a call to a compiled graph."""
