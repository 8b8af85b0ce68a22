"""How a call is described, and recognised when it comes again."""
