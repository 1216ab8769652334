"""`midus edit delete`: what a block has learnt is in no file of the result, whatever else the folder held."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from training.block_runs import config_of, save_fetching, write_assigned

from midus_hf.banks.level_file import LevelFile
from midus_hf.training.run.train import train
from tests.upscalers.banks.bank_commands import bank_of, refusal, run

# A leaf that the corpus has texts of, and its block.
NODE = (2, 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output of a run that has checkpoints and a record of what trained blocks; nobody may change it."""
    folder = tmp_path_factory.mktemp("deleting")
    models, assigned = save_fetching(folder / "models"), write_assigned(folder / "assigned.jsonl")
    train(
        config_of(
            models / "hier-ffn", assigned, folder / "run", save_steps=3, max_steps=6, audit=True, learning_rate=1e-2
        )
    )
    return folder / "run"


def traces(run: Path) -> list[bytes]:
    """Stretches of what training has left of a block: its record, and its master and moments at each checkpoint."""
    bank = bank_of(run)
    found = [bank.block(*NODE)]
    bank.close()
    for state in sorted(run.glob("checkpoint-*/block_states/0")):
        numel, touched = 3 * len(found[0]) + 1, json.loads((state / "touched.json").read_text())
        found += records_of(state, touched, numel)
    stretches = [record[start : start + 16] for record in found for start in range(0, len(record) - 16, 64)]
    return [stretch.numpy().tobytes() for stretch in stretches if stretch.count_nonzero() == 16]


def records_of(state: Path, touched: dict, numel: int) -> list[torch.Tensor]:
    records = []
    for name, indices in touched[str(NODE[0])]:
        file = LevelFile(state / name, len(indices), numel)
        records += [file.read(place) for place, index in enumerate(indices) if index == NODE[1]]
        file.close()
    return records


def files_with(folder: Path, stretches: list[bytes]) -> set[str]:
    """The files that have one of these stretches of bytes anywhere, whatever they say that they hold."""
    found = set()
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if any(stretch in content for stretch in stretches):
            found.add(str(path.relative_to(folder)))
    return found


def test_no_file_of_the_result_has_what_the_block_has_learnt(trained, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(trained, model)
    run("export", trained, "--node", "2:4", "--node", "1:0", "--output", model / "some.safetensors", capsys=capsys)
    run("export", trained, "--node", "2:4", "--output", model / "only.safetensors", capsys=capsys)
    run("export", trained, "--node", "1:0", "--output", model / "other.safetensors", capsys=capsys)
    learnt = traces(trained)
    expected = {"memory_bank/hier-ffn/level-2.safetensors", "some.safetensors", "only.safetensors"}
    expected |= {f"checkpoint-{step}/block_states/0/level-2-1.safetensors" for step in (3, 6)}
    assert expected <= files_with(model, learnt), "the search finds what is there"
    done = run("delete", model, "--node", "2:4", "--output", tmp_path / "out", capsys=capsys)
    assert done["blocks"] == ["2:4"]
    assert files_with(tmp_path / "out", learnt) == set()
    out = tmp_path / "out"
    assert (
        not list(out.glob("checkpoint-*")) and (out / "log.jsonl").read_bytes() == (trained / "log.jsonl").read_bytes()
    )
    assert load_file(out / "some.safetensors").keys() == {"1.0"} and not (out / "only.safetensors").exists()
    assert (out / "other.safetensors").read_bytes() == (model / "other.safetensors").read_bytes()
    before, after = bank_of(trained), bank_of(out)
    assert after.deleted(2) == [4] and after.written(1) == before.written(1)
    assert all(torch.equal(before.block(1, index), after.block(1, index)) for index in before.written(1))


def test_a_checkpoint_whose_blocks_were_deleted_is_nothing_to_resume_from(trained, tmp_path, capsys):
    out = tmp_path / "out"
    run("delete", trained / "checkpoint-6", "--node", "2:4", "--output", out, capsys=capsys)
    assert files_with(out, traces(trained)) == set()
    names = {path.name for path in out.iterdir()}
    assert "model.safetensors" in names and names.isdisjoint({"block_states", "optimizer.pt", "trainer_state.json"})


def test_exports_leave_deleted_blocks_out(trained, tmp_path, capsys):
    run("delete", trained, "--node", "2:4", "--output", tmp_path / "out", capsys=capsys)
    file = tmp_path / "blocks.safetensors"
    done = run("export", tmp_path / "out", "--node", "1:1", "--subtree", "--output", file, capsys=capsys)
    assert "2:4" not in done["blocks"] and load_file(file).keys() == {"1.1", "2.5"}
    assert files_with(tmp_path, traces(trained)) == set()
    line = refusal(
        "export", tmp_path / "out", "--node", "2:4", "--output", tmp_path / "none.safetensors", capsys=capsys
    )
    assert "none of these blocks was ever written" in line


@pytest.mark.parametrize("damage", ["flipped", "lost checksum"])
def test_a_block_that_is_damaged_can_be_deleted(damage, trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "model")
    path = tmp_path / "model" / "memory_bank" / "hier-ffn" / "level-2.safetensors"
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    (records,) = json.loads(content[8:header])["checksums"]["shape"]
    record_bytes = (len(content) - header - 4 * records) // records
    if damage == "flipped":
        content[header + 4 * records + 4 * record_bytes + 40] ^= 1
    else:
        content[header + 16 : header + 20] = bytes(4)
    path.write_bytes(content)
    line = refusal("delete", tmp_path / "model", "--node", "2:5", "--output", tmp_path / "no", capsys=capsys)
    assert "block 4 of bank file" in line and "or delete the block" in line
    done = run("delete", tmp_path / "model", "--node", "2:4", "--output", tmp_path / "out", capsys=capsys)
    assert done["blocks"] == ["2:4"] and bank_of(tmp_path / "out").deleted(2) == [4]


def test_a_block_that_is_deleted_twice_was_there_once(trained, tmp_path, capsys):
    run("delete", trained, "--node", "2:4", "--output", tmp_path / "out", capsys=capsys)
    again = run("delete", tmp_path / "out", "--node", "2:4", "--output", tmp_path / "again", capsys=capsys)
    assert again["blocks"] == []
    marks = numpy.array(bank_of(tmp_path / "again").deleted(2))
    assert marks.tolist() == [4]
