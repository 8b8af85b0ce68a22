"""Where a model of any architecture is split: UNets in two layouts, and transformers."""
