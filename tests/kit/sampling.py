"""Samplers written out, for tests of what is measured of a sampler."""

SCHEDULE = (14.6, 9.0, 6.0, 4.0, 2.7, 1.8, 1.2, 0.8, 0.6, 0.45, 0.4, 0.35)
"""It ends before the image: a last step to noise level 0 makes the latent of its prediction alone."""


def sampler(memory, levels=SCHEDULE):
    """One that takes, beside the newest prediction, `memory` earlier ones; without any it is Euler's."""

    def sample(predict, noise, latent):
        known = []
        for now, end in zip(levels, levels[1:], strict=False):
            known = [predict(latent, now), *known[:memory]]
            drawn = sum((-0.3) ** back * one for back, one in enumerate(known))
            latent = latent * end / now + (1 - end / now) * drawn / sum((-0.3) ** back for back in range(len(known)))
        return latent

    return sample


def heun(predict, noise, latent, levels=SCHEDULE):
    for now, end in zip(levels, levels[1:], strict=False):
        slope = (latent - predict(latent, now)) / now
        ahead = latent + slope * (end - now)
        if end:
            slope = (slope + (ahead - predict(ahead, end)) / end) / 2
        latent = latent + slope * (end - now)
    return latent


def ancestral(predict, noise, latent, levels=SCHEDULE):
    """Euler's steps to half of each level, and noise up to it again."""
    for now, end in zip(levels, levels[1:], strict=False):
        down = end / 2
        latent = (
            latent * down / now + (1 - down / now) * predict(latent, now) + (end**2 - down**2) ** 0.5 * noise(latent)
        )
    return latent
