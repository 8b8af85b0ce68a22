"""Models whose weights core streams, on the stand-in for comfy-aimdo: compiled blocks are right and stay compiled."""

import random

import pytest
import streamed_weights_kit as kit
import torch

pytestmark = pytest.mark.skipif(kit.why_not() is not None, reason=str(kit.why_not()))


def test_stand_in_streams_right_weights_to_eager_calls_and_poisons_those_that_are_gone():
    from tiny_dits import DITS

    dit = DITS["Flux"]
    plain = dit.sample(dit.load())
    with kit.streaming() as card:
        model, rng = card.streamed(dit.load()), random.Random(0)
        for _ in range(6):
            assert torch.equal(dit.sample(model, steps=1), dit.sample(dit.load(), steps=1))
            card.shake(rng)
        assert torch.equal(dit.sample(model), plain)
        assert card.pins == 0 and card.misses and card.casts and card.peak
        weights = next(part for part in model.model.modules() if hasattr(part, "_v_weight"))
        assert weights._v_weight.isfinite().all()
        card.vbars[0].free_memory(1 << 40)
        assert weights._v_weight.isnan().all()
