"""`midus look usage`, `ablation` and `values` of a model with chapters: tables, JSON, files, and what they refuse."""

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
    done = run("usage", model, *texts, "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert set(report) == {"model", "texts", "chapters", "not_counted"}
    sizes = {"documents": 3, "rows": 3, "tokens": 31}
    assert {name: {key: text[key] for key in sizes} for name, text in report["texts"].items()} == dict.fromkeys(
        READ, sizes
    )
    assert [of_layer["layer"] for of_layer in report["chapters"]] == LAYERS
    for of_layer in report["chapters"]:
        assert of_layer["mutual_information"] == pytest.approx(math.log(2))
        assert set(of_layer["texts"]["a"]) == {
            "tokens", "unguided_share", "read_shares", "entropy", "effective_chapters", "dead_chapters", "stability_within",
            "stability_between", "attention_mass", "shared_mass", "routed_mass", "added_to_attention", "added_to_residual",
        }  # fmt: skip
        assert {row["chapter"] for row in of_layer["typical"]["b"]} == {4, 5}
    limited = json.loads(run("usage", model, *texts, "--json", "--limit", 1, "--sequence-length", 6).out)
    assert limited["texts"]["a"] == {**limited["texts"]["a"], "documents": 1, "rows": 2, "tokens": 12}


def test_stats_as_a_table_and_files(run, model, texts, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"chapters.{kind}" for kind in ("html", "png", "csv", "json")]
    done = run("usage", model, *texts, *(word for file in files for word in ("--output", file)))
    assert done.status == 0, done.err
    assert (
        "2 of 5 routed chapters; entropy at most 1.609, information 0.693 nats" in done.out
        and "typical of a text" in done.out
        and "x 2.00" in done.out
    )
    page, picture, table, report = files
    assert picture.read_bytes().startswith(b"\x89PNG") and json.loads(report.read_text())["model"] == str(model)
    written = page.read_text()
    assert written.count("data:image/png;base64,") == 4 and "src=" not in written.replace('src="data:', "")
    assert all(f"chapters: {name}" in written for name in ("entropies", "shares", "specialisation"))
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(LAYERS) * 2 * CHAPTERS
    assert {row["chapter"] for row in rows if row["text"] == "a" and float(row["read_share"]) == 1} == {"0", "1", "2"}


def test_one_text_has_nothing_to_be_told_from(run, model, texts, tmp_path):
    pytest.importorskip("matplotlib")
    done = run("usage", model, *texts[:2], "--output", tmp_path / "page.html")
    assert done.status == 0 and "typical" not in done.out
    assert "specialisation" not in (tmp_path / "page.html").read_text()


def test_ablation_tells_of_each_chapter_and_text(run, model, texts, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"ablation.{kind}" for kind in ("json", "csv", "png", "html")]
    words = ["ablation", model, *texts, "--chapters", "0-1,3-4", "--layers", "0,2"]
    done = run(*words, *(word for file in files for word in ("--output", file)), "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert set(report) == {"model", "texts", "mode", "memory", "layers", "chapters"}
    moved = {
        row["chapter"]: {kind for kind in READ if row["effects"][kind]["difference"]} for row in report["chapters"]
    }
    assert moved == {0: {"a", "b"}, 1: {"a"}, 3: set(), 4: {"b"}}
    assert json.loads(files[0].read_text()) == report
    assert files[2].read_bytes().startswith(b"\x89PNG") and "What texts lose without a chapter" in files[3].read_text()
    with files[1].open() as file:
        assert len(list(csv.DictReader(file))) == 8
    table = run("ablation", model, *texts, "--mode", "swap-random", "--chapters", "1-5", "--top", 2).out
    assert "as it is" in table and "±" in table and " as " in table


def test_nearest_tokens_are_shown(run, model):
    done = run("values", model, "--chapters", "2", "--layers", "0", "--tokens", 3, "--rows", "--json")
    assert done.status == 0, done.err
    (chapter,) = json.loads(done.out)["chapters"]
    assert (chapter["layer"], chapter["chapter"]) == (0, 2)
    assert len(chapter["tokens"]) == 3 and [len(row) for row in chapter["rows"]] == [3] * 4
    done = run("values", model, "--chapters", "all")
    assert done.status == 0 and "a probe, no proof" in done.out and "'w" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["usage", "MODEL", "TEXT", "--memory", "other"], "memory is 'other'; expected one of: chapters."),
        (
            ["ablation", "MODEL", "TEXT", "--chapters", "6"],
            "chapters is '6'; expected numbers from 0 to 5, the model's.",
        ),
        (
            ["ablation", "MODEL", "TEXT", "--chapters", "all", "--layers", "1"],
            "layer is 1; expected one with chapters: 0, 2.",
        ),
        (
            ["ablation", "MODEL", "TEXT", "--chapters", "all", "--layers", "2,2"],
            "layers is '2,2', which names 2 twice; expected each once.",
        ),
        (
            ["ablation", "MODEL", "TEXT", "--chapters", "all", "--mode", "burn"],
            "mode is 'burn'; expected one of: zero, swap-random, drop.",
        ),
        (["values", "MODEL", "--chapters", "all", "--tokens", "0"], "tokens is 0; expected at least 1."),
        (
            ["ablation", "MODEL", "TEXT", "--mode", "drop"],
            "mode is 'drop', which is for chapters; give --chapters as well.",
        ),
        (
            ["ablation", "MODEL", "TEXT", "--chapters", "1", "--all"],
            "all is true and chapters are given; --all is for layers of",
        ),
        (["values", "MODEL", "--rows"], "rows is true, which is for chapters; give --chapters as well."),
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
    for words in (["ablation", tmp_path, *texts, "--chapters", "all"], ["values", tmp_path, "--chapters", "all"]):
        done = run(*words)
        assert done.status == 2
        assert "this llama model has no memory of chapters; expected one upscaled with" in done.err.splitlines()[-1]
