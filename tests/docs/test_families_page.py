"""docs/families.md says which methods take which type, and how many types are refused for what."""

import re

import pytest
import transformers
from pairs import by_default

from midus_hf.config.backbone import PROVEN
from scripts.families import (
    COMPOSITE_HEADING,
    HEADING,
    PAGE,
    Row,
    causal_types,
    composite_row_of,
    composite_types,
    main,
    methods_on_the_page,
    refusal_of,
    row_of,
    rows_in,
    shortened,
    table_of,
)
from upscalers.methods.contract import METHODS

TEXT = PAGE.read_text(encoding="utf-8")
ALONE, COMPOSITE = TEXT.partition(HEADING)[2].split(COMPOSITE_HEADING)
TAKEN, COMPOSITE_TAKEN = rows_in(ALONE), rows_in(COMPOSITE)
REFUSALS, COMPOSITE_REFUSALS = (
    {why: int(count) for count, why in re.findall(r"^\| (\d+) \| (.+) \|$", part, flags=re.MULTILINE)}
    for part in (ALONE, COMPOSITE)
)
OF_THIS_VERSION = f"causal types of Transformers {transformers.__version__}, and" in TEXT
# Types that differ in what works, and take seconds each: by default one that some methods take, one of them at some places alone, and
# others refuse. The page as a whole is a test of the product.
TRIED = by_default(["lfm2"], ["lfm2", "cohere", "qwen3_5_text"])
# Of each row of the page the first type, in place of all.
FIRST_OF_ROWS = {methods: name for name, methods in reversed(TAKEN.items())}.values()

pytestmark = pytest.mark.skipif(not OF_THIS_VERSION, reason="the page was made with another version of Transformers")


def test_every_type_is_taken_or_counted():
    assert TAKEN.keys() <= set(causal_types())
    assert len(TAKEN) + sum(REFUSALS.values()) == len(causal_types())


@pytest.mark.parametrize("model_type", FIRST_OF_ROWS)
def test_a_type_of_each_row_can_host_memory(model_type):
    assert not refusal_of(model_type)


def test_rows_name_methods():
    methods = {name: methods_on_the_page(name) for name in TAKEN}
    assert all(set(names) <= set(METHODS) and len(names) == len(set(names)) > 0 for names in methods.values())
    assert {name for name in TAKEN if len(methods[name]) == len(METHODS)} >= {*PROVEN}
    assert methods_on_the_page("bert") == []


@pytest.mark.parametrize("model_type", TRIED)
def test_a_row_says_what_methods_give(model_type):
    row = row_of(model_type)
    assert TAKEN.get(model_type, "") == shortened(row.methods)
    assert row.methods or row.reason in REFUSALS


def test_every_composite_type_is_taken_or_counted():
    assert COMPOSITE_TAKEN.keys() <= set(composite_types())
    assert len(COMPOSITE_TAKEN) + sum(COMPOSITE_REFUSALS.values()) == len(composite_types())
    assert {"gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "mistral3", "llava", "internvl"} <= COMPOSITE_TAKEN.keys()


@pytest.mark.parametrize("model_type", ["mistral3", "qwen2_5_vl"])
def test_a_row_of_a_composite_type_says_what_methods_give(model_type):
    row = composite_row_of(model_type)
    assert COMPOSITE_TAKEN.get(model_type, "") == ", ".join(row.methods)
    assert row.methods or row.reason in COMPOSITE_REFUSALS


def test_counts_stand_above_the_table():
    rows = [
        Row("a", ("moc", "llama-pro")),
        Row("b", ("moc†",)),
        Row("d", ("moc", "llama-pro")),
        Row("c", (), "is an encoder."),
    ]
    table = table_of(rows)
    assert table.startswith(
        f"Methods take 3 of 4 causal types of Transformers {transformers.__version__}, and 2 of these with new "
        "layers.\n"
    )
    assert "|---|---|\n| `a`, `d` | moc, llama-pro |\n| `b` | moc† |\n" in table
    assert table.endswith("| refused | why |\n|---|---|\n| 1 | an encoder |\n")
    assert ALONE.startswith(f"\n\nMethods take {len(TAKEN)} of {len(causal_types())} causal types")


@pytest.mark.product
def test_the_page_is_what_the_script_writes(capsys):
    assert main([]) == 0, capsys.readouterr().out
