"""Diffusion model classes of core, made tiny: which blocks are found. test_models.py compiles and samples them."""

import pytest
from comfy_accel.accel.fingerprint import module_files
from comfy_accel.accel.fingerprint.survey import survey
from kit.zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_all_blocks_of_a_model_are_found_and_can_be_saved(name):
    specimen = ZOO[name]
    found = survey(specimen.build())
    assert (len(found.regions), len(found.kinds)) == (specimen.blocks, specimen.kinds), found.left_eager
    for kind in found.kinds:
        assert kind.opaque == frozenset() and module_files.digest(kind.sources - {""})
