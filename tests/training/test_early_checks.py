"""What is told of a request before a model is loaded: of a run, and of other commands before a library is imported."""

import json
import shutil
import subprocess
import sys

import pytest
from training.tiny_run import PreparedRun, refused

from midus_hf.cli.sft import main as sft
from midus_hf.cli.train import main


@pytest.mark.parametrize(
    ("package", "keys", "message"),
    [
        ("bitsandbytes", {"optim": "paged_adamw_8bit"}, "the Trainer cannot be made: .*bitsandbytes"),
        ("wandb", {"report_to": "wandb"}, "report_to is wandb, whose package is not installed; install it, or set report_to to none"),
    ],
)  # fmt: skip
def test_a_package_that_is_absent_is_missed_before_training(package, keys, message, config_for, without, tmp_path):
    without(package)
    with refused(message):
        PreparedRun(config_for(**keys))
    assert not (tmp_path / "out").exists()


def test_kernels_that_do_nothing_for_a_model_are_refused(config_for):
    arguments = config_for()
    arguments.use_liger_kernel = True
    with refused(
        "use_liger_kernel is true, and Liger has no kernels for midus_llama; expected a model without memory."
    ):
        PreparedRun(arguments)


MODEL, CORPUS, CHATS = "--model_name_or_path=model", "--corpus=texts.jsonl", "--dataset_name=texts.jsonl"
OF_RUNS = [
    (main, ["recipe.yaml", MODEL, CORPUS, "--max_step=1"], "'--max_step' is not a key; did you mean --max_steps? Expected --KEY VAL"),
    (main, ["recipe.yaml", "max_steps=1", MODEL, CORPUS], "'max_steps=1' is not a value of a key; expected TEXTS or a recipe first"),
    (main, ["--model", "model", "--output", "o", "notes"],
     "'notes' is not a value of a key; expected TEXTS or a recipe first, then --KEY VALUE: 'midus train notes --model model --out"),
    (main, ["misspelt.yaml", MODEL, CORPUS], "'max_step' is not a key; did you mean max_steps? Expected --KEY VALUE (KEY: VALUE in"),
    (main, ["odd.yaml", MODEL, CORPUS], "'1' is not a key. 'lr' is not a key. Expected --KEY VALUE (KEY: VALUE in a recipe); see"),
    (main, ["recipe.yaml", MODEL], "config has no 'corpus'; set it in the recipe, or by --corpus."),
    (main, ["texts.jsonl", "--model", "./no", "--output", "o"], "model_name_or_path is './no', which does not exist"),
    (main, ["recipe.yaml", MODEL, CORPUS, "--output_dir=full"], "output_dir is 'full', which holds notes.txt; choose an"),
    (main, ["recipe.yaml", CORPUS, "--model=absent/model"], "model_name_or_path is 'absent/model', which is no folder here, and"),
    (main, ["notes"], "--output is missing; run 'midus train TEXTS --model MODEL --output DIR', or give a recipe, a .yaml"),
    (main, ["notes", "--output", "o"], "config has no 'model_name_or_path'; set it in the recipe, or by --model."),
    (main, ["./model"], "'./model' is a model; expected texts. Run 'midus train TEXTS --model"),
    (main, ["notes", "--corpus", "other"], "corpus is given twice, by 'notes' and by --corpus; expected it once. Leave"),
    (main, ["absent.yaml"], "config is 'absent.yaml', which cannot be read"),
    (main, ["notes", "--model=base", "--output=o", "--sequence_length=8"], "trainable is 'auto', and this llama model is a base, n"),
    (sft, ["chats.jsonl", "--model=base", "--output=o", "--max_length=8"], "trainable is 'auto', and this llama model is a base, n"),
    (sft, ["chats.yaml", MODEL, CHATS, "--max_lenght=1"], "'--max_lenght' is not a key; did you mean --max_length? Expected --K"),
    (sft, ["chats.yaml", MODEL, CHATS], "dataset_name is 'texts.jsonl', whose rows have text; expected the columns o"),
    (sft, ["chats.yaml", MODEL], "config has no 'dataset_name'; set it in the recipe, or by --dataset_name."),
]  # fmt: skip
MISTAKES = [
    ("eval", ["model", "--text", "notes", "--dtype", "float8"], "dtype is 'float8'; expected auto, float32, bfloat16 or float16."),
    ("ask", ["model", "What?", "--dtype", "float8"], "dtype is 'float8'; expected auto, float32, bfloat16 or float16."),
    ("compare", ["compare.yaml"], "base is './no', which does not exist; expected the folder of a model, or its Hub id."),
    ("compare", ["compare.yaml", "--set", "base=base", "--set", "seed=1"], "config has no option 'seed'. Expected one of"),
    ("compare", ["compare.yaml", "--set", "domain.a=no.txt"], "domain.a is 'no.txt', which does not exist; expected a file or a"),
    ("compare", ["compare.yaml", "--set", "train.corpus=no.txt"], "train.corpus is 'no.txt', which does not exist; expected a f"),
    ("compare", ["compare.yaml", "--set", "output_dir=notes/a.txt"], "output_dir is 'notes/a.txt', a file; expected a folder."),
    ("upscale", ["--base=base", "--method=engram", "--set=table=exact", "--set=corpus=no.txt", "--output=o"],
     "corpus is 'no.txt', which does not exist; expected a file, a folder or a dataset id."),
    ("eval", ["model", "--text", "no.txt"], "text is 'no.txt', which does not exist; expected a file, a folder or a da"),
    ("cluster build", ["--output", "t", "--corpus", "texts.jsonl", "--embedding-model", "no/x", "--tokenizer", "t"],
     "embedding model is 'no/x', which is no folder here, and the Hub cannot be reached"),
]  # fmt: skip
ASKED = """
import contextlib, io, json, sys
from midus_hf.cli import entry_points

endings = []
for words in json.loads(sys.argv[1]):
    sys.argv, said = [*["midus"] * (words[0] != "upscale"), *words], [io.StringIO(), io.StringIO()]
    with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
        try:
            status = getattr(entry_points, sys.argv[0])()
        except SystemExit as stopped:
            status = stopped.code
    imported = [name for name in ("torch", "transformers", "datasets", "trl") if name in sys.modules]
    endings.append([status, *(each.getvalue() for each in said), imported])
print(json.dumps(endings))
"""


@pytest.fixture(scope="module")
def room(upscaled, tmp_path_factory):
    """A folder with a model, its base, texts and recipes."""
    room = tmp_path_factory.mktemp("room")
    for name, source in (("model", upscaled()), ("base", upscaled().parent / "base")):
        shutil.copytree(source, room / name)
    files = {
        "notes/a.txt": "a",
        "chats.jsonl": '{"prompt": "a", "completion": "b"}',
        "compare.yaml": "base: ./no\noutput_dir: o\nvariants: {a: {}}\ndomain: {a: notes}\ntrain: {corpus: texts.jsonl}\n",
        "full/notes.txt": "",
        "recipe.yaml": "{max_steps: 2, sequence_length: 8, bf16: false}",
        "chats.yaml": "{max_steps: 2, max_length: 8, bf16: false}",
        "misspelt.yaml": "max_step: 2\n",
        "odd.yaml": "{1: 2, lr: 3}",
        "texts.jsonl": '{"text": "a"}',
        "wrong.jsonl": '{"txt": "a"}',
    }
    for name, content in files.items():
        (room / name).parent.mkdir(exist_ok=True)
        (room / name).write_text(content)
    return room


@pytest.mark.parametrize(("command", "words", "message"), OF_RUNS)
def test_wrong_run_is_refused_in_one_line(command, words, message, room, monkeypatch, capsys):
    monkeypatch.chdir(room)
    before = sorted(room.rglob("*"))
    assert command(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith(f"midus {'train' if command is main else 'sft'}: {message}")
    assert sorted(room.rglob("*")) == before


@pytest.fixture(scope="module")
def endings(room) -> list[list]:
    """How each mistake ends, one behind the other in one process: its status, what it prints, and what is imported by then."""
    requests = json.dumps([[*command.split(), *words] for command, words, _ in MISTAKES])
    line = [sys.executable, "-c", ASKED, requests]
    return json.loads(subprocess.run(line, cwd=room, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda number: f"{number} {MISTAKES[number][0]}")
def test_a_mistake_is_told_before_libraries_are_imported(number, endings):
    command, _, message = MISTAKES[number]
    status, out, err, imported = endings[number]
    assert (status, out, imported) == (2, "", []), err
    name = command if command == "upscale" else f"midus {command}"
    assert err.startswith(f"{name}: {message}") and len(err.splitlines()) == 1


def test_unreachable_hub_is_refused_in_one_line(words, tmp_path, capsys):
    assert main([*words, "--push_to_hub=true", "--hub_model_id=me/model"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "midus train: push_to_hub is true, and the Trainer makes a repository: the Hub cannot be reached ("
    )
    assert "offline" in line and "upload the folder later" in line
    assert not (tmp_path / "out").exists()
