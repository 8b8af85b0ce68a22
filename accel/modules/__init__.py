"""The module tree: finding blocks, layers in front of modules during a call, and snapshots that show changes."""
