"""How often texts fetch the blocks of a bank: counts by hook and by rows, tables, JSON, CSV, pictures, and `midus look usage`."""

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from analysis.upscaled_folders import saved_with_bank
from models.hierarchical_models import hierarchical_model
from retrieval.tiny_bert import WIDTH
from retrieval.trees import random_tree
from tiny import save_tiny_model
from training.tiny_run import tiny_tokenizer

from midus_hf.analysis.pictures import as_png
from midus_hf.analysis.slots.block_usage import BankLevel, bank_layouts, record_block_usage, usage_by_rows
from midus_hf.analysis.slots.report import as_json, blocks_table, draw_blocks, usage_csv, usage_curves
from midus_hf.analysis.text_rows import TextRows, read_rows
from midus_hf.cli.look import main
from midus_hf.retrieval.memory_retriever import MemoryRetriever
from midus_hf.retrieval.tree_files import TreeOrigin
from upscalers.runs.upscale import upscale

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


def test_ids_may_be_of_any_integers(model):
    with record_block_usage(model) as usage, torch.no_grad():
        model(torch.arange(1, 4)[None], memory_ids=torch.tensor([[1, 4, 13]], dtype=torch.int16))
    assert counted(usage) == {FIRST: {1: 3}, THIRD: {13: 3}}


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
    lines = list(
        csv.DictReader(io.StringIO(usage_csv({text: of_text.counts for text, of_text in {"text": usage}.items()})))
    )
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, a model with a bank of 3 by 9, a tree for it, and a text of six documents."""
    folder = tmp_path_factory.mktemp("folders")
    save_tiny_model("llama", folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    saved_with_bank(folder / "base", folder)
    documents = [" ".join(f"w{(3 + 7 * i + 5 * word) % 55}" for word in range(10 + i)) for i in range(6)]
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "texts.jsonl").write_text(lines)
    return folder, documents


def expected_tokens(folder: Path, documents: list[str], level: int) -> dict[str, int]:
    """Return the tokens by block, as the retriever finds paths, in rows of 8 tokens; a row of one token predicts nothing."""
    found: dict[str, int] = {}
    for document, path in zip(documents, MemoryRetriever.load(folder / "tree").paths(documents).tolist(), strict=True):
        count = len(document.split())
        read = count - (count % 8 == 1)
        found[str(path[level - 1])] = found.get(str(path[level - 1]), 0) + read
    return found


def test_the_command_counts_the_blocks_that_the_paths_of_documents_name(folders, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder, documents = folders
    words = [str(folder / "model"), "--text", str(folder / "texts.jsonl"), "--retriever", str(folder / "tree")]
    assert main(["usage", *words, "--sequence-length", "8", "--json", "--output", str(tmp_path / "usage.pdf")]) == 0
    report = json.loads(capsys.readouterr().out)
    read = report["texts"]["texts.jsonl"]
    assert read["layers"] == {} and report["not_counted"] == {}
    levels = read["blocks"]["hier-ffn"]["levels"]
    for level in (1, 2):
        assert levels[str(level)]["tokens"] == expected_tokens(folder, documents, level)
    assert levels["2"]["never_fetched"] == 9 - len(levels["2"]["tokens"])
    assert (tmp_path / "usage.pdf").read_bytes().startswith(b"%PDF-")
    assert main(["usage", *words]) == 0
    printed = capsys.readouterr().out
    assert "Blocks fetched" in printed and "Slots retrieved" not in printed


def test_the_command_asks_for_a_tree_and_refuses_one_that_nothing_is_fetched_by(folders, tmp_path, capsys):
    folder, _ = folders
    options = {"n": 4, "k": 2}
    upscale(base=folder / "base", method="midus-hml", output=tmp_path / "slots", options=options, verify=False)
    assert main(["usage", str(folder / "model"), "--text", str(folder / "texts.jsonl")]) == 2
    assert (
        "midus look usage: the texts of this midus_llama model fetch blocks, and nothing says which; "
        "expected the tree of topics that they are "
        "found by. Pass --retriever.\n"
    ) in capsys.readouterr().err
    tree = ["--retriever", str(folder / "tree")]
    assert main(["usage", str(tmp_path / "slots"), "--text", str(folder / "texts.jsonl"), *tree]) == 2
    assert "and the texts of this model fetch no blocks; leave it out.\n" in capsys.readouterr().err
    assert main(["usage", str(folder / "base"), "--text", str(folder / "texts.jsonl"), *tree]) == 2
    assert "this llama model has no memory whose use can be counted; expected" in capsys.readouterr().err


@pytest.mark.parametrize(("branching", "levels"), [(2, 2), (5, 2), (3, 1)], ids=["fewer", "more", "flat"])
def test_the_command_refuses_a_tree_of_another_shape_than_that_of_the_bank(
    branching, levels, folders, tmp_path, capsys
):
    folder, _ = folders
    bert = TreeOrigin(embedding_model=str(folder / "bert"))
    random_tree(branching, levels, width=WIDTH, origin=bert).save(tmp_path / "tree")
    words = (
        f"memory 'hier-ffn' fetches blocks by a tree of 2 levels of 3, and the retriever has {levels} levels of {branching}; "
        "expected the tree that the bank was trained with.\n"
    )
    texts = ["--text", str(folder / "texts.jsonl")]
    assert main(["usage", str(folder / "model"), *texts, "--retriever", str(tmp_path / "tree")]) == 2
    assert words in capsys.readouterr().err


def test_slots_and_blocks_of_one_model_are_counted_together(folders, tmp_path, capsys):
    folder, _ = folders
    options = {"n": 4, "k": 2}
    upscale(base=folder / "model", method="midus-pkm", output=tmp_path / "both", options=options, verify=False)
    words = [str(tmp_path / "both"), "--text", str(folder / "texts.jsonl"), "--sequence-length", "20", "--json"]
    assert main(["usage", *words, "--retriever", str(folder / "tree")]) == 0
    report = json.loads(capsys.readouterr().out)
    read = report["texts"]["texts.jsonl"]
    assert len(read["layers"]) == 2 and read["blocks"]["hier-ffn"] and report["not_counted"] == {}
    assert main(["usage", *words]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["texts"]["texts.jsonl"]["blocks"] == {} and list(json.loads(out)["not_counted"]) == [
        "hier-ffn"
    ]
    assert "texts fetch nothing from the model's bank; give --retriever with its tree of topics" in err
