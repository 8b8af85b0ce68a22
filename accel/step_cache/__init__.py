"""DeepCache: which sampling steps call the model, and what stands for its prediction in the others."""
