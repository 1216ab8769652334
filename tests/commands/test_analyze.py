"""`midus look`: heads, layers, drift, values and a page of them: tables, JSON, pictures, and what they refuse."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from analysis.memory_models import write_text
from analysis.upscaled_folders import acting, loaded, saved_pair, saved_with_bank
from tiny import save_tiny_model
from training.tiny_run import letter_tokenizer, tiny_tokenizer

from midus_hf.retrieval.memory_retriever import MemoryRetriever

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


@pytest.fixture(scope="module")
def upscaled(tmp_path_factory):
    """A base and a model with memory blocks that act, both with a tokenizer."""
    folder = tmp_path_factory.mktemp("upscaled")
    base, made = saved_pair("llama", "midus-hml", folder)
    trained = folder / "trained"
    acting(loaded(made)).save_pretrained(trained)
    for checkpoint in (base, made, trained):
        tiny_tokenizer().save_pretrained(checkpoint)
    return SimpleNamespace(base=base, made=made, trained=trained)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return f"words={write_text(tmp_path_factory.mktemp('text') / 'text.txt', 60)}"


@pytest.fixture
def run(as_command) -> Callable[..., SimpleNamespace]:
    return as_command("midus look")


def test_heads_are_told_as_json_and_drawn(run, model, data, tmp_path):
    picture = tmp_path / "heads.png"
    done = run("heads", model, "--tasks", "piqa", "--data", data, "--json", "--output", picture)
    assert done.status == 0, done.err
    (told,) = json.loads(done.out)["models"]
    assert (told["model"], told["answers"], told["layers"]) == (str(model), 2, [0, 1, 2, 3])
    assert len(told["absolute"][0]) == 4 and picture.read_bytes().startswith(b"\x89PNG")
    one = run("heads", model, "--tasks", "piqa", "--data", data, "--limit", 1, "--signed")
    assert one.status == 0 and "1 answers" in one.out and "variance" in one.out
    assert model.name in one.out and str(model) not in one.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "piqa", "--limit", "0"], "limit is 0; expected at least 1."),
        (
            ["--tasks", "midus_piqa"],
            "task is 'midus_piqa', whose questions are local; give the folder that holds them as data.",
        ),
        (
            ["--tasks", "piqa", "--output", "heads.svg"],
            "output is 'heads.svg'; expected a file ending in .html, .png, .pdf, .csv, .json.",
        ),
        (["--tasks", "piqa", "--text", "a.txt"], "--text is an option of usage and depth and ablation and drift and"),
        (["--data", "questions"], "--tasks is missing; heads needs it."),
    ],
)
def test_what_is_wrong_with_a_request_is_refused(run, model, words, message):
    done = run("heads", model, *words)
    assert (done.status, done.out) == (2, "")
    assert message in done.err and done.err.count("\n") == 1


def test_what_layers_do_is_told_as_json_csv_and_a_picture(run, upscaled, text, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["ablation", upscaled.trained, "--text", text, "--sequence-length", 20]
    files = ["--output", tmp_path / "layers.png", "--output", tmp_path / "layers.csv"]
    done = run(*words, "--json", *files)
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert told["model"] == str(upscaled.trained) and told["base"] == []
    assert [row["part"] for row in told["parts"]] == ["block 1", "block 4"]
    assert told["texts"]["words"]["tokens"] == 57
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "layers.csv").read_text().count("\n") == 4
    table = run(*words, "--all").out
    assert "all of them" in table and "layer 3 of the base" in table and "loss of the base's layers" in table


def test_how_far_predictions_moved_is_told_of_a_base_within_and_of_another(run, upscaled, text, tmp_path):
    words = ["drift", upscaled.trained, "--text", text, "--sequence-length", 20]
    told = {}
    for base in ("self", upscaled.base):
        done = run(*words, "--base", base, "--json", "--top", 2)
        assert done.status == 0, done.err
        told[str(base)] = json.loads(done.out)["texts"]
    assert told["self"] == told[str(upscaled.base)]
    assert told["self"]["words"]["divergence"] > 0 and len(told["self"]["words"]["worst"]) == 2
    page = tmp_path / "drift.html"
    table = run(*words, "--output", page).out
    assert "KL(base || model)" in table and "What moved farthest" in table
    assert "compared with its base, which is the model without what was added" in page.read_text()
    unmoved = run("drift", upscaled.made, "--text", text).out
    assert " 0.00000 " in unmoved and "+0.00000" in unmoved and "What moved farthest" not in unmoved


@pytest.fixture(scope="module")
def with_bank(tmp_path_factory, upscaled):
    return saved_with_bank(upscaled.base, tmp_path_factory.mktemp("bank"))


def test_texts_fetch_by_a_retriever(run, with_bank, text):
    words = ["drift", with_bank.model, "--text", text, "--json"]
    without = run(*words)
    assert "texts fetch nothing from the model's bank; give --retriever with its tree of topics" in without.err
    assert json.loads(without.out)["texts"]["words"]["divergence"] == 0
    fetched = run(*words, "--retriever", with_bank.tree)
    assert fetched.status == 0, fetched.err
    assert json.loads(fetched.out)["texts"]["words"]["divergence"] > 0
    parts = json.loads(run("ablation", *words[1:], "--retriever", with_bank.tree).out)["parts"]
    assert len(parts) == 4 and all(row["texts"]["words"]["difference"] for row in parts)


def test_which_blocks_texts_fetch_is_told_and_drawn_without_reading_them(run, with_bank, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("midus_hf.analysis.text_rows._row_sums", None)
    documents = [" ".join(f"w{(3 + 7 * i + 5 * word) % 55}" for word in range(10 + i)) for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    texts = ["--text", f"a={tmp_path / 'a.jsonl'}", "--text", f"b={tmp_path / 'a.jsonl'}"]
    words = ["usage", with_bank.model, *texts, "--retriever", with_bank.tree, "--sequence-length", 8]
    done = run(*words, "--json", "--output", tmp_path / "blocks.png", "--output", tmp_path / "blocks.csv")
    assert done.status == 0, done.err
    told = json.loads(done.out)["texts"]
    assert told["a"] == told["b"] and told["a"]["documents"] == 6
    expected: dict[str, int] = {}
    for document, path in zip(documents, MemoryRetriever.load(with_bank.tree).paths(documents).tolist(), strict=True):
        count = len(document.split())
        read = count - (count % 8 == 1)  # a row of one token predicts nothing
        expected[str(path[1])] = expected.get(str(path[1]), 0) + read
    assert told["a"]["blocks"]["hier-ffn"]["levels"]["2"]["tokens"] == expected
    assert (tmp_path / "blocks.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "blocks.csv").read_text().count("\n") == 1 + 2 * 12
    assert "never fetched" in run(*words).out


def test_a_page_tells_which_blocks_were_fetched(run, with_bank, text, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["page", with_bank.model, "--text", text, "--output", tmp_path / "page.html"]
    assert run(*words).status == 0
    assert "Blocks fetched" not in (tmp_path / "page.html").read_text()
    done = run(*words, "--retriever", with_bank.tree)
    assert done.status == 0, done.err
    page = (tmp_path / "page.html").read_text()
    assert "Blocks fetched" in page and "hier-ffn level 2" in page and page.count("data:image/png;base64,") == 2


def test_one_page_joins_what_is_told(run, upscaled, text, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["page", upscaled.trained, "--text", text, "--sequence-length", 20, "--output"]
    done = run(*words, tmp_path / "page.html")
    assert done.status == 0 and "Slots retrieved" in done.out, done.err
    page = (tmp_path / "page.html").read_text()
    for title in (
        "Slots retrieved",
        "How far predictions moved",
        "Loss without a part",
        "What moved farthest",
        "slots add in layer 4",
    ):
        assert title in page
    assert page.count("data:image/png;base64,") == 2 and page.count('class="passage"') == 3
    other = run(*words, tmp_path / "other.html", "--base", upscaled.base)
    assert other.status == 0, other.err
    of_base = "its base, which is the model without what was added"
    assert (tmp_path / "other.html").read_text().replace(
        f"compared with {upscaled.base}", f"compared with {of_base}"
    ) == page


def test_a_page_checks_the_base_once_and_writes_no_csv(run, upscaled, text, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    checked = []
    monkeypatch.setattr("upscalers.runs.base_confirmation.keeps_base", lambda name: checked.append(name) or True)
    monkeypatch.setattr("midus_hf.analysis.slots.report.usage_csv", None)
    done = run("page", upscaled.trained, "--text", text, "--output", tmp_path / "page.html")
    assert done.status == 0, done.err
    assert checked == [str(upscaled.trained)]


def test_values_of_the_most_used_slots_and_of_named_ones_are_shown(run, upscaled, text):
    done = run("values", upscaled.trained, "--layers", 1, "--text", text, "--top", 3, "--tokens", 2, "--json")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert (told["layer"], told["memory"], len(told["slots"])) == (1, "", 3)
    assert told["slots"][0]["share"] >= told["slots"][2]["share"] > 0
    assert all(len(of_slot["tokens"]) == 2 for of_slot in told["slots"])
    table = run("values", upscaled.trained, "--layers", 4, "--slots", "2,5-6", "--heads", 3).out
    assert "a probe, no proof" in table and "'w" in table
    assert run("values", upscaled.made, "--layers", 4, "--slots", "0").out.count("adds nothing") == 4


def test_a_base_that_trained_or_has_other_tokens_is_refused(run, upscaled, text, tmp_path):
    model = loaded(upscaled.trained)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "all-trained")
    tiny_tokenizer().save_pretrained(tmp_path / "all-trained")
    done = run("drift", tmp_path / "all-trained", "--text", text)
    assert done.status == 2 and "are not those that it was upscaled from: trained since, or cast; expected" in done.err
    del model.config.upscale["base_sha256"]
    model.save_pretrained(tmp_path / "all-trained")
    done = run("drift", tmp_path / "all-trained", "--text", text)
    assert done.status == 2 and "are of no known base; expected the base itself. Give its folder as base." in done.err
    loaded(upscaled.base).save_pretrained(tmp_path / "other")
    letter_tokenizer().save_pretrained(tmp_path / "other")
    done = run("drift", upscaled.trained, "--text", text, "--base", tmp_path / "other")
    assert (
        done.status == 2 and "whose tokenizer has other tokens than the model's; expected one tokenizer." in done.err
    )
    done = run("drift", upscaled.trained, "--text", text, "--base", tmp_path / "absent")
    assert (
        done.status == 2 and f"base is '{tmp_path / 'absent'}', which does not exist; expected the folder" in done.err
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["values", "MODEL", "--layers", "1"],
            "neither text nor slots are given; expected one: slots by number, or a text",
        ),
        (
            ["values", "MODEL", "--layers", "0", "--slots", "0"],
            "layer is 0; expected one with a memory of slots: 1, 4.",
        ),
        (["values", "MODEL", "--layers", "1", "--slots", "16"], "slots is '16'; expected numbers from 0 to 15"),
        (["values", "MODEL", "--layers", "1", "TEXT", "--top", "0"], "top is 0; expected at least 1."),
        (["values", "MODEL", "--layers", "1-2", "--slots", "0"], "layers is '1-2'; expected one number."),
        (["values", "MODEL", "--slots", "0"], "neither layers nor chapters are given; expected the layer whose slots"),
        (["drift", "MODEL", "BASE", "TEXT"], "2 models are given; expected one, for all questions but heads."),
        (["page", "MODEL", "TEXT"], "--output is missing; page needs it, such as --output page.html."),
        (["drift", "MODEL", "TEXT", "--top", "0"], "top is 0; expected at least 1."),
        (
            ["drift", "BASE", "TEXT"],
            "base was not made by upscale: its config.json has no 'upscale' entry. Give an upscaled",
        ),
        (
            ["ablation", "BASE", "TEXT"],
            "this llama model has no layer and no memory that was added to a base; expected",
        ),
    ],
)
def test_what_is_wrong_with_a_request_to_look_inside_is_refused(run, upscaled, text, words, message):
    replaced = {"MODEL": [upscaled.made], "BASE": [upscaled.base], "TEXT": ["--text", text]}
    done = run(*[part for word in words for part in replaced.get(word, [word])], "--device", "cpu")
    assert (done.status, done.out) == (2, "")
    last = done.err.splitlines()[-1]
    assert last.startswith(f"midus look {words[0]}: ") and message in last, done.err
