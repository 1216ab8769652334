"""How often texts fetch the blocks of a bank: counts by hook and by rows, tables, JSON, CSV, and pictures."""

import csv
import io

import pytest
import torch
from models.hierarchical_models import hierarchical_model

from midus_hf.look.block_usage import BankLevel, bank_layouts, record_block_usage, usage_by_rows
from midus_hf.look.pictures import as_png
from midus_hf.look.text_rows import TextRows, read_rows
from midus_hf.look.usage_report import as_json, blocks_table, draw_blocks, usage_csv, usage_curves

# Levels of `hierarchical_model`; the second has no blocks.
FIRST, THIRD = BankLevel("hier-ffn", 1), BankLevel("hier-ffn", 3)

PATHS = torch.tensor([[1, 4, 13], [1, 3, 9], [0, 0, 2]])
ROWS = [torch.arange(1, 9), torch.arange(1, 6), torch.arange(1, 4), torch.arange(1, 4)]
# Rows of 8, 5, 3 and 3 tokens, the first and the third of one document.
TEXT = TextRows("text", ROWS, [0, 1, 0, 2], PATHS)

COUNTS = {FIRST: {0: 3, 1: 16}, THIRD: {2: 3, 9: 5, 13: 11}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hierarchical_model("llama", "hier-ffn", tmp_path_factory.mktemp("bank"))


def counted(usage):
    return {
        place: {block: tokens for block, tokens in enumerate(counts[0].tolist()) if tokens}
        for place, counts in usage.counts.items()
    }


def test_tokens_that_are_read_with_a_block_are_counted_without_padding_however_rows_are_batched(model):
    with record_block_usage(model) as usage, torch.no_grad():
        model(torch.arange(1, 4)[None], memory_ids=torch.tensor([[1, 4, 13]], dtype=torch.int16))
    assert counted(usage) == {FIRST: {1: 3}, THIRD: {13: 3}}
    for batch_size in (1, 2, 4):
        with record_block_usage(model) as usage:
            read_rows(model, TEXT, batch_size=batch_size)
        assert counted(usage) == COUNTS and usage.generic_tokens == 0
    assert counted(usage_by_rows(bank_layouts(model), TEXT)) == COUNTS
    assert [len(counts[0]) for counts in usage.counts.values()] == [3, 27]


def test_the_generic_memory_is_told_apart(tmp_path):
    model = hierarchical_model("llama", "hier-ffn", tmp_path, without_ids="generic")
    tokens = torch.arange(1, 7)[None].expand(2, -1)
    with record_block_usage(model) as usage, torch.no_grad():
        model(tokens, memory_ids=torch.tensor([[1, 4, 13], [-1, -1, -1]]))
        model(input_ids=tokens)
    assert counted(usage) == {FIRST: {1: 6}, THIRD: {13: 6}} and usage.generic_tokens == 6 + 12
    assert blocks_table({"t": usage}).rows[-1][-1] == "18 tokens"


def test_texts_that_fetch_nothing_count_nothing(model):
    with record_block_usage(model) as usage, torch.no_grad():
        model(torch.arange(1, 7)[None])
    assert counted(usage) == {FIRST: {}, THIRD: {}} and usage.generic_tokens == 0
    assert [of_level.used for of_level in usage.summary().values()] == [0, 0]
    assert all(not curve.any() for curve in usage_curves(usage.counts).values())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 4, 27]], "memory_ids has 27 for level 3 in row 0; expected 0 to 26"),
        ([[1, 4, -1]], "memory_ids has -1 for level 3 in row 0; expected 0 to 26"),
        ([[1, 4]], r"memory_ids is \(1, 2\), torch.int64; expected integers \[batch, 3\]"),
        ([[1, 4, 13], [0, 0, 2]], "memory_ids has 2 rows; expected 1, one for each text of the batch"),
    ],
    ids=["range", "part-generic", "levels", "rows"],
)
def test_what_a_model_refuses_is_refused_in_its_words_and_not_counted(ids, message, model):
    with record_block_usage(model) as usage, pytest.raises(ValueError, match=message):
        model(torch.arange(1, 4)[None], memory_ids=torch.tensor(ids))
    assert counted(usage) == {FIRST: {}, THIRD: {}}


def test_blocks_that_were_fetched_before_are_refused(model):
    blocks = model.fetch_memory(PATHS[:1])
    with (
        record_block_usage(model),
        pytest.raises(ValueError, match="memory_blocks is given, which does not name the blocks' nodes"),
    ):
        model(torch.arange(1, 4)[None], memory_blocks=blocks)


def test_a_table_json_and_csv_tell_how_even_it_is_and_what_is_never_fetched(model):
    usage = usage_by_rows(bank_layouts(model), TEXT)
    assert blocks_table({"text": usage}).rows == [
        ["text", "hier-ffn level 1", "3", "1", "66.7%", "51.6%", "84.21%", "1 (84.2%), 0 (15.8%)"],
        ["text", "hier-ffn level 3", "27", "24", "11.1%", "9.7%", "57.89%", "13 (57.9%), 9 (26.3%), 2 (15.8%)"],
    ]
    told = as_json(usage)["hier-ffn"]
    assert told["generic_tokens"] == 0 and list(told["levels"]) == ["1", "3"]
    third = told["levels"]["3"]
    assert (third["blocks"], third["never_fetched"], third["tokens"]) == (27, 24, {"2": 3, "9": 5, "13": 11})
    assert third["used"] == pytest.approx(3 / 27) and third["largest"] == pytest.approx(11 / 19)
    lines = list(csv.DictReader(io.StringIO(usage_csv({"text": usage.counts}))))
    assert len(lines) == 3 + 27 and sum(line["count"] == "0" for line in lines) == 1 + 24
    assert lines[1] == {
        "text": "text", "memory": "hier-ffn level 1", "head": "0", "number": "1", "count": "16", "share": str(16 / 19),
    }  # fmt: skip


def test_pictures_have_a_panel_per_level_and_a_curve_per_text(model):
    pytest.importorskip("matplotlib")
    usage = usage_by_rows(bank_layouts(model), TEXT)
    figure = draw_blocks({"a": usage, "b": usage})
    assert as_png(figure).startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figure.axes] == ["hier-ffn level 1, 3 blocks", "hier-ffn level 3, 27 blocks"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["a", "b", "all alike"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"blocks, most fetched first"}
