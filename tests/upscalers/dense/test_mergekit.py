"""SOLAR and LLaMA-Pro are passthrough merges of one model: the bytes are those that mergekit wrote.

`mergekit_passthrough.json` holds checksums of what mergekit wrote; `mergekit_peer.py` says how.
"""

import json

import pytest

from tests.upscalers.dense.mergekit_peer import DTYPES, MERGES, RESULTS, checksum, write_base
from upscalers.runs.upscale import upscale

# The method of each merge, with its number of new layers.
METHODS = {"overlapping slices": ("solar", 4), "a zeroed copy after every third layer": ("llama-pro", 2)}


@pytest.fixture(params=DTYPES)
def peer(request, tmp_path):
    """The base in a dtype that mergekit was given, and its number of layers and checksum after each merge; None is the base."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
    sums = {row["merge"]: (row["num_hidden_layers"], row["sha256"]) for row in rows if row["dtype"] == request.param}
    base = write_base(tmp_path / "base", request.param)
    assert checksum(base) == sums[None][1]
    return base, sums


@pytest.mark.parametrize("merge", MERGES)
def test_solar_and_llama_pro_give_what_mergekits_passthrough_gives(merge, peer, tmp_path):
    base, sums = peer
    method, num_new_layers = METHODS[merge]
    report = upscale(base=base, method=method, num_new_layers=num_new_layers, output=tmp_path / "out")
    assert (report.num_layers, checksum(tmp_path / "out")) == sums[merge]
