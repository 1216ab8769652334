"""Sliding and full attention: every layer of the result attends like the layer that it comes from."""

import pytest
from tiny import WINDOW

from tests.upscalers.checkpoints import config_of, save_base
from tests.upscalers.dense.requests import FUSING, planned, tiny_config, upscaled, upscaled_config
from tests.upscalers.solvers.recording import Recorder
from upscalers.request.errors import RequestError

S, F = "sliding_attention", "full_attention"

# Bases of six layers, with the types that transformers would derive from their other values.
BASES = {
    "gemma3": {"num_hidden_layers": 6, "layer_types": [S, S, F, S, S, F]},
    "gemma2": {"num_hidden_layers": 6, "layer_types": [S, F, S, F, S, F]},
    "qwen2": {"num_hidden_layers": 6, "max_window_layers": 3, "layer_types": [F, F, F, S, S, S]},
    "qwen3": {
        "num_hidden_layers": 6,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 3,
        "layer_types": [F, F, F, S, S, S],
    },
}
# What older files say instead of listing the types.
DERIVED_FROM = {"gemma3": {"sliding_window_pattern": 3}}

SLICES = {"slices": [{"layers": [2, 6]}, {"layers": [1, 2], "scale": {"up": 2.0}}, {"layers": [0, 2]}]}
TABLES = {
    ("gemma3", "solar"): [S, S, F, S, S, S, F, S, S, F],
    ("gemma3", "llama-pro"): [S, S, S, F, S, S, S, F, F, F],
    ("gemma3", "avg-deus"): [S, S, F, F, S, S, S, S, F, F],
    ("gemma3", "slices"): [F, S, S, F, S, S, S],
    ("gemma2", "solar"): [S, F, S, F, S, F, S, F, S, F],
    ("gemma2", "llama-pro"): [S, F, F, S, F, F, S, F, F, F],
    ("gemma2", "avg-deus"): [S, F, S, S, F, F, S, S, F, F],
    ("gemma2", "slices"): [S, F, S, F, F, S, F],
    ("qwen2", "solar"): [F, F, F, S, S, F, F, S, S, S],
    ("qwen2", "llama-pro"): [F, F, F, F, S, S, S, S, S, S],
    ("qwen2", "avg-deus"): [F, F, F, F, S, S, S, S, S, S],
    ("qwen2", "slices"): [F, S, S, S, F, F, F],
}
TABLES |= {("qwen3", method): types for (family, method), types in TABLES.items() if family == "qwen2"}
"""Types of the results of: solar with 4 new layers, llama-pro at 2,5,8,9, avg-deus at 2,4,6,8 and SLICES."""
REQUESTS = {
    "solar": {"num_new_layers": 4},
    "llama-pro": {"placement": "2,5,8,9"},
    "avg-deus": {"placement": "2,4,6,8"},
    "slices": {"options": SLICES},
}


def saved_types(folder):
    return config_of(folder)["layer_types"]


@pytest.mark.parametrize("implied", [False, True])
@pytest.mark.parametrize(("family", "method"), TABLES)
def test_the_config_lists_the_type_of_every_layer_also_where_the_base_only_implies_it(family, method, implied):
    config = tiny_config(family, **BASES[family])
    if implied:
        del config["layer_types"]
        config |= DERIVED_FROM.get(family, {})
    assert upscaled_config(config, method, **REQUESTS[method])["layer_types"] == TABLES[family, method]


def test_a_neighbour_of_the_same_type_is_looked_for_among_the_layers_before_where_there_are_types():
    config = tiny_config("gemma3", **BASES["gemma3"])
    plan = planned(config, "avg-deus", None, "3,5,7", neighbours="same_type")
    assert [plan.layers[index].sources for index in plan.new_indices] == [(3, 1), (4, 3), (5, 2)]
    request = {"placement": "3,5,7", "options": {"neighbours": "same_type"}}
    assert upscaled_config(config, "avg-deus", **request)["layer_types"] == [S, S, F, S, S, S, S, F, F]
    plan = planned(tiny_config("llama", num_hidden_layers=6), "avg-deus", 3, neighbours="same_type")
    assert [plan.layers[index].sources for index in plan.new_indices] == [(3, 2), (4, 3), (5, 4)]


REMEDIES = dict.fromkeys((*FUSING, "lesa", "opt-deus"), "Pass neighbours=same_type to avoid it.")
REMEDIES["linear-combination"] = "Name layers of one type in coefficients."


@pytest.mark.parametrize("method", REMEDIES)
@pytest.mark.parametrize(
    ("placement", "told"),
    [("3,5,7", "new layers 3, 7 fuse"), ("4,6", "new layer 6 fuses"), ("1,5", None)],
)
def test_fusing_both_types_is_warned_of_and_refused_when_strict(method, placement, told, tmp_path):
    base = save_base(tmp_path / "base", "gemma3", **BASES["gemma3"])

    def warnings(**options) -> list[str]:
        progress = Recorder()
        upscaled(base, None, method, placement=placement, options=options, progress=progress, dry_run=True)
        return [warning for warning in progress.warnings if " fuse" in warning]

    if told is None:
        assert warnings(strict=True) == []
        return
    message = f"{told} sliding and full attention, whose rotary embeddings and windows may differ. {REMEDIES[method]}"
    assert warnings() == [message]
    with pytest.raises(RequestError) as refusal:
        warnings(strict=True)
    assert str(refusal.value) == f"{message} It is an error since strict is set."
    if method != "linear-combination" and placement == "3,5,7":
        assert warnings(strict=True, neighbours="same_type") == []
