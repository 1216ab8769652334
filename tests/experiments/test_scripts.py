"""The scripts of experiments on a tiny model: several texts in turn, and a training loop of one's own."""

import dataclasses
import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from compare.small_comparison import HEADWISE, keys, write_room
from pairs import by_default
from topics.tiny_bert import save_tiny_bert
from transformers import AutoTokenizer

from experiments import curve, own_training, stages
from experiments.facts import __main__ as facts

WORDS = {"greek": ("alpha", "beta", "gamma", "delta"), "numbers": ("one", "two", "three", "four")}
ENGRAM = '{method: engram, options: {table: exact, corpus: "{corpus}", width: 8, layers: [0], compress: false}}'
WAYS = {
    "in order": [],
    "replay": ["--replay", "0.5"],
    "routed": ["--routed", "BERT"],
    "a memory each": ["--upscale", ENGRAM, "--protect-earlier"],
}


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """A base, an embedding model, and for each of two stages a corpus, a validation text and a text, of some documents each."""
    folder, choice = write_room(tmp_path_factory.mktemp("room")), random.Random(0)
    for stage, words in WORDS.items():
        (folder / stage).mkdir()
        for part, documents in (("corpus", 12), ("validation", 3), ("text", 3)):
            rows = [{"text": " ".join(choice.choice(words) for _ in range(20))} for _ in range(documents)]
            path = folder / stage / f"{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tiny_bert(folder / "bert")
    return folder


@pytest.fixture(scope="module")
def learned(room, tmp_path_factory):
    """Return a function that learns both stages in one of the ways, and returns the lines of the result."""
    done: dict[str, list] = {}

    def learn(way: str, capsys, monkeypatch) -> list[dict]:
        if way not in done:
            words = [str(room / name) for name in ("base", *WORDS)] + ["--retention", str(room / "stars.txt")]
            words += ["--output", str(tmp_path_factory.mktemp("out") / "new"), "--train", "bf16=false"]
            words += "learning_rate=1e-2 max_steps=2 sequence_length=32 per_device_train_batch_size=2".split()
            words += [str(room / "bert") if word == "BERT" else word for word in WAYS[way]]
            monkeypatch.setattr(sys, "argv", ["stages", *words])
            capsys.readouterr()
            stages.main()
            done[way] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return done[way]

    return learn


@pytest.mark.parametrize("way", by_default(["routed", "a memory each"], WAYS))
def test_stages_are_measured_after_each(learned, way, capsys, monkeypatch):
    base, *after, end = learned(way, capsys, monkeypatch)
    assert [base["after"], *(line["after"] for line in after)] == ["base", *WORDS]
    assert [line["tokens"] for line in after] == [128, 128]
    assert end["gains"]["greek"] > 0
    assert after[0]["losses"]["greek"] < base["losses"]["greek"]
    assert end["backward_transfer"] == after[0]["losses"]["greek"] - after[1]["losses"]["greek"]
    if way == "replay":
        without = learned("in order", capsys, monkeypatch)
        assert after[0] == without[1]
        assert after[1]["losses"]["greek"] < without[2]["losses"]["greek"]
    if way == "routed":
        assert end["at_their_stage"]["greek"] == 1.0
    if way == "a memory each":  # what the second stage learned reads no n-gram of the first one's corpus
        assert end["backward_transfer"] == 0.0
        assert after[0]["losses"]["numbers"] == base["losses"]["numbers"]


@pytest.mark.parametrize(("share", "counts"), [(0.2, [20, 82]), (0.5, [50, 52])])
def test_share_of_tokens_comes_from_earlier_corpora(room, tmp_path, share, counts):
    tokenizer = AutoTokenizer.from_pretrained(room / "base")
    corpora = [["a" * 7] * 3, ["b" * 9] * 40]
    assert stages.write_replayed(tmp_path / "out.jsonl", corpora, share, 100, tokenizer, 0) == counts
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    # With the token that training puts after each document.
    assert [sum(len(text) + 1 for text in texts if text[0] == letter) for letter in "ab"] == counts


def test_own_loop_is_measured(room, tmp_path, capsys, monkeypatch):
    words = [str(room / "base"), str(room / "greek"), "--output", str(tmp_path / "out"), "--rate", "0.5"]
    monkeypatch.setattr(sys, "argv", ["own_training", *words, "--steps", "4", "--sequence-length", "32"])
    own_training.main()
    result = json.loads(capsys.readouterr().out)
    assert result["after"]["greek"] < result["before"]["greek"]
    assert result["tokens"] == 4 * 4 * 32


@pytest.fixture
def draw_curve(room, tmp_path, capsys, monkeypatch):
    """Return a function that runs `experiments.curve` on a small comparison in this process, and returns its results by name."""
    pytest.importorskip("matplotlib")
    variants = {
        "full": {"rates": [0.02, 0.01]},
        "midus-hml": {"upscale": HEADWISE, "rates": [{"learning_rate": 0.01, "value_learning_rate": 0.02}]},
    }
    train = {"corpus": str(room / "greek" / "corpus.jsonl"), "max_steps": 6, "lr_scheduler_type": "constant"}
    monkeypatch.setattr(curve, "ProcessPoolExecutor", lambda count, _: ThreadPoolExecutor(count))

    def run(name: str, *words: str) -> dict[str, curve.Result]:
        comparison = keys(room, tmp_path / name, variants, train=train, controls=False)
        (tmp_path / "curve.yaml").write_text(yaml.safe_dump(comparison))
        monkeypatch.setattr(sys, "argv", ["curve", str(tmp_path / "curve.yaml"), *words])
        with pytest.raises(SystemExit, match="0"):
            curve.main()
        runs = tmp_path / name / "runs"
        files = [path.with_suffix("") for path in runs.rglob("seed-*.json")]
        return {str(path.relative_to(runs)): curve.read_result(path) for path in files}

    return run


def test_resumed_curve_measures_as_one_run(draw_curve, tmp_path, capsys, monkeypatch):
    models = ["--models", str(tmp_path / "models"), "--steps", "1", "3"]
    first = draw_curve("stops", *models, "--ends", "2")
    assert {len(result.curve) for result in first.values()} == {3}
    second = draw_curve("stops", *models, "--ends", "2", "4")
    whole = draw_curve("whole", "--models", str(tmp_path / "others"), "--steps", "1", "2", "3", "--ends", "4")
    assert sorted(second) == ["full/0.01/seed-0", "full/0.02/seed-0", "midus-hml/0.01,value=0.02/seed-0"]
    for name, result in second.items():
        assert [point.step for point in result.curve] == [0, 1, 2, 3, 4]
        assert result.curve == whole[name].curve
        assert result.curve[:3] == first[name].curve
        assert result.tokens == 4 * 64
        assert result.losses["plants"] < result.start.losses["plants"]
    assert second["midus-hml/0.01,value=0.02/seed-0"].starts_at_base
    capsys.readouterr()
    draw_curve("stops", *models, "--ends", "2", "4")
    assert capsys.readouterr().out == ""  # nothing is trained again
    monkeypatch.setattr(sys, "argv", ["curve", str(tmp_path / "curve.yaml"), "--picture", str(tmp_path / "curve.png")])
    curve.main()
    heading, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert heading == ["one pass", "rate", "seeds", "64", "128", "192", "256", "stars, 64", "stars, 256"]
    assert [row[:3] for row in rows] == [["full", "0.02", "0"], ["full", "0.01", "0"], ["midus-hml", "0.02", "0"]]
    falls = [point.losses["plants"] for point in second["full/0.02/seed-0"].curve]
    assert rows[0][3:7] == [f"{falls[0] - loss:.3f}" for loss in falls[1:]]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_curve_table_has_means_of_the_seeds_that_came_so_far(draw_curve, tmp_path):
    results = draw_curve("runs", "--models", str(tmp_path / "models"), "--steps", "1", "--ends", "2")
    one, other = results["full/0.02/seed-0"], results["full/0.01/seed-0"]
    again = dataclasses.replace(other, rate=one.rate, seed=1, curve=other.curve[:2])
    comparison = curve.options_from_files(curve.Comparison, [tmp_path / "curve.yaml"])
    _, row = curve.table_rows(comparison, [one, again])
    (start, *falls), (start_again, fall) = ([point.losses["plants"] for point in run.curve] for run in (one, again))
    mean = (start - falls[0] + start_again - fall) / 2
    assert row[:5] == ["full", "0.02", "0, 1", f"{mean:.3f}", f"{start - falls[1]:.3f}"]


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("stages", "BASE ROOM/greek ROOM/absent --output ROOM/new --train max_steps=1", "no file .*absent/corpus.jsonl; expected"),
        ("stages", "BASE ROOM/greek --output ROOM/greek --train max_steps=1", "--output is '.*greek', which exists; expected a new"),
        ("stages", "BASE ROOM/greek --output ROOM/new --retention x.txt --train max_steps=1", "--retention is 'x.txt', which does"),
        ("own_training", "BASE ROOM/absent --output ROOM/new", "no file .*absent/corpus.jsonl; expected the folder of a stage"),
        ("curve", "ROOM/absent.yaml --set base=BASE", "expected --models, the folder to train in, or --picture, the file to dr"),
        ("curve", "ROOM/absent.yaml --set base=BASE --models ROOM/new", ".*absent.yaml"),
        ("facts", "ROOM/absent", "model is '.*absent', which does not exist; expected the folder of a model"),
        ("facts", "BASE --entries 3", "--entries is for beliefs; expected --about beliefs, or a file of edits"),
        ("facts", "BASE --at-most 0", "--at-most is 0; expected 1 or more questions of a kind, and not of beliefs"),
        ("facts", "BASE --at-most 9 --about beliefs", "--at-most is 9; expected 1 or more questions of a kind"),
    ],
)  # fmt: skip
def test_missing_inputs_are_refused_in_a_line(script, words, message, room, capsys, monkeypatch):
    line = words.replace("BASE", str(room / "base")).replace("ROOM", str(room)).split()
    monkeypatch.setattr(sys, "argv", [script, *line])
    with pytest.raises(SystemExit, match="2"):
        {"curve": curve, "stages": stages, "own_training": own_training, "facts": facts}[script].main()
    assert re.search(f"error: {message}", capsys.readouterr().err)
