"""Requests of attached memories that cannot be carried out are refused in one line."""

import json
import re

import pytest
from config.reading import SIZES

from midus_hf.memories.options import SharedTables
from midus_hf.memories.registry import read_memories
from midus_hf.memories.ultramem_v2.options import UltraMemV2Options
from tests.upscalers.checkpoints import unverified

LAYERS = (
    r"expected all, a number from 1 to 4, a share such as 0\.25, early:N, middle:N or late:N for N neighbours, or a list of "
    r"ascending indices .*: 0, 1, 2, 3\."
)
SHORT = (",", ":")
ATTACHES = "but ultramem-v2 attaches memory to existing layers; expected none"
WRONG_LAYERS = [[1, 4], [-1], [2, 1], [1, 1], [], [True], [1.0], "none", None, 0, 5, True, {"a": 1}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (f"--set layers={json.dumps(value, separators=SHORT)}", f"layers is {re.escape(repr(value))}; {LAYERS}")
            for value in WRONG_LAYERS
        ),
        ("--set site=skip --set span=4", "span is 4; expected fewer than the 4 layers of the base. Lower it."),
        ("--set site=skip --set span=1 --set layers=[3]", "span is 1; expected fewer than"),
        ("--set site=skip --set span=-1", "span is -1; expected 0 or more layers"),
        (
            "--set span=2",
            r"span is 2 and site is 'beside-ffn'; expected site skip, .* Pass --set site=skip, or leave span out",
        ),
        ("--num-new-layers 2", f"num-new-layers is 2, {ATTACHES}"),
        ("--placement 1,3", f"placement is '1,3', {ATTACHES}"),
        # The last of two methods counts.
        ("--method hier-lora-ffn --set span=1", "hier-lora-ffn has no option 'span'. Expected one of: .*alpha"),
    ],
)  # fmt: skip
def test_wrong_request_is_refused(arguments, message, base, command, refused, tmp_path):
    words = ("--base", base, "--method", "ultramem-v2", *arguments.split())
    for way in (["--output", tmp_path / "out"], ["--dry-run"]):
        refused(command(*words, *way), message)


@pytest.mark.parametrize("layers", ["[1]", "[0,1]", "[4]"])
def test_layers_that_are_memory_blocks_are_refused(layers, base, command, refused, tmp_path):
    blocks = unverified(base, tmp_path / "hml")
    outcome = command(
        "--base", blocks, "--method", "ultramem-v2", "--output", tmp_path / "out", "--set", f"layers={layers}"
    )
    message = rf"layers is {re.escape(str(json.loads(layers)))}; .* that have a feed-forward network: 0, 2, 3, 5\."
    refused(outcome, message, left=["hml"])


def test_shared_tables_that_no_layer_could_be_given_are_refused(monkeypatch):
    two = (SharedTables((0, 1), {}), SharedTables((1, 2), {}))
    monkeypatch.setattr(UltraMemV2Options, "tables", lambda self, sizes, layers: two)
    message = r"layer 1 reads two shared tables of memory 'ultramem'; expected at most one\. Declare"
    with pytest.raises(ValueError, match=message):
        read_memories([{"type": "ultramem-v2", "layers": [0, 1, 2]}], SIZES)
