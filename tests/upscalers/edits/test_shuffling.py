"""`upscale shuffle`: which rows move, what stays as it was, what the result says of itself, and what is refused."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.upscalers.checkpoints import config_of, logits, read_tensors, record_of
from tests.upscalers.edits.test_chapters import give_values
from upscalers.edits.checkpoint_edit import row_order, shuffle
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

# A memory with a layer of its own, attached ones, and tables that layers share.
KINDS = {
    "inserted": ("midus-hml", {"n": 4, "k": 2}),
    "attached": ("ultramem-v2", {"n": 8, "k": 4}),
    "shared": ("ultramem-v2", {"n": 8, "k": 4, "share": "ring:2"}),
    "chapters": ("moc", {"memory_tokens": 12, "chapters": 6, "k": 2, "share": "every:1"}),
}


def is_table(name: str) -> bool:
    return name.endswith(("value_bank", "value_table", ".bank"))


@pytest.fixture(scope="module")
def make(shared_base, tmp_path_factory):
    """An upscaled checkpoint, as training leaves it: with values in its tables; read-only."""

    @cache
    def made(kind: str) -> Path:
        (method, options), folder = KINDS[kind], tmp_path_factory.mktemp("made") / "trained"
        upscale(base=shared_base("llama"), method=method, output=folder, options=options, verify=False)
        give_values(folder)
        return folder

    return made


def moved_rows(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """For each place of a table, the row that came to it."""
    result = [[int(match) for match in (before == row).all(-1).nonzero()] for row in after]
    assert all(len(matches) == 1 for matches in result)
    return [match for (match,) in result]


@pytest.mark.parametrize("kind", KINDS)
def test_shuffle_moves_every_row_of_values_only(kind, make, tmp_path, command):
    trained, output = make(kind), tmp_path / "out"
    done = command("shuffle", trained, "--output", output, "--seed", 5, "--json").json()
    before, after = read_tensors(trained), read_tensors(output)
    assert before.keys() == after.keys()
    orders = {}
    for name, tensor in before.items():
        if not is_table(name):
            assert torch.equal(after[name], tensor), name
            continue
        tables = zip(tensor.view(-1, *tensor.shape[-2:]), after[name].view(-1, *tensor.shape[-2:]), strict=True)
        orders.setdefault(name.rpartition(".")[0], []).extend(tuple(moved_rows(*pair)) for pair in tables)
    # Rows of one position stay together, such as pre-values with their values; tables of other layers have another order.
    assert all(len({*of_position}) == 1 for of_position in orders.values())
    different = {of_position[0] for of_position in orders.values()}
    assert len(different) == len(orders) and (len(orders) > 1) == (kind in ("inserted", "attached"))
    for order in different:
        assert sorted(order) == list(range(len(order))) and all(row != place for place, row in enumerate(order))
    assert not torch.equal(logits(output), logits(trained))
    tables = sum(map(is_table, before))
    assert (done["seed"], done["tables"], done["command"]) == (5, tables, "shuffle")
    config, record = config_of(output), record_of(output)
    (shuffled,) = config["upscale"].pop("edits")
    assert record["edits"] == inspect_checkpoint(output)["edits"] == [shuffled]
    assert (shuffled["seed"], shuffled["memories"]) == (5, done["memories"])
    assert record["identity"] == {"checked": None, "max_abs_diff": None} and record["promises_identity"] is False
    assert config == config_of(trained)
    assert f"- shuffle of {done['memories'][0]}, seed 5, tables {tables}" in (output / "README.md").read_text()


@pytest.mark.parametrize("rows", [2, 3, 50])
def test_row_order_moves_every_row(rows):
    for seed in range(20):
        order = row_order(rows, seed)
        assert sorted(order.tolist()) == list(range(rows)) and torch.equal(order, row_order(rows, seed))
        assert not (order == torch.arange(rows)).any()
    assert rows < 50 or not torch.equal(order, row_order(rows, 20))


def test_shuffled_base_memory_is_warned_of_and_stays(make, tmp_path, command):
    method, options = KINDS["inserted"]
    upscale(base=make("attached"), method=method, output=tmp_path / "twice", options=options, verify=False)
    done = command("shuffle", tmp_path / "twice", "--output", tmp_path / "out", "--json")
    assert done.status == 0 and done.json()["memories"] == ["ultramem", "midus-hml"]
    assert "the base that strip restores has the edit too" in done.err
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"] is False
    assert [one["memories"] for one in inspect_checkpoint(tmp_path / "stripped")["edits"]] == [["ultramem"]]


def test_shuffle_without_rows_of_values_is_refused(base, tmp_path):
    upscale(base=base, method="llama-pro", output=tmp_path / "dense", verify=False)
    upscale(base=base, method="midus-hml", output=tmp_path / "one", options={"n": 1, "k": 1}, verify=False)
    for folder in (tmp_path / "dense", tmp_path / "one", base):
        with pytest.raises(
            ValueError, match=r"has no table of values with a row for each .*; expected a model with a"
        ):
            shuffle(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
