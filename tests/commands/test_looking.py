"""`midus look chapters`, `ablate` and `nearest`: tables, JSON, files, and what they refuse."""

import csv
import json
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from analysis.chapter_models import CHAPTERS, LAYERS, READ, routed_model, rows_of
from tiny import save_tiny_model
from training.tiny_run import tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    routed_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A text of each kind of token, as the words that give it."""
    words = []
    for kind in READ:
        path = tmp_path_factory.mktemp("texts") / f"{kind}.jsonl"
        lines = [" ".join(f"w{id}" for id in row.tolist()) for row in rows_of(kind).rows]
        path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
        words += ["--text", f"{kind}={path}"]
    return words


@pytest.fixture
def run(as_command) -> Callable[..., SimpleNamespace]:
    return as_command("midus look")


def test_stats_as_json_are_all_there_is_to_know(run, model, texts):
    done = run("chapters", model, *texts, "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert set(report) == {"model", "texts", "layers"}
    assert {name: {**text, "loss": 0} for name, text in report["texts"].items()} == {
        kind: {"documents": 3, "rows": 3, "tokens": 31, "loss": 0} for kind in READ
    }
    assert [of_layer["layer"] for of_layer in report["layers"]] == LAYERS
    for of_layer in report["layers"]:
        assert of_layer["mutual_information"] == pytest.approx(math.log(2))
        assert set(of_layer["texts"]["a"]) == {
            "tokens", "unguided_share", "read_shares", "entropy", "effective_chapters", "dead_chapters", "stability_within",
            "stability_between", "attention_mass", "shared_mass", "routed_mass", "added_to_attention", "added_to_residual",
        }  # fmt: skip
        assert {row["chapter"] for row in of_layer["typical"]["b"]} == {4, 5}
    limited = json.loads(run("chapters", model, *texts, "--json", "--limit", 1, "--sequence-length", 6).out)
    assert limited["texts"]["a"] == {**limited["texts"]["a"], "documents": 1, "rows": 2, "tokens": 12}


def test_stats_as_a_table_and_a_folder(run, model, texts, tmp_path):
    pytest.importorskip("matplotlib")
    done = run("chapters", model, *texts, "--output", tmp_path / "new" / "folder")
    assert done.status == 0, done.err
    assert (
        "2 of 5 routed chapters; entropy at most 1.609, information 0.693 nats" in done.out
        and "typical of a text" in done.out
        and "x 2.00" in done.out
    )
    folder = tmp_path / "new" / "folder"
    pictures = {f"chapters-{name}.png" for name in ("entropies", "shares", "specialisation")}
    assert {path.name for path in folder.iterdir()} == {"stats.json", "stats.csv", "report.html", *pictures}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "src=" not in page.replace('src="data:', "")
    with (folder / "stats.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(LAYERS) * 2 * CHAPTERS
    assert {row["chapter"] for row in rows if row["text"] == "a" and float(row["read_share"]) == 1} == {"0", "1", "2"}
    assert json.loads((folder / "stats.json").read_text())["model"] == str(model)


def test_one_text_has_nothing_to_be_told_from(run, model, texts, tmp_path):
    pytest.importorskip("matplotlib")
    done = run("chapters", model, *texts[:2], "--output", tmp_path / "folder")
    assert done.status == 0 and "typical" not in done.out
    assert not (tmp_path / "folder" / "chapters-specialisation.png").exists()


def test_ablation_tells_of_each_chapter_and_text(run, model, texts, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["ablate", model, *texts, "--chapters", "0-1,3-4", "--layers", "0,2", "--output", tmp_path / "folder"]
    done = run(*words, "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert set(report) == {"model", "texts", "mode", "memory", "layers", "chapters"}
    moved = {
        row["chapter"]: {kind for kind in READ if row["effects"][kind]["difference"]} for row in report["chapters"]
    }
    assert moved == {0: {"a", "b"}, 1: {"a"}, 3: set(), 4: {"b"}}
    folder = tmp_path / "folder"
    assert {path.name for path in folder.iterdir()} == {"ablation.json", "ablation.csv", "ablation.png", "report.html"}
    assert json.loads((folder / "ablation.json").read_text()) == report
    with (folder / "ablation.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8
    table = run("ablate", model, *texts, "--mode", "swap-random", "--chapters", "1-5", "--top", 2).out
    assert "as it is" in table and "±" in table and " as " in table


def test_nearest_tokens_are_shown(run, model):
    done = run("nearest", model, "--chapters", "2", "--layers", "0", "--top", 3, "--rows", "--json")
    assert done.status == 0, done.err
    (chapter,) = json.loads(done.out)["chapters"]
    assert (chapter["layer"], chapter["chapter"]) == (0, 2)
    assert len(chapter["tokens"]) == 3 and [len(row) for row in chapter["rows"]] == [3] * 4
    done = run("nearest", model)
    assert done.status == 0 and "a probe, no proof" in done.out and "'w" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chapters", "MODEL", "TEXT", "--memory", "other"], "memory is 'other'; expected one of: chapters."),
        (
            ["ablate", "MODEL", "TEXT", "--chapters", "6"],
            "chapters is '6'; expected numbers from 0 to 5, the model's.",
        ),
        (["ablate", "MODEL", "TEXT", "--layers", "1"], "layer is 1; expected one with chapters: 0, 2."),
        (["ablate", "MODEL", "TEXT", "--layers", "2,2"], "layers is '2,2', which names 2 twice; expected each once."),
        (["ablate", "MODEL", "TEXT", "--mode", "burn"], "mode is 'burn'; expected one of: zero, swap-random, drop."),
        (["nearest", "MODEL", "--top", "0"], "top is 0; expected at least 1."),
    ],
)
def test_a_wrong_request_is_told_in_one_line(run, model, texts, words, message):
    replaced = {"MODEL": [model], "TEXT": texts[:2]}
    done = run(*[part for word in words for part in replaced.get(word, [word])], "--device", "cpu")
    assert (done.status, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith(f"midus look {words[0]}: {message}"), done.err


def test_a_model_without_chapters_is_refused(run, texts, tmp_path):
    save_tiny_model("llama", tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for words in (["chapters", tmp_path, *texts], ["ablate", tmp_path, *texts], ["nearest", tmp_path]):
        done = run(*words)
        assert done.status == 2
        assert "this llama model has no memory of chapters; expected one upscaled with" in done.err.splitlines()[-1]


def test_a_folder_of_pictures_must_be_new(run, model, texts, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    done = run("chapters", model, *texts, "--output", tmp_path)
    assert done.status == 2 and "which exists and is no empty folder; name another." in done.err
