"""How a call is described, and how a later one like it is recognised."""
