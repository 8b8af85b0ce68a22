"""Size arithmetic: snapping, fitting and padding, and when a VAE is compiled."""
