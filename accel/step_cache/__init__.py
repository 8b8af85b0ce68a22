"""DeepCache: which sampling steps run in full, and what the others reuse."""
