"""docs/families.md has a row for each causal type, and its rows say what is proven and why other types are refused."""

import re

import pytest
import transformers

from midus_hf.models.inference.proof import WIRINGS
from scripts.families import (
    HEADING,
    LARGER_HEADING,
    PAGE,
    REQUESTS,
    TRIED_WITHIN,
    Row,
    causal_types,
    larger_row_of,
    larger_table_of,
    larger_types,
    main,
    refusal_of,
    row_of,
    table_of,
)
from upscalers.architecture.families import FAMILIES
from upscalers.methods.contract import METHODS

TEXT = PAGE.read_text(encoding="utf-8")


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells behind each type."""
    return {
        name: cells.split(" | ") for name, cells in re.findall(r"^\| `(.+?)` \| (.+) \|$", text, flags=re.MULTILINE)
    }


ROWS, LARGER_ROWS = (rows_of(part) for part in TEXT.partition(HEADING)[2].split(LARGER_HEADING))
OF_THIS_VERSION = f"causal types of Transformers {transformers.__version__}, and" in TEXT
# Some types that differ in what works, which are tried by default.
TRIED = ["cohere", "gemma3_text", "gemma4_text", "qwen3_5_text", "recurrent_gemma"]

pytestmark = pytest.mark.skipif(not OF_THIS_VERSION, reason="the page was made with another version of Transformers")


def test_every_type_has_a_row_and_every_refusal_its_reason():
    assert set(ROWS) == set(causal_types())
    reasons = {name: cells[0] for name, cells in ROWS.items() if len(cells) == 1}
    for name in causal_types():
        refusal = refusal_of(name)
        assert (name in reasons and reasons[name] == refusal) if refusal else len(ROWS[name]) == 2 or reasons[name]


def test_rows_name_sites_and_methods():
    for name, cells in ROWS.items():
        if len(cells) == 2 and name not in FAMILIES:
            named = cells[0].removeprefix("all but ")
            assert named == "all" or set(named.split(", ")) <= set(WIRINGS)
            assert {method.partition(" ")[0] for method in cells[1].split(", ")} <= REQUESTS.keys()
    assert {name for name, cells in ROWS.items() if cells[-1] == f"all {len(METHODS)}"} == FAMILIES.keys()


@pytest.mark.parametrize("model_type", TRIED)
def test_a_row_says_what_proofs_and_methods_give(model_type):
    assert str(row_of(model_type)) in TEXT.splitlines()


def test_every_larger_type_has_a_row():
    assert set(LARGER_ROWS) == set(larger_types())
    taken = {name: cells for name, cells in LARGER_ROWS.items() if len(cells) == 2}
    assert all(
        {each.partition(" ")[0] for each in cells[1].split(", ")} <= set(TRIED_WITHIN) for cells in taken.values()
    )
    assert {"gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "mistral3", "llava", "internvl", "paligemma"} <= taken.keys()
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in LARGER_ROWS.items()]
    assert TEXT.endswith(f"{LARGER_HEADING}\n\n{larger_table_of(lines)}")


@pytest.mark.parametrize("model_type", ["mistral3", "qwen2_5_vl"])
def test_a_row_of_a_larger_type_says_what_methods_give(model_type):
    assert larger_row_of(model_type) in TEXT.splitlines()


def test_counts_stand_above_the_table():
    rows = [
        Row("a", WIRINGS, ("moc", "llama-pro")),
        Row("b", ("skip", "behind-layer"), ("moc with `site=behind-layer`",)),
        Row("d", tuple(wiring for wiring in WIRINGS if wiring != "hier-kv"), ("moda",)),
        Row("c", (), (), "is an encoder."),
    ]
    table = table_of(rows)
    assert table.startswith(
        f"Methods take 3 of 4 causal types of Transformers {transformers.__version__}, and 1 of these with new layers; 1 types are "
        "refused. 4 pairs of a type and a method work.\n"
    )
    assert "| beside-ffn | 2 |\n| skip | 3 |\n" in table and "| moc | 2 |\n| ultramem-v2 | 0 |\n" in table
    assert "| `a` | all | moc, llama-pro |\n| `b` | skip, behind-layer | moc with `site=behind-layer` |\n" in table
    assert "| `d` | all but hier-kv | moda |\n" in table
    assert table.endswith("| `c` | is an encoder. |\n")
    taken = sum(len(cells) == 2 for cells in ROWS.values())
    assert TEXT.partition(f"{HEADING}\n\n")[2].startswith(f"Methods take {taken} of {len(ROWS)} causal types")


@pytest.mark.product
def test_the_page_is_what_the_script_writes(capsys):
    assert main([]) == 0, capsys.readouterr().out
