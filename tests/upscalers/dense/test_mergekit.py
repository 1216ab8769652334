"""mergekit's passthrough merges of one model are slices here, and SOLAR and LLaMA-Pro among them: the same bytes.

`mergekit_passthrough.json` holds checksums of what mergekit wrote; `mergekit_peer.py` says how.
"""

import json

import pytest

from tests.upscalers.dense.mergekit_peer import DTYPES, MERGES, RESULTS, checksum, write_base
from upscalers.runs.upscale import upscale

ROLES = {"q_proj": "query", "k_proj": "key", "o_proj": "output_projection", "up_proj": "up", "down_proj": "down"}

# The merges that have a method of their own.
BY_NAME = {
    "overlapping slices": {"method": "solar", "num_new_layers": 4},
    "a zeroed copy after every third layer": {"method": "llama-pro", "num_new_layers": 2},
    "an attenuated copy after every third layer": {
        "method": "attenuated-copy",
        "num_new_layers": 2,
        "options": {"scale": {"output_projection": 0.7071, "down": 0.7071, "query": 0.8409, "key": 0.8409}},
    },
}


@pytest.fixture(params=DTYPES)
def peer(request, tmp_path):
    """The base in a dtype that mergekit was given, and its number of layers and checksum after each merge; None is the base."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
    sums = {row["merge"]: (row["num_hidden_layers"], row["sha256"]) for row in rows if row["dtype"] == request.param}
    base = write_base(tmp_path / "base", request.param)
    assert checksum(base) == sums[None][1]
    return base, sums


@pytest.mark.parametrize("merge", MERGES)
def test_slices_give_what_mergekits_passthrough_gives(merge, peer, tmp_path):
    base, sums = peer
    slices = [
        {"layers": [first, end], "scale": {ROLES[name]: factor for name, factor in factors.items()}}
        for first, end, factors in MERGES[merge]
    ]
    report = upscale(base=base, method="slices", output=tmp_path / "out", options={"slices": slices})
    assert (report.num_layers, checksum(tmp_path / "out")) == sums[merge]


@pytest.mark.parametrize("merge", BY_NAME)
def test_solar_llama_pro_and_attenuated_copies_are_those_merges(merge, peer, tmp_path):
    base, sums = peer
    report = upscale(base=base, output=tmp_path / "out", **BY_NAME[merge])
    assert (report.num_layers, checksum(tmp_path / "out")) == sums[merge]
