"""How a call is described, how a later one like it is recognised, and whether two gave the same."""
