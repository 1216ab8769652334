"""Sliding and full attention: every layer of the result attends like the layer that it comes from."""

import pytest
import torch
from pairs import in_turn
from tiny import WINDOW, prompt

from tests.upscalers.checkpoints import config_of, edit_config, load, logits, read_tensors, save_base
from tests.upscalers.dense.layers import layer
from tests.upscalers.dense.requests import FUSING, planned, upscaled
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


@pytest.fixture(params=BASES)
def mixed(request, tmp_path):
    """A family and a base of it with both kinds of layers."""
    return request.param, save_base(tmp_path / "base", request.param, **BASES[request.param])


@pytest.mark.parametrize("implied", [False, True])
@pytest.mark.parametrize("method", REQUESTS)
def test_the_saved_config_lists_the_type_of_every_layer_also_where_the_base_only_implies_it(
    mixed, method, implied, tmp_path
):
    family, base = mixed
    if implied:
        edit_config(base, layer_types=..., **DERIVED_FROM.get(family, {}))
    upscaled(base, tmp_path / "out", method, **REQUESTS[method])
    assert saved_types(tmp_path / "out") == TABLES[family, method]


@pytest.mark.parametrize(
    ("mixed", "placement"), in_turn(BASES, ["llama-pro", "2,5,8,9", "0,3", "6"]), indirect=["mixed"]
)
def test_base_layers_keep_their_type_so_that_identity_holds_beyond_the_window(mixed, placement, tmp_path):
    _, base = mixed
    upscaled(base, tmp_path / "out", "llama-pro", placement=placement)
    tokens = prompt(4 * WINDOW)
    old, new = load(base), load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(old(tokens).logits, new(tokens).logits)
    texts = [model.generate(tokens, max_new_tokens=WINDOW, do_sample=False) for model in (old, new)]
    assert torch.equal(*texts)


def test_types_derived_from_the_index_would_have_changed_the_model(tmp_path):
    base = save_base(tmp_path / "base", "gemma3", **BASES["gemma3"])
    upscaled(base, tmp_path / "out", "llama-pro", placement="2,5,8,9")
    edit_config(tmp_path / "out", layer_types=..., sliding_window_pattern=3)
    assert not torch.allclose(logits(base), logits(tmp_path / "out"), atol=1e-3)


def test_a_layer_of_solar_attends_like_its_source(tmp_path):
    base = save_base(tmp_path / "base", "gemma3", **BASES["gemma3"])
    upscaled(base, tmp_path / "out", "solar", num_new_layers=4)
    model, source = load(tmp_path / "out").model, load(base).model
    for index, origin in enumerate([0, 1, 2, 3, 4, 1, 2, 3, 4, 5]):
        attention, original = model.layers[index].self_attn, source.layers[origin].self_attn
        assert (attention.layer_type, attention.sliding_window) == (original.layer_type, original.sliding_window)
        assert attention.layer_idx == index


def test_a_neighbour_of_the_same_type_is_looked_for_among_the_layers_before(tmp_path):
    base = save_base(tmp_path / "base", "gemma3", **BASES["gemma3"])
    options = {"neighbours": "same_type"}
    upscaled(base, tmp_path / "out", "avg-deus", placement="3,5,7", options=options)
    entry = load(tmp_path / "out").config.upscale
    assert [layer["sources"] for layer in entry["plan"] if "sources" in layer] == [[3, 1], [4, 3], [5, 2]]
    assert saved_types(tmp_path / "out") == [S, S, F, S, S, S, S, F, F]
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for name, tensor in layer(new, 7).items():
        assert torch.equal(tensor, (layer(old, 5)[name] + layer(old, 2)[name]) / 2)


def test_only_the_layers_before_are_searched_and_without_types_there_is_nothing_to_search(tmp_path):
    base = save_base(tmp_path / "base", "gemma3", **BASES["gemma3"])
    with pytest.raises(
        RequestError,
        match=r"new layer 2 stands before base layer 2 \(full_attention\), and no layer before it attends like it; expected "
        "one, since neighbours is 'same_type'. Choose another placement, or neighbours=adjacent.",
    ):
        upscaled(base, tmp_path / "out", "avg-deus", placement="2", options={"neighbours": "same_type"})
    assert not (tmp_path / "out").exists()
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 6,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    for neighbours in ("adjacent", "same_type"):
        plan = planned(llama, "avg-deus", 3, neighbours=neighbours)
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
