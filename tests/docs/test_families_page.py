"""docs/families.md has a row for each causal type, and its rows say which methods work and why other types are refused."""

import pytest
import transformers

from scripts.families import (
    HEADING,
    LARGER_HEADING,
    PAGE,
    REFUSED,
    Row,
    causal_types,
    larger_row_of,
    larger_types,
    main,
    methods_on_the_page,
    refusal_of,
    row_of,
    rows_in,
    shortened,
    table_of,
)
from upscalers.architecture.families import FAMILIES
from upscalers.methods.contract import METHODS

TEXT = PAGE.read_text(encoding="utf-8")
ALONE, LARGER = TEXT.partition(HEADING)[2].split(LARGER_HEADING)
(TAKEN, REFUSALS), (LARGER_TAKEN, LARGER_REFUSALS) = (
    [rows_in(table) for table in part.split(f"{REFUSED}:")] for part in (ALONE, LARGER)
)
OF_THIS_VERSION = f"causal types of Transformers {transformers.__version__}, and" in TEXT
# Some types that differ in what works, which are tried by default.
TRIED = ["cohere", "gemma3_text", "gemma4_text", "qwen3_5_text", "recurrent_gemma"]

pytestmark = pytest.mark.skipif(not OF_THIS_VERSION, reason="the page was made with another version of Transformers")


def test_every_type_has_a_row_and_every_refusal_its_reason():
    assert set(TAKEN) | set(REFUSALS) == set(causal_types()) and not set(TAKEN) & set(REFUSALS)
    for name in causal_types():
        refusal = refusal_of(name)
        assert REFUSALS[name] == Row(name, (), refusal).reason if refusal else name in TAKEN or REFUSALS[name]


def test_rows_name_methods():
    methods = {name: methods_on_the_page(name) for name in TAKEN}
    assert all(set(names) <= set(METHODS) and len(names) == len(set(names)) > 0 for names in methods.values())
    assert {name for name in TAKEN if len(methods[name]) == len(METHODS)} >= FAMILIES.keys()
    assert methods_on_the_page("bert") == []


@pytest.mark.parametrize("model_type", TRIED)
def test_a_row_says_what_methods_give(model_type):
    row = row_of(model_type)
    assert shortened(row.methods) == TAKEN[model_type] if row.methods else row.reason == REFUSALS[model_type]


def test_every_larger_type_has_a_row():
    assert LARGER_TAKEN.keys() | LARGER_REFUSALS.keys() == set(larger_types())
    assert {"gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "mistral3", "llava", "internvl"} <= LARGER_TAKEN.keys()


@pytest.mark.parametrize("model_type", ["mistral3", "qwen2_5_vl"])
def test_a_row_of_a_larger_type_says_what_methods_give(model_type):
    row = larger_row_of(model_type)
    assert (
        ", ".join(row.methods) == LARGER_TAKEN[model_type]
        if row.methods
        else row.reason == LARGER_REFUSALS[model_type]
    )


def test_counts_stand_above_the_table():
    rows = [
        Row("a", ("moc", "llama-pro")),
        Row("b", ("moc†",)),
        Row("d", ("moc", "llama-pro")),
        Row("c", (), "is an encoder."),
    ]
    table = table_of(rows)
    assert table.startswith(
        f"Methods take 3 of 4 causal types of Transformers {transformers.__version__}, and 2 of these with new layers; 1 types are "
        "refused. 5 pairs of a type and a method work.\n"
    )
    assert "|---|---|\n| `a`, `d` | moc, llama-pro |\n| `b` | moc† |\n" in table
    assert table.endswith("| `c` | an encoder |\n")
    assert ALONE.startswith(f"\n\nMethods take {len(TAKEN)} of {len(TAKEN | REFUSALS)} causal types")


@pytest.mark.product
def test_the_page_is_what_the_script_writes(capsys):
    assert main([]) == 0, capsys.readouterr().out
