"""`midus look usage`: the table, the JSON, the files, and what it refuses."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from analysis.memory_models import write_text
from safetensors.torch import load_file, save_file
from training.tiny_run import NEW_LAYERS, save_upscaled
from transformers import AutoModelForCausalLM

from midus_hf.analysis.slots.report import usage_curves
from midus_hf.analysis.slots.usage import counted_types, record_usage
from midus_hf.cli.look import main
from upscalers.runs.upscale import upscale


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_upscaled("llama", tmp_path_factory.mktemp("upscaled"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def test_it_prints_a_row_per_layer_and_writes_files(model, text, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"usage.{kind}" for kind in ("png", "pdf", "html", "csv", "json")]
    words = ["usage", str(model), "--text", str(text), "--sequence-length", "32"]
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*words, *(word for file in files for word in ("--output", str(file)))]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith("text.txt")]
    assert [int(row[1]) for row in rows] == NEW_LAYERS
    assert "read text.txt (200 tokens, loss " in printed
    picture, pdf, page, table, report = (file.read_bytes() for file in files)
    assert picture.startswith(b"\x89PNG") and pdf.startswith(b"%PDF-") and b"data:image/png;base64," in page
    assert table.count(b"\n") == 1 + len(NEW_LAYERS) * 4 * 64 and json.loads(report)["model"] == str(model)


def test_json_says_what_the_model_retrieved(model, text, capsys):
    assert (
        main(["usage", str(model), "--text", str(text), "--sequence-length", "20", "--max-tokens", "40", "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    read = report["texts"]["text.txt"]
    assert read["tokens"] == 40 and report["model"] == str(model)
    assert list(read["layers"]) == [str(layer) for layer in NEW_LAYERS]
    for layer in read["layers"].values():
        assert 0 < layer["used"] <= 1 and 0 < layer["largest"] <= 1 and 1 / 64 <= layer["perplexity"] <= 1


def test_a_checkpoint_that_lacks_a_tensor_is_refused(model, text, tmp_path, capsys):
    lacking = shutil.copytree(model, tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors[f"model.layers.{NEW_LAYERS[0]}.memory.value_bank"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    assert main(["usage", str(lacking), "--text", str(text)]) == 2
    assert (
        "whose checkpoint lacks 1 of its tensors, such as model.layers.1.memory.value_bank" in capsys.readouterr().err
    )


def test_the_counts_are_those_of_the_tokens_that_were_read(model, tmp_path, capsys):
    text = write_text(tmp_path / "short.txt", words=101)
    assert main(["usage", str(model), "--text", str(text), "--sequence-length", "100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    ids = torch.tensor([[int(word[1:]) for word in text.read_text().split()]])
    with record_usage(loaded) as usage, torch.no_grad():
        loaded(ids[:, :-1])
    for layer, expected in usage.summary().items():
        assert report["texts"]["short.txt"]["layers"][str(layer)] == pytest.approx(vars(expected))


def test_of_a_folder_of_texts_it_is_told_what_was_not_read(model, text, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(text.read_text())
    (tmp_path / "b.csv").touch()
    assert main(["usage", str(model), "--text", str(tmp_path), "--json"]) == 0
    assert f"read 1 of 2 files of {tmp_path}; not read: 1 .csv (expected .txt, " in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_for_terminals(is_terminal, model, text, library_bars, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert main(["usage", str(model), "--text", str(text), "--json"]) == 0
    assert ("Loading weights" in capsys.readouterr().err) == is_terminal


def test_curves_are_sorted_multiples_of_the_mean():
    counts = torch.tensor([[0, 8, 4, 0], [2, 2, 0, 0]])
    assert usage_curves({5: counts})[5].tolist() == [(8 / 3 + 2) / 2, (4 / 3 + 2) / 2, 0, 0]


def test_windows_that_are_too_long_and_a_model_without_memory_are_refused(model, text, capsys):
    assert main(["usage", str(model), "--text", str(text), "--sequence-length", "4000"]) == 2
    message = "midus look usage: sequence_length is 4000; the model was made for at most 128 tokens."
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert main(["usage", str(model.parent / "base"), "--text", str(text)]) == 2
    assert (
        "midus look usage: this llama model has no memory whose use can be counted; expected an upscaled"
        in capsys.readouterr().err
    )


# Memory that has a router, and no slots.
CHAPTERS = {"memory_tokens": 24, "chapters": 6, "k": 2, "layers": [0, 2]}


def test_a_model_whose_memories_have_no_slots_is_refused_by_their_type(model, text, tmp_path, capsys):
    upscale(base=model.parent / "base", method="moda", output=tmp_path / "moda", verify=False)
    assert main(["usage", str(tmp_path / "moda"), "--text", str(text)]) == 2
    assert (
        "midus look usage: this midus_llama model has no memory whose use can be counted, "
        "only memory of type depth-attention; expected an "
        f"upscaled model with memory of one of the types: {', '.join(counted_types())}.\n"
    ) in capsys.readouterr().err


def test_chapters_are_counted_as_slots_are(model, text, tmp_path, capsys):
    upscale(base=model.parent / "base", method="moc", output=tmp_path / "moc", options=CHAPTERS, verify=False)
    assert main(["usage", str(tmp_path / "moc"), "--text", str(text), "--sequence-length", "50", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    layers = report["texts"]["text.txt"]["layers"]
    assert list(layers) == ["0 chapters", "2 chapters"] and report["not_counted"] == {}
    assert [of_layer["layer"] for of_layer in report["chapters"]] == [0, 2]
    for of_layer in layers.values():
        assert (
            2 / 5 <= of_layer["used"] <= 1 and 1 / 5 <= of_layer["largest"] <= 1 / 2 < 2 / 5 + of_layer["perplexity"]
        )


def test_memories_without_slots_are_named_beside_those_that_are_counted(model, text, tmp_path, capsys):
    upscale(base=model, method="moc", output=tmp_path / "both", options={**CHAPTERS, "layers": [0, 2]}, verify=False)
    upscale(base=tmp_path / "both", method="moda", output=tmp_path / "all", options={"layers": [3, 5]}, verify=False)
    assert main(["usage", str(tmp_path / "all"), "--text", str(text), "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert list(report["texts"]["text.txt"]["layers"]) == ["0 chapters", "1", "2 chapters", "4"]
    assert report["not_counted"] == {"depth-attention": [3, 5]}
    assert "not counted: memory of type depth-attention in layers 3, 5, which has no slots" in err
