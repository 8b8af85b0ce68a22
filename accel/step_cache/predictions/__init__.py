"""What is predicted in place of skipped work: features, guidance, and what the sampler's latent lacks."""
