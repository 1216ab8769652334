from functools import partial

import pytest
from carried.example_checkpoints import checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> partial:
    return partial(checkpoint, tmp_path_factory.mktemp("carried"))
