"""`midus-analyze heads`: tables, JSON, a picture, and what it refuses."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from tiny import save_tiny_model
from training.tiny_run import tiny_tokenizer

from midus_commands import analyze

QUESTIONS = [
    {"question": "w5 w6", "choices": ["w9 w10", "w11"], "gold": 1},
    {"question": "w7", "choices": ["w12", "w13 w14"], "gold": 0},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("model"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "piqa.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return folder


@pytest.fixture
def run(as_command) -> Callable[..., SimpleNamespace]:
    return as_command(analyze.main, "midus-analyze")


def test_heads_are_told_as_json_and_drawn(run, model, data, tmp_path):
    picture = tmp_path / "heads.png"
    done = run("heads", model, "--tasks", "piqa", "--data", data, "--json", "--picture", picture)
    assert done.status == 0, done.err
    (told,) = json.loads(done.out)["models"]
    assert (told["model"], told["answers"], told["layers"]) == (str(model), 2, [0, 1, 2, 3])
    assert len(told["absolute"][0]) == 4 and picture.read_bytes().startswith(b"\x89PNG")
    one = run("heads", model, "--tasks", "piqa", "--data", data, "--limit", 1, "--signed")
    assert one.status == 0 and "1 answers" in one.out and "variance" in one.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "piqa", "--limit", "0"], "limit is 0; expected at least 1."),
        (
            ["--tasks", "midus_piqa"],
            "task is 'midus_piqa', whose questions are local; give the folder that holds them as data.",
        ),
        (["--tasks", "piqa", "--picture", "heads.svg"], "picture is 'heads.svg'; expected a file ending in .png."),
    ],
)
def test_what_is_wrong_with_a_request_is_refused(run, model, words, message):
    done = run("heads", model, *words)
    assert (done.status, done.out) == (2, "")
    assert message in done.err and done.err.count("\n") == 1
