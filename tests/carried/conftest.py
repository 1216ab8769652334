import pytest
from carried.made import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Checkpoints:
    """Folders of checkpoints by family and method."""
    return Checkpoints(tmp_path_factory.mktemp("carried"))
