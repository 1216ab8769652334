"""New layers in whole periods of the attention pattern: every layer has the type that its index implies."""

import json
from typing import Any

import pytest
import torch
from tiny import WINDOW
from transformers import AutoConfig

from tests.upscalers.checkpoints import SMALL, config_of, edit_config, file_digests, logits, recipe_of, save_base
from tests.upscalers.dense.requests import planned, settings, tiny_config, upscaled, upscaled_config
from upscalers.request.errors import RequestError
from upscalers.runs.upscale import upscale

F, S = "full_attention", "sliding_attention"

# Bases small enough to run, whose last period is cut short: family and changes of its config.
TINY = {
    "gemma2": ("gemma2", {"num_hidden_layers": 5}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "sliding_window_pattern": 3}),
}
QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3, "num_hidden_layers": 6}


def family_config(family: str, **changes: Any) -> dict[str, Any]:
    """A raw config as transformers saves it, its types listed."""
    return json.loads(json.dumps(tiny_config(family, **changes)))


def result(config: dict[str, Any], method: str, number: int | None = None, placement: str = "whole-periods") -> Any:
    """The raw config of the upscaled model."""
    return upscaled_config(config, method, number, placement, SMALL.get(method, {}))


def derived_types(config: dict[str, Any], model_type: str) -> list[str]:
    """The types that the family's config class derives from the index, when it is not told them."""
    fields = {
        key: value for key, value in config.items() if key not in ("layer_types", "model_type", "memory", "upscale")
    }
    return AutoConfig.for_model(model_type, **fields).layer_types


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "implied"])
@pytest.mark.parametrize("method", ["llama-pro", "midus-hml"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"num_hidden_layers": 13}),
        ("gemma3", {"num_hidden_layers": 26, "sliding_window_pattern": 6}),
        ("qwen2", QWEN),
        ("qwen3", QWEN),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 28}),
    ],
    ids=str,
)
def test_the_config_class_derives_the_types_that_are_listed(family, changes, method, listed):
    config = family_config(family, **changes)
    if not listed:
        del config["layer_types"]
    number = None
    while True:
        try:
            made = result(config, method, number)
        except RequestError as error:
            assert number is not None and "needs a multiple" in str(error)
            break
        assert made["layer_types"] == derived_types(made, config["model_type"])
        assert len(made["layer_types"]) == made["num_hidden_layers"] > config["num_hidden_layers"]
        number = 1 if number is None else number + made["num_hidden_layers"]
    assert derived_types(config, config["model_type"]) == family_config(family, **changes)["layer_types"]


@pytest.mark.parametrize("placement", ["distributed", "bottom-heavy", "2,3,4"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_begins_at_a_layer_follows_wherever_layers_are_inserted(family, placement):
    made = result(family_config(family, **QWEN), "llama-pro", None, placement)
    assert made["layer_types"] == derived_types(made, family)
    assert made["max_window_layers"] == made["layer_types"].index(S)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("method", ["llama-pro", "midus-hml"])
def test_identity_holds_and_a_runtime_that_goes_by_the_index_agrees(family, method, tmp_path):
    name, changes = TINY[family]
    base = save_base(tmp_path / "base", name, **changes)
    request = {"placement": "whole-periods", "options": SMALL.get(method, {})}
    upscale(base=base, method=method, output=tmp_path / "out", **request)
    expected = logits(base)
    assert torch.equal(expected, logits(tmp_path / "out"))
    edit_config(tmp_path / "out", layer_types=...)
    assert torch.equal(expected, logits(tmp_path / "out"))


# Base layers that the six new ones of a base of twelve are made from; its pattern has a period of three.
SOURCES = {
    "llama-pro": [(0,), (1,), (2,), (6,), (7,), (8,)],
    "attenuated-copy": [(0,), (1,), (2,), (6,), (7,), (8,)],
    "midus-hml": [(3,), (4,), (5,), (9,), (10,), (11,)],
    "avg-deus": [(3, 0), (4, 1), (5, 2), (9, 6), (10, 7), (11, 8)],
    "lesa": [(3, 0), (4, 1), (5, 2), (9, 6), (10, 7), (11, 8)],
    "opt-deus": [(3, 0), (4, 1), (5, 2), (9, 6), (10, 7), (11, 8)],
    "linear-combination": [(3, 0), (4, 1), (5, 2), (9, 6), (10, 7), (11, 8)],
}


@pytest.mark.parametrize("method", SOURCES)
def test_new_layers_are_made_from_layers_of_their_phase(method):
    config = family_config("gemma3", num_hidden_layers=12, sliding_window_pattern=3)
    plan = planned(config, method, 6, "whole-periods", **SMALL.get(method, {}))
    assert plan.new_indices == [3, 4, 5, 12, 13, 14]
    assert [plan.layers[index].sources for index in plan.new_indices] == SOURCES[method]


def test_neighbours_of_the_same_type_are_those_of_the_phase():
    config = family_config("gemma2", num_hidden_layers=8)
    plans = [planned(config, "avg-deus", 4, "whole-periods", neighbours=kind) for kind in ("adjacent", "same_type")]
    assert plans[0].layers == plans[1].layers


def test_what_the_base_alone_says_of_its_layers_is_kept():
    unused = family_config("qwen3", use_sliding_window=False, max_window_layers=28)
    assert result(unused, "llama-pro")["max_window_layers"] == 28
    pattern = family_config("gemma2", num_hidden_layers=6, layer_types=[S, S, F, S, S, F])
    assert result(pattern, "llama-pro")["layer_types"] == [S, S, F, S, S, F, S, S, F]


def test_a_memory_over_a_memory_keeps_the_phase(tmp_path):
    base = save_base(tmp_path / "base", "gemma2", num_hidden_layers=6)
    first = {"method": "midus-hml", "options": SMALL["midus-hml"], "output": tmp_path / "once"}
    assert upscale(base=base, num_new_layers=2, placement="whole-periods", **first).new_layer_indices == [4, 5]
    second = {"method": "midus-pkm", "options": SMALL["midus-pkm"], "output": tmp_path / "twice"}
    upscale(base=tmp_path / "once", num_new_layers=4, placement="whole-periods", **second)
    config = config_of(tmp_path / "twice")
    assert config["layer_types"] == [S, F] * 6
    # In front of the memory blocks 4 and 5, which have no output projection, the layers after them are copied.
    assert config["upscale"]["new_layers"] == [2, 3, 8, 9]
    assert [config["upscale"]["plan"][index]["sources"] for index in (2, 3, 8, 9)] == [[2], [3], [6], [7]]
    assert torch.equal(logits(base), logits(tmp_path / "twice"))


@pytest.mark.parametrize(
    ("method", "sources"), [("midus-hml", [[2], [3], [2], [3]]), ("llama-pro", [[0], [1], [0], [1]])], ids=str
)
def test_at_the_ends_the_phase_of_the_other_side_is_taken(method, sources):
    """The first period has none before it; a cut-off last one has not every phase after it."""
    config = family_config("gemma2", num_hidden_layers=4)
    plan = planned(config, method, 4, "whole-periods", **SMALL.get(method, {}))
    assert plan.new_indices == [0, 1, 4, 5]
    assert [list(plan.layers[index].sources) for index in plan.new_indices] == (
        [[0], [1], *sources[:2]] if method == "midus-hml" else [[0], [1], *sources[2:]]
    )


@pytest.mark.parametrize("method", ["llama-pro", "avg-deus", "midus-hml"])
def test_the_recipe_of_the_card_makes_the_same_model_again(method, tmp_path, command):
    base = save_base(tmp_path / "base", "gemma3", num_hidden_layers=9, sliding_window_pattern=3)
    request = {"placement": "whole-periods", "options": SMALL.get(method, {}), "verify": False}
    upscale(base=base, method=method, output=tmp_path / "out", **request)
    recipe = recipe_of(tmp_path / "out")
    assert "placement: whole-periods\nnum_new_layers: 3\n" in recipe
    (tmp_path / "recipe.yaml").write_text(recipe)
    made = command("--config", tmp_path / "recipe.yaml", "--base", base, "--output", tmp_path / "again", "--no-verify")
    assert made.status == 0, made.err
    assert file_digests(tmp_path / "again") == file_digests(tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "changes", "number", "message"),
    [
        ("gemma2", {"num_hidden_layers": 8}, 3, "num-new-layers is 3; placement whole-periods needs a multiple of 2, after which"
         r" attention types repeat, up to 8\. Choose 2 or 4\."),
        ("gemma2", {"num_hidden_layers": 4, "layer_types": [F, S, S, S]}, None, "the attention types of the base's layers do not "
         "repeat; placement whole-periods needs a pattern to keep. Choose another placement"),
    ],
)  # fmt: skip
def test_what_keeps_no_pattern_is_refused(family, changes, number, message):
    with pytest.raises(RequestError, match=message):
        result(family_config(family, **changes), "llama-pro", number)


def test_a_period_that_is_to_be_fused_needs_one_on_each_side():
    config = family_config("gemma2", num_hidden_layers=4)
    with pytest.raises(
        RequestError, match=r"new layer 0 has no base layer before it; .* Pass a lower --num-new-layers"
    ):
        planned(config, "avg-deus", 4, "whole-periods")


WARNED = (
    "{} of {} layers attend otherwise (sliding or full) than {} implies by their index. transformers reads layer_types and is "
    "right; runtimes that go by the index, such as llama.cpp, compute another function. {}"
)
KEEP = "Pass --placement whole-periods to keep the pattern."


def warnings(command, base, method, *arguments) -> list[str]:
    """What a dry run warns of."""
    done = command("--base", base, "--method", method, "--dry-run", *arguments)
    assert done.status == 0, done.err
    return [line.removeprefix("upscale: warning: ") for line in done.err.splitlines() if "attend otherwise" in line]


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("method", ["llama-pro", "solar", "midus-hml"])
def test_a_plan_that_breaks_the_pattern_is_warned_of_with_the_layers_counted(family, method, tmp_path, command):
    name, changes = TINY[family]
    base = save_base(tmp_path / "base", name, **changes)
    arguments = [] if method in SMALL else settings(method)
    if method not in ("solar", "slices"):
        arguments += ["--placement", "2,4"]
    result = warnings(command, base, method, *arguments)
    if method in SMALL:
        assert result == []
        return
    upscaled(base, tmp_path / "out", method, **({} if method in ("solar", "slices") else {"placement": "2,4"}))
    config = config_of(tmp_path / "out")
    listed, derived = config["layer_types"], derived_types(config, config["model_type"])
    moved = sum(one != other for one, other in zip(listed, derived, strict=True))
    assert len(result) == (moved > 0)
    if moved:
        assert result[0].startswith(WARNED.format(moved, len(listed), config["model_type"], ""))
        assert KEEP in result[0] or method in ("solar", "slices", "linear-combination")


def test_the_remedy_is_one(tmp_path, command):
    base = save_base(tmp_path / "base", "gemma3", num_hidden_layers=12, sliding_window_pattern=3)
    assert warnings(command, base, "llama-pro") == [WARNED.format(8, 18, "gemma3_text", KEEP)]
    for method in ("llama-pro", "attenuated-copy", "avg-deus", "linear-combination", "opt-deus", "lesa"):
        assert warnings(command, base, method, "--placement", "whole-periods") == []
    stacked = warnings(command, base, "solar", "--num-new-layers", "8")
    assert stacked[0].endswith("Pass --num-new-layers 6, a multiple of 3, to keep the pattern.")
    assert warnings(command, base, "solar", "--num-new-layers", "6") == []


def test_a_window_that_begins_at_a_layer_is_broken_by_solar_alone(tmp_path, command):
    base = save_base(tmp_path / "base", "qwen2", **QWEN)
    result = warnings(command, base, "solar")
    assert result[0].endswith("No number of new layers keeps the pattern; a method that inserts layers can.")
    assert warnings(command, base, "llama-pro") == []


@pytest.mark.parametrize("changes", [{"layer_types": [F, S, S, S]}, {"layer_types": [S, F, F, S]}], ids=str)
def test_a_base_that_the_index_misreads_already_is_not_warned_of(changes, tmp_path, command):
    base = save_base(tmp_path / "base", "gemma2", **changes)
    assert warnings(command, base, "llama-pro") == []
