"""What every command that lets a model read texts refuses, in the same words, before it loads anything large; and whatever draws."""

import importlib.util
import json

import pytest
from commands.installed import run_alone, run_in_process

# Commands, and what else each needs.
READERS = {
    "midus look usage": [],
    "midus look depth": [],
    "midus look ablation": [],
    "midus look drift": [],
    "midus look values": ["--layers", "1"],
    "midus look page": ["--output", "a.html"],
}
# Commands that draw, and read no text with a model.
WITHOUT_TEXTS = {"midus cluster report": ["--tree", "absent"]}
# Options that name a file, and how it may end.
FILES = {
    "midus look usage --output": ".html, .png, .pdf, .csv, .json",
    "midus look page --output": ".html, .png, .pdf, .csv, .json",
    "midus cluster report --output": ".png, .svg, .pdf",
}
WITH_PICTURES = (
    ("midus look usage --output", "output has pictures, which need"),
    ("midus look page --output", "output has pictures, which need"),
    ("midus cluster report --output", "output is a picture, which needs"),
)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return what a command says in one line that refuses options, of a model that is not there and of a text that is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "w3 w4 w5"}))

    def of(reader: str, *options: str) -> str:
        text = [] if "--text" in options else ["--text", "text.jsonl"]
        words = [*WITHOUT_TEXTS.get(reader, []), *options]
        if reader not in WITHOUT_TEXTS:
            words = ["model", *text, *READERS[reader], "--device", "cpu", *options]
        assert run_in_process(reader, words, monkeypatch) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.splitlines()[-1].startswith(f"{reader}: ")
        return err.splitlines()[-1].removeprefix(f"{reader}: ")

    return of


@pytest.mark.parametrize("reader", READERS)
def test_texts_and_models_that_cannot_be_read_are_refused(refused, reader):
    for text in ("absent", "b=absent"):
        assert refused(reader, "--text", text).startswith("text is 'absent', which does not exist; expected")
    message = "text is '=a.txt'; expected PATH or NAME=PATH, such as code=code.jsonl."
    assert refused(reader, "--text", "=a.txt") == message
    twice = refused(reader, "--text", "a=b", "--text", "a=c")
    assert twice == "text 'a' is given twice; expected each name once."
    assert refused(reader, "--limit", "0") == "limit is 0; expected at least 1."
    if reader in ("midus look drift", "midus look page"):  # which look for the base of the model first
        return
    assert refused(reader).startswith("model is 'model', which cannot be loaded on cpu")
    assert refused(reader, "--device", "nowhere").startswith("device is 'nowhere', which cannot be used here (")
    message = "dtype is 'int8'; expected auto, float32, bfloat16 or float16."
    assert refused(reader, "--dtype", "int8", "--text", "absent") == message, "before it reads a text"


@pytest.mark.parametrize(("option", "suffixes"), FILES.items())
def test_files_that_cannot_be_written_are_refused(refused, option, suffixes):
    pytest.importorskip("matplotlib")
    reader, _, name = option.rpartition(" ")
    file = f"{name.removeprefix('--')} is "
    assert refused(reader, name, "a.txt") == f"{file}'a.txt'; expected a file ending in {suffixes}."
    absent = f"/absent/a{suffixes.split(',')[0]}"
    message = f"{file}{absent!r}, in a folder that does not exist; create it first."
    assert refused(reader, name, absent) == message


@pytest.mark.parametrize(("option", "message"), WITH_PICTURES)
def test_pictures_need_matplotlib(refused, option, message, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    reader, _, name = option.rpartition(" ")
    file = "a.html" if reader.endswith("page") else "a.png"
    assert refused(reader, name, file) == f"{message} matplotlib; install it with pip install 'midus-hf[look]'."


@pytest.mark.parametrize(
    "command", ["midus train run.yaml", "midus sft run.yaml", "midus eval", "midus look heads", *READERS]
)
def test_an_adapter_given_as_a_model_is_refused_before_torch_is_imported(command, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: adapter\noutput_dir: out\n{'dataset_name' if ' sft ' in command else 'corpus'}: text.txt\n"
    )
    words = ["adapter", *(["--tasks", "piqa"] if command.endswith("heads") else ["--text", "a=b"])]
    words = [] if command.endswith("run.yaml") else [*words, *READERS.get(command, [])]
    done = run_alone(command, words, afterwards="assert 'torch' not in sys.modules", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "is 'adapter', an adapter of PEFT; expected a whole model." in done.stderr


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        (
            "midus train",
            "dataset_name: chats.jsonl",
            "recipe.yaml has 'dataset_name', a key of another command; run 'midus sft recipe.yaml'.",
        ),
        (
            "midus sft",
            "corpus: a.txt",
            "recipe.yaml has 'corpus', a key of another command; run 'midus train recipe.yaml'.",
        ),
        (
            "midus train",
            "variants: {}",
            "recipe.yaml has 'variants', a key of another command; run 'midus compare recipe.yaml'.",
        ),
        (
            "midus compare",
            "method: moc",
            "recipe.yaml has 'method', a key of another command; run 'upscale --config recipe.yaml'.",
        ),
        (
            "midus sft",
            "tasks: [piqa]",
            "recipe.yaml has 'tasks', a key of another command; run 'midus eval MODEL --config",
        ),
        ("midus sft", "corpus: a.txt\ndataset_name: b.jsonl", "config has no option 'corpus'."),
        (
            "midus train",
            "corpus: a.txt\nlerning_rate: 1",
            "config has no option 'lerning_rate'. Did you mean 'learning_rate'",
        ),
    ],
)
def test_a_file_of_another_command_is_called_that(given, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"{words}\n")
    assert run_in_process(given, ["recipe.yaml"], monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"{given}: {message}")


@pytest.mark.parametrize(
    ("command", "words", "keys", "message"),
    [
        (
            "upscale",
            [],
            "corpus: a.txt",
            "recipe.yaml has 'corpus', a key of another command; run 'midus train recipe.yaml'.",
        ),
        ("upscale", [], "base: b\nmethods: moc", "--config recipe.yaml has no option 'methods'"),
        (
            "midus eval",
            ["model"],
            "method: moc",
            "recipe.yaml has 'method', a key of another command; run 'upscale --config recipe.yaml'.",
        ),
    ],
)
def test_so_is_a_file_given_as_an_option(command, words, keys, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(f"{keys}\n")
    assert run_in_process(command, [*words, "--config", "recipe.yaml"], monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"{command}: {message}")
