"""An upscaled model whose bank has no blocks yet."""

import pytest
from tiny import save_tiny_model

from upscalers.runs.upscale import upscale


@pytest.fixture(scope="session")
def upscaled(tmp_path_factory):
    """Return a folder with a `base`, and a model of it, `fresh`; nobody may change them."""
    folder = tmp_path_factory.mktemp("upscaled")
    options = {"sizes": [4, 2], "branching": 3}
    base = save_tiny_model("llama", folder / "base")
    upscale(base=base, method="hier-ffn", output=folder / "fresh", options=options, verify=False)
    return folder
