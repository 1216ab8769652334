"""`midus look`: what each question answers, as tables, JSON and files, and what it refuses."""

import csv
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from evaluation.questions import write_questions
from look.upscaled_folders import acting, loaded, saved_pair, saved_with_bank
from models.memory_models import chapter_model, depth_model
from safetensors.torch import load_file, save_file
from sft.tiny_chats import write_rows
from training.tiny_run import document, tiny_tokenizer

from midus_hf.cli.command_line import show_tables
from midus_hf.config.errors import install_extra
from midus_hf.look.page import TextTable
from midus_hf.look.touched import touched_table
from midus_hf.topics.memory_retriever import MemoryRetriever

HEADS = 4
FILES = ".html, .png, .pdf, .csv, .json"


def with_tokenizer(folder: Path) -> Path:
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A base, a model with memory blocks, as made and trained, models of other methods, and texts."""
    folder = tmp_path_factory.mktemp("room")
    pair = zip(saved_pair("llama", "midus-hml"), ("base", "made"), strict=True)
    base, made = (shutil.copytree(saved, folder / name) for saved, name in pair)
    acting(loaded(made)).save_pretrained(folder / "trained")
    chapter_model(dtype=torch.float32, layers=(0, 2)).save_pretrained(folder / "chapters")
    depth_model(dtype=torch.float32, kind="reused").save_pretrained(folder / "depth")
    for checkpoint in (base, made, *(folder / name for name in ("trained", "chapters", "depth"))):
        with_tokenizer(checkpoint)
    write_questions(folder)
    (folder / "text.txt").write_text(document(60, 0))
    text = ["--text", f"words={folder / 'text.txt'}"]
    three = write_rows(folder / "three.jsonl", [{"text": document(length, length)} for length in (20, 12, 7)])
    models = {name: folder / name for name in ("base", "made", "trained", "chapters", "depth")}
    return SimpleNamespace(**models, data=folder, text=text, three=["--text", str(three)])


@pytest.fixture(scope="module")
def bank(room, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bank")
    saved = saved_with_bank(room.base, folder)
    documents = [" ".join(f"w{(3 + 7 * i + 5 * word) % 55}" for word in range(10 + i)) for i in range(6)]
    texts = str(write_rows(folder / "six.jsonl", [{"text": text} for text in documents]))
    return SimpleNamespace(**vars(saved), documents=documents, text=["--text", texts], texts=texts)


@pytest.fixture
def run(as_command) -> Callable[..., SimpleNamespace]:
    look = as_command("midus look")

    def ask(*words, refused: bool = False) -> SimpleNamespace:
        done = look(*words)
        assert done.status == (2 if refused else 0), done.err
        return done

    return ask


def test_usage_is_a_row_per_layer_and_files(run, room, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"usage.{kind}" for kind in ("png", "pdf", "html", "csv", "json")]
    outputs = [word for file in files for word in ("--output", file)]
    done = run("usage", room.trained, *room.text, "--sequence-length", 20, "--max-tokens", 40, *outputs)
    rows = [line.split() for line in done.out.splitlines() if line.strip().startswith("words ")]
    assert [int(row[1]) for row in rows] == [1, 4]
    assert "read words (40 tokens, loss " in done.out
    picture, pdf, page, table, report = (file.read_bytes() for file in files)
    assert picture.startswith(b"\x89PNG")
    assert pdf.startswith(b"%PDF-")
    assert b"data:image/png;base64," in page
    assert table.count(b"\n") == 1 + 2 * HEADS * 16
    assert json.loads(report)["model"] == str(room.trained)


def test_bars_are_for_terminals(run, room, library_bars, monkeypatch):
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert ("Loading weights" in run("usage", room.trained, *room.text, "--json").err) == is_terminal


def test_blocks_that_the_paths_of_documents_name_are_counted(run, bank, tmp_path):
    file = tmp_path / "blocks.csv"
    words = ["usage", bank.model, "--text", f"a={bank.texts}", "--sequence-length", 8]
    report = json.loads(run(*words, "--retriever", bank.tree, "--json", "--output", file).out)
    assert report["texts"]["a"]["documents"] == 6
    of_levels = [(row["memory"], row["slots"]) for row in report["rows"]]
    assert of_levels == [("hier-ffn level 1", 3), ("hier-ffn level 2", 9)]
    counted = list(csv.DictReader(file.read_text().splitlines()))
    paths = MemoryRetriever.load(bank.tree).paths(bank.documents).tolist()
    for level in (1, 2):
        expected = [0] * 3**level
        for text, path in zip(bank.documents, paths, strict=True):
            expected[path[level - 1]] += len(text.split()) - 1  # the last token is not read
        assert [int(row["count"]) for row in counted if row["memory"] == f"hier-ffn level {level}"] == expected
    done = run(*words, "--json")
    assert [row["used"] for row in json.loads(done.out)["rows"]] == [0, 0]
    assert "texts fetch nothing from the model's bank; give --retriever with its tree of topics" in done.err


def test_ablation_of_parts_is_a_table_json_and_csv(run, room, tmp_path):
    words, file = ["ablation", room.trained, *room.text, "--sequence-length", 20], tmp_path / "layers.csv"
    report = json.loads(run(*words, "--json", "--output", file).out)
    assert report["model"] == str(room.trained)
    assert report["all_of_them_is_the_base"]
    assert [row["part"] for row in report["rows"]] == ["block 1", "block 4", "all of them"]
    assert report["texts"]["words"]["tokens"] == 59
    assert file.read_text().count("\n") == 4
    table = run(*words).out
    assert "all of them" in table
    assert "loss of the base's layers" in table


def test_depth_is_a_row_per_layer_or_the_map_of_a_head(run, room, tmp_path):
    pytest.importorskip("matplotlib")
    words, page = ["depth", room.depth, *room.three], tmp_path / "depth.html"
    report = json.loads(run(*words, "--json", "--output", page).out)
    assert {**report["texts"]["three.jsonl"], "loss": 0} == {"documents": 3, "rows": 3, "tokens": 36, "loss": 0}
    assert [(row["layer"], row["tokens"]) for row in report["rows"]] == [(1, 36), (2, 36), (3, 36)]
    lines, first = run(*words).out.splitlines(), report["rows"][0]
    (of_first,) = [line for line in lines if line.strip().startswith("1 ") and " to " in line]
    shown = [f" {sum(first[shares]) / HEADS:.1%} " for shares in ("depth_shares", "sequence_shares")]
    assert all(words in of_first for words in (*shown, f"{min(first['gates']):.3g} to {max(first['gates']):.3g}"))
    layers = page.read_text()
    run(*words, "--output", page, "--layer", "3", "--head", "1")
    assert layers.count("data:image/png;base64,") == 1
    assert "36 tokens" in layers
    assert page.read_text() != layers


def test_heads_are_json_and_drawn(run, room, tmp_path):
    words = ["heads", room.base, "--tasks", "piqa", "--data", room.data]
    report = json.loads(run(*words, "--json", "--output", tmp_path / "heads.png").out)
    assert report["models"] == [str(room.base)]
    assert [row["layer"] for row in report["rows"]] == [0, 1, 2, 3]
    assert len(report["rows"][0]["importance"]) == HEADS
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    one = run(*words, "--limit", 1).out
    assert "1 answers" in one
    assert "variance" in one
    assert room.base.name in one
    assert str(room.base) not in one


def test_one_page_joins_all_answers_in_order(run, room, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("midus_hf.look.usage.every_count", None)  # nothing but what the page holds is computed
    text = room.text[1].replace("words=", "<words>=")
    words = ["page", room.trained, "--text", text, "--sequence-length", 20, "--output"]
    printed = run(*words, tmp_path / "page.html").out
    assert "Slots, chapters and blocks used" in printed
    page = (tmp_path / "page.html").read_text()
    titles = ["What texts use of the memories", "Loss of texts without parts of the model"]
    assert re.findall("<h[12]>(.*?)</h[12]>", page) == ["Inside the model", *titles]
    tables = ("Slots, chapters and blocks used", "Loss without a part", "&lt;words&gt;")
    assert all(title in page for title in tables)
    assert "<words>" not in page
    results = page.partition("<h2>")[0]
    assert "slots, chapters or blocks" in results
    assert "Without all that was added" in results
    assert page.count('src="data:image/png;base64,') == 2 == len(re.findall("(?:src|href)=", page))


def test_page_has_blocks_chapters_and_depth(run, room, bank, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    words = ["page", "--output", page, *room.text]
    for model, more, answer in (
        (bank.model, ["--retriever", bank.tree], "hier-ffn level 2"),
        (room.chapters, [], "0 chapters"),
        (room.depth, [], "What heads read of the depth"),
    ):
        run(*words, model, *more)
        assert answer in page.read_text()
        assert page.read_text().count("data:image/png;base64,") == 2, answer


LACKS = "whose checkpoint lacks 1 of its tensors, such as model.layers.1.memory.value_bank, which would be random"
REFUSALS = [
    ("usage TRAINED --text absent", "text is 'absent', which is no file or folder"),
    ("usage TRAINED --text =a.txt", "text is '=a.txt'; expected PATH or NAME=PATH, such as code=code.jsonl."),
    ("usage TRAINED --text a=b --text a=c", "text 'a' is given twice; expected each name once."),
    ("usage BROKEN TEXT --device cpu", "model is 'BROKEN', which cannot be loaded on cpu"),
    ("usage LACKING TEXT", f"model is 'LACKING', {LACKS}"),
    ("usage TRAINED TEXT --output a.txt", f"output is 'a.txt'; expected a file ending in {FILES}."),
    ("usage TRAINED TEXT --output /absent/a.csv", "output is '/absent/a.csv', in a folder that does not exist; create"),
    ("usage TRAINED TEXT --sequence-length 4000", "sequence_length is 4000; the model was made for at most 128 tokens."),
    ("usage BASE TEXT", "this llama model has no memory that retrieves slots, reads chapters or fetches blocks;"),
    ("usage TRAINED TEXT --retriever TREE", "and this model fetches no blocks; leave it out."),
    ("heads BASE --data questions", "Missing option '--tasks'. See 'midus look heads --help'."),
    ("page TRAINED TEXT", "--output is missing; page needs it, such as --output page.html."),
    ("ablation BASE TEXT", "this llama model has no layer and no memory that was added to a base; expected"),
    ("depth DEPTH TEXT --layer 1", "layer and head together name one head; expected both or neither. Give the other"),
    ("depth DEPTH TEXT --layer 0 --head 0", "layer is 0; expected one that reads the depth: 1, 2, 3."),
    ("depth DEPTH TEXT --layer 1 --head 4", "head is 4; expected one from 0 to 3, those of layer 1."),
    ("depth BASE TEXT", "this llama model has no memory that reads the depth; expected one upscaled"),
]  # fmt: skip


@pytest.fixture(scope="module")
def broken(room, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "config.json").write_text("{}")
    lacking = shutil.copytree(room.made, folder / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.layers.1.memory.value_bank"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    return {"BROKEN": folder, "LACKING": lacking}


@pytest.mark.parametrize(("words", "message"), REFUSALS, ids=[words for words, _ in REFUSALS])
def test_wrong_request_is_refused_in_one_line(run, room, bank, broken, words, message):
    folders = {name.upper(): getattr(room, name) for name in ("base", "made", "trained", "chapters", "depth")} | broken
    replaced = {"TREE": [bank.tree], "TEXT": room.text} | {name: [folder] for name, folder in folders.items()}
    done = run(*[part for word in words.split() for part in replaced.get(word, [word])], refused=True)
    for name in ("BROKEN", "LACKING", "BASE"):
        message = message.replace(name, str(folders[name]))
    line = done.err.splitlines()[-1]
    assert done.out == ""
    assert line.startswith(f"midus look {words.split()[0]}: ")
    assert message in line


def test_pictures_need_matplotlib(run, room, without):
    without("matplotlib")
    done = run("usage", room.made, *room.text, "--output", "a.png", refused=True)
    message = f"output has pictures, which need matplotlib; {install_extra('look')}.\n"
    assert done.err == f"midus look usage: {message}"


def test_file_that_an_answer_lacks_is_refused_after_printing(run, room, tmp_path):
    file = tmp_path / "page.png"
    done = run("page", room.made, *room.text, "--output", file, refused=True)
    assert "Slots, chapters and blocks used" in done.out
    assert not file.exists()
    assert f"output is '{file}', and this answer has no picture; expected a file ending in .html or .json." in done.err


def test_table_headings_wrap_between_words(monkeypatch, capsys):
    counts = {"documents": 1234, "untouched": 1000, "tokens": 1234567, "reading": 0.1, "differing": 0.5}
    table = touched_table(
        [{"text": "articles-of-an-encyclopedia.jsonl", "memory": "packs", "certified": "no", **counts}]
    )
    shown = {}
    for columns in (200, 80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        show_tables([table])
        shown[columns] = capsys.readouterr().out
        assert max(map(len, shown[columns].splitlines())) <= columns
    assert {"documents", "untouched", "differ", "certified", "1,234,567", "50.000%"} <= {*shown[80].split()}
    in_wide, in_80, in_40 = (sorted("".join(out.split()).replace("─", "")) for out in shown.values())
    assert in_wide == in_80 == in_40
    monkeypatch.setenv("COLUMNS", "80")
    row = ["+shuffled-addresses", *["+0.6250 ± 0.1768"] * 9]
    show_tables([TextTable("", ["variant", *map(str, range(9))], [row])])
    assert "+shuffled-addresses" in capsys.readouterr().out, "names stay in one line"
