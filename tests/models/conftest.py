"""Models of the table of cases, each made once a session; tests that change one make their own."""

from functools import cache

import pytest
from models.cases import CASES


@pytest.fixture(scope="session")
def shared_model(tmp_path_factory):
    """Make the model of a case by its name, in eval mode; no test may change it."""

    @cache
    def make(case, family="llama", dtype=None, *, acting=True, attention=None):
        model = CASES[case].model(family, tmp_path_factory.mktemp("shared"), dtype, acting=acting)
        if attention:
            model.set_attn_implementation(attention)
        return model

    return make


@pytest.fixture
def read(native_family, shared_model):
    """Return a case, its model that acts, and what a pass takes in addition to two rows of tokens."""
    return lambda case, *how: (CASES[case], shared_model(case, native_family, *how), CASES[case].given())
