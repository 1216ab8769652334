"""What memory costs is measured against the anchor: which rows there are, of what, and that a ratio is of one round."""

import pytest
import torch
from tiny import save_tiny_model

from benchmarks import serving_cost, tracked
from midus_hf.config.fetched_blocks import FetchedBlocks


@pytest.fixture
def rows(tmp_path, monkeypatch, capsys):
    """Runs the command on a tiny anchor; gives the rows that it appended."""
    base = save_tiny_model("llama", tmp_path / "base")
    monkeypatch.setattr(serving_cost, "SERVING_RESULTS", tmp_path / "serving.csv")

    def run(*options):
        sizes = ["--base", str(base), "--sizes", "4,2,1", "--batch", "3", "--prompt", "5", "--new", "4"]
        words = [
            "serving_cost",
            "--work",
            str(tmp_path / "work"),
            *sizes,
            "--sequences",
            "2",
            "--length",
            "6",
            *options,
        ]
        monkeypatch.setattr("sys.argv", words)
        serving_cost.main()
        assert not (tmp_path / "work").exists()
        return tracked.read(tmp_path / "serving.csv")

    return run


def test_every_part_has_a_row(rows, capsys):
    found = rows("--rounds", "2")
    parts = [(row["part"], row["paths"], row["batch"], row["tokens"]) for row in found]
    assert parts == [
        ("generate", "one", "1", "4"),
        ("generate", "one", "3", "12"),
        ("generate", "each its own", "3", "12"),
        ("train, frozen", "each its own", "2", "12"),
        ("train, all", "each its own", "2", "12"),
    ]
    for row in found:
        numbers = [float(row[name]) for name in ("ratio_p20", "ratio", "ratio_p80", "anchor_ms", "memory_ms")]
        assert min(numbers) > 0 and numbers[:3] == sorted(numbers[:3]) and row["rounds"] == "2"
        assert int(row["fetched"]) == 3 * 32 * 4 * (4 + 2 + 1)
    assert capsys.readouterr().out.count("\n| ") == 5


@pytest.mark.parametrize(("part", "count"), [("generate", 3), ("train", 2)])
def test_one_part_can_be_asked_for_and_nothing_appended(part, count, rows, capsys):
    assert rows("--rounds", "1", "--part", part, "--no-append") == []
    assert capsys.readouterr().out.count("\n| ") == count


def test_a_ratio_is_of_times_in_one_round_and_the_first_round_warms_up(monkeypatch):
    """Of rounds in which everything takes ten times as long, the ratio is the same."""
    slow = iter([7.0, 70.0, 1.0, 2.0, 20.0, 10.0, 1.0, 2.0])  # the order changes from round to round
    monkeypatch.setattr(serving_cost, "_milliseconds", lambda run, device, clock: next(slow))
    run = tracked.this_run("cpu")
    anchor = torch.nn.Linear(2, 3)
    models = type("Models", (), {"anchor": anchor, "fetched": 4})()
    arguments = type("Arguments", (), {"rounds": 3, "dtype": "float32", "device": "cpu", "clock": "wall"})()
    row = serving_cost._row(run, models, arguments, ("generate", "one", 1, 2), (lambda: None, lambda: None))
    assert (row.ratio, row.ratio_p20, row.ratio_p80) == (2.0, 2.0, 2.0)
    assert (row.anchor_ms, row.memory_ms, row.parameters, row.rounds) == (1.0, 2.0, 9, 3)


@pytest.mark.parametrize("clock", ["wall", "processor"])
def test_the_clock_is_told(clock, rows):
    assert {row["clock"] for row in rows("--rounds", "1", "--part", "generate", "--clock", clock)} == {clock}


def test_paths_of_rows_are_of_one_leaf_or_share_nothing(tmp_path):
    layout = type("Layout", (), {"blocks": FetchedBlocks(16, ({}, {}, {}))})()
    banks = type("Banks", (), {"layouts": {"hier-ffn": layout}})()
    models = serving_cost.Models(None, type("Model", (), {"banks": banks})(), tmp_path)
    assert models.paths(3, "one").tolist() == [[0, 0, 0]] * 3
    apart = models.paths(3, "each its own").tolist()
    assert all(len({path[level] for path in apart}) == 3 for level in range(3))
