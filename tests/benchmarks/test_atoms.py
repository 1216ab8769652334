"""The blocking curve of atomic numbers: which commands are given, what is told of them, and the picture."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")

from benchmarks import atoms, atoms_picture
from benchmarks.tracked import read

QUESTIONS = [{"name": "hydrogen", "number": 1}, {"name": "tungsten", "number": 74}]
FACTS = [{"name": row["name"], "text": f"{row['name']} {number}"} for row in QUESTIONS for number in range(3)]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that were given, none of which is run; accuracies and losses follow from what is blocked."""
    (tmp_path / "elements").mkdir()
    for name, rows in (("atomic_numbers.jsonl", QUESTIONS), ("facts.jsonl", FACTS)):
        (tmp_path / "elements" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = []

    def run_command(command, *words):
        words = [str(word) for word in words]
        given.append([command, *words])
        if command == "midus-cluster" and words[0] == "build":
            tree = tmp_path / "work" / "tree"
            tree.mkdir()
            (tree / "tree.json").write_text('{"branching": 4}')
        if command == "midus-eval":
            blocked = int(words[words.index("--block-best") + 1][2:]) if "--block-best" in words else 9
            measured = {"perplexity": {"perplexity": 2.0 + blocked}}
            measured["tasks"] = {"atomic_numbers": {"exact_match,first-integer": 1 / (1 + blocked)}}
            return json.dumps({"models": [measured]})
        return ""

    def run_once(output, *words):
        run_command(*words)
        output.mkdir()
        (output / "upscale.json").write_text('{"parameters": {"fetched": 7, "bank": 70}}')

    monkeypatch.setattr(atoms, "run_command", run_command)
    monkeypatch.setattr(atoms, "run_once", run_once)
    monkeypatch.setattr(atoms, "elements", lambda: tmp_path / "elements")
    monkeypatch.setattr(atoms, "minilm", lambda: tmp_path / "minilm")
    monkeypatch.setattr(atoms, "smollm2_135m", lambda: tmp_path / "base")
    monkeypatch.setattr(atoms, "ATOMS_RESULTS", tmp_path / "atoms.csv")
    return given


def test_every_arm_is_measured_and_fetched_blocks_while_they_are_blocked(commands, tmp_path, monkeypatch, capsys):
    words = ["--work", str(tmp_path / "work"), "--blocked", "1:0,2:1,1:2", "--picture", str(tmp_path / "a.svg")]
    monkeypatch.setattr(sys, "argv", ["atoms", *words])
    atoms.main()
    rows = read(tmp_path / "atoms.csv")
    found = [(row["arm"], int(row["level"]), int(row["blocked"]), int(row["nodes"])) for row in rows]
    assert found == [
        ("base", 1, 0, 4),
        ("fetched", 1, 0, 4),
        ("fetched", 2, 1, 16),
        ("fetched", 1, 2, 4),
        ("generic", 1, 0, 4),
    ]
    assert [float(row["accuracy"]) for row in rows] == pytest.approx([0.1, 1, 1 / 2, 1 / 3, 0.1])
    assert "| fetched | 2 of 4 nodes of level 1 | 0.333 | 1.3863 |" in capsys.readouterr().out.splitlines()
    evaluations = [words for words in commands if words[0] == "midus-eval"]
    assert ["--retriever" in words for words in evaluations] == [False, True, True, True, False]
    assert ["--apart" in words for words in evaluations] == [True, False, False, False, True]
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_tree_is_built_of_the_first_sentence_of_each_element(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["atoms", "--work", str(tmp_path / "work"), "--no-append"])
    atoms.main()
    texts = [json.loads(line)["text"] for line in (tmp_path / "work" / "first-facts.jsonl").read_text().splitlines()]
    assert texts == ["hydrogen 0", "tungsten 0"]
    asked = [json.loads(line)["text"] for line in (tmp_path / "work" / "sentences.jsonl").read_text().splitlines()]
    assert asked == ["The atomic number of hydrogen is 1.", "The atomic number of tungsten is 74."]
    assert not (tmp_path / "atoms.csv").exists()


def test_a_picture_has_the_share_of_the_tree_that_is_blocked(tmp_path):
    rows = [{"arm": "base", "blocked": 0, "nodes": 16, "accuracy": 0.1, "loss": 2.0}]
    rows += [
        {"arm": "fetched", "blocked": blocked, "nodes": nodes, "accuracy": 0.5, "loss": 1.0}
        for nodes, blocked in ((16, 0), (256, 1), (16, 1), (16, 4))
    ]
    atoms_picture.draw_blocking(rows, tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for words in ("1/256", "1/16", "1/4", "fetched", "base", "atomic numbers, share that is right"):
        assert f"<!-- {words} -->" in picture
