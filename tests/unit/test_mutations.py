"""The defects of tests/mutations.py still fit the source; whether they are caught, that script finds out."""

import mutations
import pytest


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_fits_the_source_once_and_its_test_is_there(mutation):
    path = mutations.the_file(mutations.ROOT, mutation)
    text = path.read_text(encoding="utf-8").replace(mutation.before, mutation.after)
    if path.suffix == ".py":
        compile(text, str(path), "exec")
    file, _, name = mutation.test.partition("::")
    tests = (mutations.ROOT / "tests" / file).read_text(encoding="utf-8")
    assert f"def {name}(" in tests, f"mutation {mutation.name!r} names a test that is not there: {mutation.test}"
