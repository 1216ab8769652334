"""`midus bank`: blocks are listed, deleted, exported, imported and merged; all else stays the same bytes."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny import prompt
from transformers import AutoModelForCausalLM

from midus_hf.cli.bank import main
from tests.upscalers.banks.bank_commands import bank_of, refusal, run, write_blocks
from upscalers.banks.editing import BankRequest, delete, export
from upscalers.request.errors import RequestError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

# Level and record: 9 of level 2 is the generic memory's.
WRITTEN = [(1, 0), (1, 2), (2, 1), (2, 7), (2, 9)]


@pytest.fixture(scope="module")
def model(upscaled, tmp_path_factory):
    """A model some blocks of whose bank were written; nobody may change it."""
    folder = shutil.copytree(upscaled / "fresh", tmp_path_factory.mktemp("banks") / "model")
    write_blocks(folder, WRITTEN)
    return folder


def blocks(folder: Path) -> dict[tuple[int, int], torch.Tensor]:
    bank = bank_of(folder)
    return {(level, index): bank.block(level, index) for level in (1, 2) for index in bank.written(level)}


def other_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "level-" not in path.name
    }


def test_a_bank_is_listed(model, capsys):
    listed = run("list", model, capsys=capsys)
    assert (listed["memory"], listed["fetched"], listed["bank"]) == (
        "hier-ffn",
        4 * 3 * 32 * 6,
        4 * 3 * 32 * (12 + 18),
    )
    first, second = listed["levels"]
    assert (first["nodes"], first["written"], first["generic"]) == (3, [0, 2], False)
    assert (second["nodes"], second["written"], second["generic"]) == (9, [1, 7], True)
    main(["list", str(model)])
    assert "a text fetches 2,304 of 11,520 parameters" in capsys.readouterr().out


def test_deleted_blocks_add_nothing_and_all_else_stays(model, tmp_path, capsys):
    done = run(
        "delete", model, "--node", "1:0", "--node", "2:7", "--node", "2:3", "--output", tmp_path / "out", capsys=capsys
    )
    assert done["blocks"] == ["1:0", "2:7"]
    before, after = blocks(model), blocks(tmp_path / "out")
    assert after.keys() == before.keys() - {(1, 0), (2, 7)}
    assert all(torch.equal(before[node], after[node]) for node in after)
    assert other_files(tmp_path / "out") == other_files(model)
    edited = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        tokens = prompt(5)
        ids = torch.tensor([[0, 0]] * len(tokens))
        assert torch.equal(edited(tokens, memory_ids=ids).logits, edited(tokens).logits)


def test_a_subtree_is_a_node_and_all_below(model, tmp_path, capsys):
    done = run("delete", model, "--node", "1:0", "--subtree", "--output", tmp_path / "out", capsys=capsys)
    assert done["blocks"] == ["1:0", "2:1"]
    done = run("delete", model, "--node", "1:generic", "--subtree", "--output", tmp_path / "generic", capsys=capsys)
    assert done["blocks"] == ["2:generic"]


def test_exported_blocks_are_imported_where_they_were(upscaled, model, tmp_path, capsys):
    file = tmp_path / "blocks.safetensors"
    done = run("export", model, "--node", "1:2", "--subtree", "--node", "1:1", "--output", file, capsys=capsys)
    assert done["blocks"] == ["1:2", "2:7"]
    done = run("import", upscaled / "fresh", file, "--output", tmp_path / "out", capsys=capsys)
    assert done["blocks"] == ["1:2", "2:7"]
    found, expected = blocks(tmp_path / "out"), blocks(model)
    assert found.keys() == {(1, 2), (2, 7)} and all(torch.equal(found[node], expected[node]) for node in found)


def test_an_edited_checkpoint_is_stripped_to_the_base(model, tmp_path, capsys):
    run("delete", model, "--node", "1:0", "--output", tmp_path / "out", capsys=capsys)
    assert strip(tmp_path / "out", tmp_path / "base")["base_confirmed"] is True
    assert not (tmp_path / "base" / "memory_bank").exists()


def test_runs_of_different_parts_of_the_tree_are_put_together(model, tmp_path, capsys):
    for name, nodes, seed in (("one", [(1, 0), (2, 0)], 1), ("two", [(1, 1), (2, 7)], 2)):
        shutil.copytree(model, tmp_path / name)
        write_blocks(tmp_path / name, nodes, seed)
    done = run("merge", model, tmp_path / "one", tmp_path / "two", "--output", tmp_path / "out", capsys=capsys)
    assert done["blocks"] == ["1:0", "1:1", "2:0", "2:7"]
    found = blocks(tmp_path / "out")
    one, two, start = blocks(tmp_path / "one"), blocks(tmp_path / "two"), blocks(model)
    expected = start | {node: one[node] for node in ((1, 0), (2, 0))} | {node: two[node] for node in ((1, 1), (2, 7))}
    assert found.keys() == expected.keys() and all(torch.equal(found[node], expected[node]) for node in found)


def test_runs_that_trained_one_block_or_the_model_are_refused(model, tmp_path, capsys):
    for name, seed in (("one", 1), ("two", 2)):
        shutil.copytree(model, tmp_path / name)
        write_blocks(tmp_path / name, [(2, 9)], seed)
    words = ("merge", model, tmp_path / "one", tmp_path / "two", "--output", tmp_path / "out")
    line = refusal(*words, capsys=capsys)
    assert "block 2:generic was trained by" in line and "generic_share: 0" in line
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    with torch.no_grad():
        trained.model.norm.weight.add_(1)
    trained.save_pretrained(tmp_path / "cotrained")
    line = refusal("merge", model, tmp_path / "cotrained", "--output", tmp_path / "out", capsys=capsys)
    assert "are not those of" in line and "expected runs in which the model was frozen" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["delete"], "--node is missing; delete needs it."),
        (["delete", "--node", "x"], "node is 'x'; expected LEVEL:NODE, such as 2:52, or LEVEL:generic."),
        (["delete", "--node", "3:0"], "node '3:0' is of level 3; expected 1 to 2."),
        (["delete", "--node", "1:3"], "node '1:3' is not there; expected 0 to 2, or generic."),
        (
            ["delete", "--node", "1:0", "--memory", "moc"],
            "has no memory 'moc' that fetches blocks; expected one of: hier-ffn.",
        ),
        (
            ["export", "--node", "1:1"],
            "none of these blocks was ever written; expected one that was trained or imported.",
        ),
    ],
    ids=["none", "word", "level", "node", "memory", "unwritten"],
)
def test_wrong_requests_exit_with_2_and_one_line(model, tmp_path, capsys, words, message):
    line = refusal(words[0], model, *words[1:], "--output", tmp_path / "out", capsys=capsys)
    assert line.startswith(f"midus edit {words[0]}: ") and message in line
    assert not list(tmp_path.iterdir())


def test_an_edit_of_no_node_is_refused_from_python_as_well(model, tmp_path):
    message = "no node is named; expected one or more, each LEVEL:NODE, such as 2:52"
    with pytest.raises(RequestError, match=message):
        delete(BankRequest(model, tmp_path / "out"), [])
    with pytest.raises(RequestError, match=message):
        export(model, [], tmp_path / "blocks.safetensors")


def test_a_checkpoint_without_a_bank_is_refused(upscaled, capsys):
    assert "has no memory that fetches blocks" in refusal("list", upscaled / "base", capsys=capsys)


def test_blocks_of_another_model_are_refused(upscaled, model, tmp_path, capsys):
    other = tmp_path / "other"
    upscale(
        base=upscaled / "base",
        method="hier-ffn",
        output=other,
        options={"sizes": [4, 3], "branching": 3},
        verify=False,
    )
    run("export", model, "--node", "1:0", "--output", tmp_path / "f.safetensors", capsys=capsys)
    line = refusal("import", other, tmp_path / "f.safetensors", "--output", tmp_path / "out", capsys=capsys)
    assert "has blocks of another model: its levels is" in line
    (tmp_path / "g.safetensors").write_bytes(b"no")
    line = refusal("import", other, tmp_path / "g.safetensors", "--output", tmp_path / "out", capsys=capsys)
    assert "is no file of blocks that midus edit export wrote" in line


def test_a_level_without_blocks_has_none_to_edit(upscaled, tmp_path, capsys):
    sparse = tmp_path / "sparse"
    upscale(
        base=upscaled / "base",
        method="hier-ffn",
        output=sparse,
        options={"sizes": [0, 3], "branching": 3},
        verify=False,
    )
    line = refusal("delete", sparse, "--node", "1:0", "--output", tmp_path / "out", capsys=capsys)
    assert "level 1 has no blocks; expected one of 2." in line
