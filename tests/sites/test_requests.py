"""Requests and configs that cannot be carried out are refused in one line, alike for planning and for models."""

import json
import re

import pytest
import torch
from tiny import FAMILIES, save_tiny_model

from midus_hf.models import FAMILIES as HOSTS
from tests.upscalers.checkpoints import SMALL_MEMORY
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.request.errors import RequestError
from upscalers.runs.upscale import upscale

LAYERS = (
    r"expected all, a number from 1 to 4, a share such as 0\.25, early:N, middle:N or late:N for N neighbours, or a list of "
    r"ascending indices .*: 0, 1, 2, 3\."
)
WRONG_LAYERS = [[1, 4], [-1], [2, 1], [1, 1], [], [True], [1.0], "none", None, 0, 5, True, {"a": 1}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((["--set", f"layers={json.dumps(value)}"], f"layers is {re.escape(repr(value))}; {LAYERS}") for value in WRONG_LAYERS),
        (["--set", "site=beside"], "site is 'beside'; expected one of: beside-ffn, behind-attention, behind-layer, skip"),
        (["--set", "site=inside-ffn"], "site is 'inside-ffn'; expected one of: beside-ffn, "),
        (["--set", "site=inserted"], "site is 'inserted'; expected one of: beside-ffn, behind-attention, behind-layer, skip"),
        (["--set", "site=1"], "site is 1; expected a string"),
        (["--set", "site=skip", "--set", "span=4"], "span is 4; expected fewer than the 4 layers of the base. Lower it."),
        (["--set", "site=skip", "--set", "span=1", "--set", "layers=[3]"], "span is 1; expected fewer than"),
        (["--set", "site=skip", "--set", "span=-1"], "span is -1; expected 0 or more layers"),
        (["--set", "site=skip", "--set", "span=far"], "span is 'far'; expected a whole number"),
        (["--set", "span=2"], r"span is 2 and site is 'beside-ffn'; expected site skip, .* Pass --set site=skip, or leave span out"),
        (["--set", "site=behind-layer", "--set", "span=0"], "span is 0 and site is 'behind-layer'; expected site skip"),
        (["--num-new-layers", "2"], "num-new-layers is 2, but toy attaches memory to layers that there are; expected none"),
        (["--placement", "1,3"], "placement is '1,3', but toy attaches memory to layers that there are; expected none"),
        (["--set", "rank=0"], r"rank is 0; expected 1 or more\."),
        (["--set", "rank=two"], "rank is 'two'; expected a whole number"),
        (["--set", "rnak=2"], r"toy has no option 'rnak'\. Expected one of: .*rank"),
        # The last of two methods counts.
        (["--method", "toy-ffn", "--set", "span=1"], "toy-ffn has no option 'span'"),
        (["--method", "toy-inserted", "--set", "share=2"], "memory of type 'toy' is inserted, and its options make its layers share"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_wrong_request_is_refused_in_one_line(arguments, message, base, command, tmp_path):
    for way in (["--output", tmp_path / "out"], ["--dry-run"]):
        outcome = command("--base", base, "--method", "toy", *way, *arguments)
        assert (outcome.status, outcome.out) == (2, "")
        assert outcome.err.startswith("upscale: ") and outcome.err.count("\n") == 1
        assert re.search(message, outcome.err), outcome.err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [[1], [0, 1], [4]])
def test_layers_that_are_memory_blocks_are_refused(layers, base, command, tmp_path):
    upscale(base=base, method="midus-hml", output=tmp_path / "hml", options=SMALL_MEMORY, verify=False)
    outcome = command(
        "--base", tmp_path / "hml", "--method", "toy", "--output", tmp_path / "out", "--set", f"layers={layers}"
    )
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert f"layers is {layers}; expected all, a number from 1 to 4, a share such as 0.25, early:N" in outcome.err
    assert "that have a feed-forward network: 0, 2, 3, 5." in outcome.err
    assert not (tmp_path / "out").exists()


def test_the_methods_say_what_they_take(command):
    (described,) = command("methods", "toy", "--json").json()
    options = {option["name"]: option for option in described["options"]}
    assert set(options) == {"layers", "site", "span", "rank", "share"}
    assert options["layers"]["default"] == "all" and options["site"]["default"] == "beside-ffn"
    assert described["placement"] is None and described["identity"] is True
    (described,) = command("methods", "toy-attention", "--json").json()
    assert {option["name"] for option in described["options"]} == {"layers", "site"}
    assert command("methods", "toy").status == 0


INSERTED = {"type": "toy", "site": "inserted", "layers": [1]}
IN_A_BLOCK = "memory 'toy' is attached to layer 1, which was inserted for a memory"
NO_NAME = "expected words joined by hyphens"


def toy(*layers: int, **changes) -> dict:
    return {"type": "toy", "layers": list(layers), **changes}


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ([toy(0), toy(0)], "two memories have the name 'toy'; expected a separate name for each"),
        ([toy(0), toy(2, type="toy-ffn", name="toy")], "two memories have the name 'toy'"),
        ([INSERTED, toy(0, 1)], IN_A_BLOCK),
        ([toy(1), INSERTED], IN_A_BLOCK),
        ([INSERTED, toy(0, site="skip", into=[1])], IN_A_BLOCK),
        (
            [toy(0, 1, site="skip", into=[2])],
            r"'toy' reads at layers \[0, 1\] and adds behind \[2\]; expected a layer to add behind for each",
        ),
        (
            [toy(1, 2, site="skip", into=[2, 1])],
            r"reads at layers \[1, 2\] and adds behind \[2, 1\]; expected a layer to add behind for each, at or after it",
        ),
        ([toy(0, site="skip")], "'toy' has no 'into'; expected a layer to add behind for each"),
        ([toy(0, site="skip", into=[4])], "'toy' names layer 4; expected 0 <= layer < 4"),
        ([toy(0, site="skip", into=1)], "into is 1; expected a list of layer indices"),
        ([{**INSERTED, "name": "toy"}], r"memory entry of type 'toy' has no option 'name'\."),
        ([toy(0, into=[1])], r"memory entry of type 'toy' has no option 'into'\."),
        ([toy(0, span=1)], r"memory entry of type 'toy' has no option 'span'\."),
        *(
            ([toy(0, name=name)], re.escape(f"'toy' has name = {name!r}; {NO_NAME}"))
            for name in ("a.b", "a--b", "", 5)
        ),
        *(
            ([toy(0, name=name)], f"has name = '{name}'; {NO_NAME}, and no word of a torch")
            for name in ("keys", "type", "forward")
        ),
        ([toy(0, site="inside-ffn")], "'toy' has site = 'inside-ffn'; expected one of: beside-ffn"),
        ([toy(0, type="toy-ffn", site="inserted")], "'toy-ffn' has site = 'inserted'; expected one of: inside-ffn"),
        ([toy(4)], "'toy' names layer 4; expected 0 <= layer < 4"),
        ([toy(0, rank=0)], r"rank is 0; expected 1 or more\."),
    ],
    ids=str,
)
def test_planning_and_models_refuse_a_wrong_entry_with_the_same_words(memory, message, tmp_path):
    folder = save_tiny_model("llama", tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "model_type": "midus_llama", "memory": memory}))
    with pytest.raises(RequestError, match=message) as by_planning:
        open_base(folder)
    fields = {key: value for key, value in FAMILIES["llama"].config().to_dict().items() if key != "model_type"}
    with pytest.raises(ValueError, match=message) as by_model, torch.device("meta"):
        HOSTS["llama"].config_class(**fields, memory=memory)
    assert str(by_planning.value) == str(by_model.value)
