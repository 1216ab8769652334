"""mergekit's passthrough merges of one model are slices here, and SOLAR and LLaMA-Pro among them: the same bytes.

`mergekit_passthrough.json` holds checksums of what mergekit wrote; `mergekit_peer.py` says how. In all of its outputs the
embedding, the final norm and the head are the base's, once.
"""

import json

import pytest

from tests.upscalers.dense.mergekit_peer import DTYPES, MERGES, RESULTS, checksums, write_base
from upscalers.runs.upscale import upscale

ROLES = {"q_proj": "query", "k_proj": "key", "o_proj": "output_projection", "up_proj": "up", "down_proj": "down"}
OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
PEER = json.loads(RESULTS.read_text(encoding="utf-8"))

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


def of_peer(merge: str | None, dtype: str) -> dict:
    """The peer's row for a merge, or for the base itself."""
    (row,) = (row for row in PEER["results"] if (row["merge"], row["dtype"]) == (merge, dtype))
    return row


@pytest.fixture(params=DTYPES)
def peer_base(request, tmp_path):
    """A dtype, and the base in it that mergekit was given."""
    return request.param, write_base(tmp_path / "base", request.param)


@pytest.mark.parametrize("merge", MERGES)
def test_slices_give_what_mergekits_passthrough_gives(merge, peer_base, tmp_path):
    dtype, base = peer_base
    slices = [
        {"layers": [first, end], "scale": {ROLES[name]: factor for name, factor in factors.items()}}
        for first, end, factors in MERGES[merge]
    ]
    report = upscale(base=base, method="slices", output=tmp_path / "out", options={"slices": slices})
    peer = of_peer(merge, dtype)
    assert report.num_layers == peer["num_hidden_layers"]
    assert checksums(tmp_path / "out") == peer["checksums"]


@pytest.mark.parametrize("merge", BY_NAME)
def test_solar_llama_pro_and_attenuated_copies_are_those_merges(merge, peer_base, tmp_path):
    dtype, base = peer_base
    upscale(base=base, output=tmp_path / "out", **BY_NAME[merge])
    assert checksums(tmp_path / "out") == of_peer(merge, dtype)["checksums"]


def test_the_base_is_the_one_that_mergekit_was_given(peer_base):
    dtype, base = peer_base
    assert checksums(base) == of_peer(None, dtype)["checksums"]


@pytest.mark.parametrize("merge", MERGES)
def test_mergekit_takes_embedding_final_norm_and_head_once_as_they_are(merge, peer_base):
    dtype, base = peer_base
    found, expected = of_peer(merge, dtype)["checksums"], checksums(base)
    assert {name: value for name, value in found.items() if ".layers." not in name} == {
        name: expected[name] for name in OUTER
    }
