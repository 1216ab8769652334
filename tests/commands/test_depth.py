"""`midus look depth`: tables, JSON, files, and what it refuses."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from models.depth_models import depth_model
from tiny import save_tiny_model
from training.tiny_run import document, tiny_tokenizer

HEADS = 4


def save(folder, **options):
    depth_model(dtype=torch.float32, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), kind="reused")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": document(length, length)}) for length in (20, 12, 7)))
    return path


@pytest.fixture
def run(as_command) -> Callable[..., SimpleNamespace]:
    return as_command("midus look depth")


def test_json_is_all_there_is_to_know(run, model, text):
    done = run(model, "--text", text, "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert set(report) == {"model", "texts", "layers", "writers"}
    read = report["texts"]["text.jsonl"]
    assert {**read, "loss": 0} == {"documents": 3, "rows": 3, "tokens": 39, "loss": 0}
    assert [of_layer["layer"] for of_layer in report["layers"]] == [1, 2, 3]
    first = report["layers"][0]
    assert first["slots"] == [{"source": "attention", "layer": 0}, {"source": "ffn", "layer": 0}]
    assert first["tokens"] == 39 and first["heads"] == list(range(HEADS)) and first["memory"] == "depth-attention"
    for of_layer in report["layers"]:
        assert of_layer["depth_shares"] == pytest.approx(list(map(sum, of_layer["shares"])))
        assert all(0 < share < 1 for share in of_layer["depth_shares"]) and min(of_layer["gates"]) > 0.19
        both = [sum(pair) for pair in zip(of_layer["depth_shares"], of_layer["sequence_shares"], strict=True)]
        assert both == pytest.approx([1.0] * HEADS)
    assert {(writer["layer"], writer["source"]) for writer in report["writers"]} == {
        (layer, source) for layer in range(3) for source in ("attention", "ffn")
    }
    limited = json.loads(run(model, "--text", text, "--json", "--limit", 1, "--sequence-length", 6).out)
    read = limited["texts"]["text.jsonl"]
    assert read == {**read, "documents": 1, "rows": 4, "tokens": 20}
    some = json.loads(run(model, "--text", text, "--json", "--layers", "2-3", "--heads", "1").out)
    assert [(of_layer["layer"], of_layer["heads"]) for of_layer in some["layers"]] == [(2, [1]), (3, [1])]
    assert some["layers"][0]["shares"] == [pytest.approx(report["layers"][1]["shares"][1])]


def test_tables_tell_layers_and_writers(run, model, text):
    done = run(model, "--text", text)
    assert done.status == 0, done.err
    report = json.loads(run(model, "--text", text, "--json").out)
    first, best = report["layers"][0], report["writers"][0]
    lines = done.out.splitlines()
    mean, most = sum(first["depth_shares"]) / HEADS, max(first["depth_shares"])
    (of_first,) = [line for line in lines if line.strip().startswith("1 ") and " to " in line]
    assert f" {mean:.1%} " in of_first and f" {most:.1%} ({first['depth_shares'].index(most)})" in of_first
    assert f"{min(first['gates']):.3g} to {max(first['gates']):.3g}" in of_first
    assert f" {sum(first['sequence_shares']) / HEADS:.1%} " in of_first
    behind = lines[next(number for number, line in enumerate(lines) if "Slots that are read most" in line) :]
    told = behind[3].split()
    assert told[:4] == [str(best["layer"]), best["source"], str(best["readers"]), f"{best['mean_share']:.2%}"]


@pytest.mark.parametrize("kind", ["default", "reused"])
def test_pictures_and_a_page(run, text, tmp_path, kind):
    pytest.importorskip("matplotlib")
    model = save(tmp_path / "model", kind=kind)
    picture, page = tmp_path / "depth.png", tmp_path / "depth.html"
    done = run(model, "--text", text, "--output", picture, "--output", page)
    assert done.status == 0, done.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = page.read_text()
    assert told.count("data:image/png;base64,") == 2 and "src=" not in told.replace('src="data:', "")
    assert "39 tokens" in told and "Slots that are read most" in told
    done = run(model, "--text", text, "--output", page, "--layers", "3", "--heads", "1", "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["texts"]["text.jsonl"]["tokens"] == report["layers"][0]["tokens"] == 39
    assert "Layer 3, head 1: tokens by keys and slots" in page.read_text()


def test_a_model_that_does_not_read_the_depth_yet_is_told_of(run, text, tmp_path):
    pytest.importorskip("matplotlib")
    model = save(tmp_path / "model", kind="reused", acting=False)
    done = run(model, "--text", text, "--output", tmp_path / "depth.png")
    assert done.status == 0, done.err
    assert done.out.count(" 0 to 0 ") == 3 and done.out.count("nothing") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "TEXT", "--memory", "other"], "memory is 'other'; expected one of: depth-attention."),
        (["MODEL", "TEXT", "--layers", "0"], "layer is 0; expected one that reads the depth: 1, 2, 3."),
        (["MODEL", "TEXT", "--layers", "4"], "layers is '4'; expected numbers from 0 to 3, the model's."),
        (["MODEL", "TEXT", "--heads", "4"], "heads is '4'; expected numbers from 0 to 3, the model's."),
        (["MODEL", "TEXT", "--text", "b=README.md"], "2 texts are given; expected one to read the depth with."),
    ],
)  # fmt: skip
def test_a_wrong_request_is_told_in_one_line(run, model, text, words, message):
    pytest.importorskip("matplotlib")
    replaced = {"MODEL": [model], "TEXT": ["--text", text]}
    done = run(*[part for word in words for part in replaced.get(word, [word])], "--device", "cpu")
    assert (done.status, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith(f"midus look depth: {message}"), done.err


def test_a_model_that_has_no_such_memory_is_refused(run, text, tmp_path):
    save_tiny_model("llama", tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    done = run(tmp_path, "--text", text)
    assert done.status == 2
    assert "this llama model has no memory that reads the depth; expected one upscaled" in done.err.splitlines()[-1]
