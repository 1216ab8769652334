"""Protected texts keep their logits while an n-gram memory learns others, and the certificate says which texts they are."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from midus_hf.cli.look import main as look
from midus_hf.files.cards import read_card
from midus_hf.files.checkpoint_files import CERTIFICATE
from midus_hf.memories.engram.known_ngrams import REMOVED_NGRAM, read_certificate
from midus_hf.memories.engram.options import TOKEN_NUMBER_LIMIT
from midus_hf.training.protection import compare_texts
from midus_hf.training.run import run_training
from tests.tiny import save_tiny_model
from tests.training.tiny_run import refused, tiny_config, tiny_tokenizer, write_corpus
from upscalers.runs.upscale import upscale

MEMORY = "model.layers.1.memories.ngram.value_table"
# A line at the end of the model's card that is no UTF-8.
NO_UTF8 = b"caf\xe9\n"
TABLE = "model.memory_tables.ngram.0.ngrams"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a folder with a corpus, texts to protect that share n-grams with it, and a text that shares none."""
    folder = tmp_path_factory.mktemp("texts")
    write_corpus(folder / "corpus", documents=6, length=40)
    write_corpus(folder / "protected", documents=2, length=30)
    (folder / "other.txt").write_text("w9 " * 124)
    return folder


def engram(texts, folder, family="llama", base=None, tokenizer=None, **options):
    if base is None:
        base = save_tiny_model(family, folder / "base")
        (tokenizer or tiny_tokenizer()).save_pretrained(base)
    options = {"table": "exact", "corpus": str(texts / "corpus"), "width": 8, **options}
    upscale(base=base, method="engram", output=folder / "model", options=options, verify=False)
    return folder / "model"


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """Return the folder of a model that was trained while texts were protected, next to its base and the model before."""
    folder = tmp_path_factory.mktemp("trained")
    model = engram(texts, folder)
    with (model / "README.md").open("ab") as card:
        card.write(NO_UTF8)
    run_training(run_of(texts, model, folder / "trained"))
    return folder / "trained"


def run_of(texts, model, output, **changes):
    changes = {"protect": str(texts / "protected"), "max_steps": 4, **changes}
    return tiny_config(model, texts / "corpus", output, **changes)


def logits(folder, text):
    ids = torch.tensor([tiny_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(ids).logits


def test_protected_texts_keep_base_logits_and_others_learn(trained, texts):
    base = trained.parent / "base"
    for path in (texts / "protected").iterdir():
        assert torch.equal(logits(trained, path.read_text()), logits(base, path.read_text()))
    learned = (texts / "corpus" / "005.txt").read_text()
    assert not torch.equal(logits(trained, learned), logits(base, learned))


def test_the_whole_of_a_long_text_is_compared(trained):
    model = AutoModelForCausalLM.from_pretrained(trained)
    row = int(model.get_parameter(MEMORY).abs().sum(1).argmax())
    learned = model.get_buffer(TABLE)[row - 1].item()
    words = []
    while learned:
        learned, number = divmod(learned, TOKEN_NUMBER_LIMIT)
        words.insert(0, f"w{number - 1}")
    documents = ["w9 " * 140, "w9 " * 140 + " ".join(words) + " w9" * 4, ""]
    assert compare_texts(model, tiny_tokenizer(), documents, ["ngram"]) == (140 + 140 + len(words) + 4, [1])


def test_texts_that_did_not_keep_their_logits_are_not_certified(texts, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("midus_hf.training.protection.remove_ngrams", lambda model, table, taken: 1)
    with pytest.raises(RuntimeError, match="2 of the texts of protected, the first of them text 0"):
        run_training(run_of(texts, trained.parent / "model", tmp_path / "run"))
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / CERTIFICATE).exists()
    assert "Protected texts" not in read_card(tmp_path / "run")


def test_retrained_model_loses_or_renews_its_certificate(texts, trained, tmp_path):
    run_training(run_of(texts, trained, tmp_path / "again", max_steps=1, protect=[]))
    assert NO_UTF8 in (trained / "README.md").read_bytes()
    card = read_card(tmp_path / "again")
    assert "Protected texts" not in card
    assert card.count("## Trained with") == 2
    assert read_certificate(tmp_path / "again") is None
    protect = [str(texts / "protected"), str(shutil.copytree(texts / "protected", tmp_path / "more" / "protected"))]
    run_training(run_of(texts, trained, tmp_path / "protected_again", max_steps=1, protect=protect))
    assert read_card(tmp_path / "protected_again").count("## Protected texts") == 1
    named = [text["name"] for text in read_certificate(tmp_path / "protected_again")["texts"]]
    assert named == ["protected 1", "protected 2"]


@pytest.mark.parametrize(
    ("protected", "line"),
    [
        ("w8 w9 w20", "6 of the 7 .* (85.7%); protected texts have 'w8 w9'"),
        ("w14 w13 w12 w11 w10 w9", "2 of the 7 .* (28.6%); .* 'w10', 'w11', 'w12', 'w13' and 1 more"),
        ("w20 w21", "7 of the 7 .* (100.0%)"),
    ],
)
def test_a_line_says_which_ngrams_protected_texts_took(protected, line, texts, tmp_path, capsys):
    names = [*(f"w{number}" for number in range(10, 16)), "w8 w9"]
    (tmp_path / "names.jsonl").write_text("".join(json.dumps({"text": name}) + "\n" for name in names))
    model = engram(texts, tmp_path, corpus=str(tmp_path / "names.jsonl"), names=True, min_order=1)
    (tmp_path / "protected.txt").write_text(protected)
    run_training(run_of(texts, model, tmp_path / "run", protect=str(tmp_path / "protected.txt"), max_steps=1))
    assert re.search("protect: " + line.replace("(", r"\(").replace(")", r"\)") + "\n", capsys.readouterr().out)


def test_the_certificate_and_the_card_name_texts_and_digests(trained, texts):
    certificate = read_certificate(trained)
    (text,) = certificate["texts"]
    assert (text["name"], text["documents"], text["tokens"]) == ("protected", 2, 60)
    counts = certificate["memories"]["ngram"]
    ngrams = AutoModelForCausalLM.from_pretrained(trained).get_buffer(TABLE)
    assert counts["known"] == len(ngrams)
    assert counts["left"] == int((ngrams < REMOVED_NGRAM).sum()) < counts["known"]
    card = read_card(trained)
    assert "| protected | 2 | 60 |" in card
    assert "look touched MODEL --text PROTECTED --prove" in card


def test_rows_stay_with_their_ngrams_when_others_are_taken_out(texts, tmp_path):
    model = engram(texts, tmp_path)
    first = tmp_path / "first"
    run_training(tiny_config(model, texts / "corpus", first, max_steps=4))
    run_training(run_of(texts, first, tmp_path / "second", learning_rate=1e-30))
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (first, tmp_path / "second"))
    rows = {int(key): row for key, row in zip(before.get_buffer(TABLE), before.get_parameter(MEMORY)[1:], strict=True)}
    keys = after.get_buffer(TABLE)
    left = int((keys < REMOVED_NGRAM).sum())
    values = after.get_parameter(MEMORY)
    assert torch.equal(values[1 : 1 + left], torch.stack([rows[int(key)] for key in keys[:left]]))
    assert not values[1 + left :].any()
    assert values[1 : 1 + left].any()


def test_a_resumed_run_protects_the_same_texts_and_no_others(texts, trained, tmp_path):
    protected, output = shutil.copytree(texts / "protected", tmp_path / "protected"), tmp_path / "run"
    keys = {"save_steps": 2, "protect": str(protected)}
    run_training(run_of(texts, trained.parent / "model", output, **keys))
    shutil.rmtree(output / "checkpoint-4")
    keys["resume_from_checkpoint"] = True
    run_training(run_of(texts, trained.parent / "model", output, **keys))
    assert (output / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert read_certificate(output) == read_certificate(trained)
    (protected / "001.txt").unlink()
    with refused("protect names other texts than the run had"):
        run_training(run_of(texts, trained.parent / "model", output, **keys))


def test_a_second_corpus_is_learned_while_the_first_is_protected(texts, trained, tmp_path):
    write_corpus(tmp_path / "more" / "corpus", documents=20, length=40)
    for number in range(6):
        (tmp_path / "more" / "corpus" / f"{number:03}.txt").unlink()
    second = engram(tmp_path / "more", tmp_path, base=trained)
    protect = [str(texts / "corpus"), str(texts / "protected")]
    run_training(tiny_config(second, tmp_path / "more" / "corpus", tmp_path / "run", protect=protect, max_steps=4))
    for path in (*(texts / "corpus").iterdir(), *(texts / "protected").iterdir()):
        assert torch.equal(logits(tmp_path / "run", path.read_text()), logits(trained, path.read_text()))
    assert [text["name"] for text in read_certificate(tmp_path / "run")["texts"]] == ["corpus", "protected"]


def answer(capsys, *words) -> str:
    assert look(["touched", *map(str, words)]) in (0, None)
    return capsys.readouterr().out


def test_touched_tells_from_ids_where_a_text_reads_rows(trained, texts, tmp_path, capsys, monkeypatch):
    words = ["--text", texts / "protected", "--text", texts / "corpus", "--text", texts / "other.txt", "--json"]
    rows = {row["text"]: row for row in json.loads(answer(capsys, trained, *words))["rows"]}
    assert rows["protected"] | {"untouched": 2, "reading": 0, "certified": "yes"} == rows["protected"]
    assert rows["other.txt"] | {"untouched": 1, "differing": 0, "certified": "no"} == rows["other.txt"]
    assert 0 < rows["corpus"]["reading"] < rows["corpus"]["differing"] < 1
    monkeypatch.setenv("HOME", str(trained.parent))
    printed = answer(capsys, f"~/{trained.name}", "--text", texts / "protected", "--prove")
    assert "its certificate fits the folder. 2 untouched documents computed" in printed


def test_touched_counts_what_differs(trained, texts, tmp_path, capsys):
    answer(capsys, trained, "--text", texts / "corpus", "--output", tmp_path / "rows.csv")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    first = int(lines[-1].split(",")[-1])
    text = (texts / "corpus" / "005.txt").read_text()
    same = (logits(trained, text) == logits(trained.parent / "base", text)).all(-1)[0]
    assert same.tolist() == [True] * first + [False] * (40 - first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: retrained(folder, TABLE), "does not fit the folder: the table of memory 'ngram' changed"),
        (lambda folder: retrained(folder, TABLE, beside="zz.safetensors"), "the table of memory 'ngram' changed"),
        (lambda folder: retrained(folder, "model.norm.weight"), "a tensor outside the memory changed"),
        (lambda folder: tiny_tokenizer(bos_token="<bos>", unk_token="w4").save_pretrained(folder), "the tokenizer"),
        (lambda folder: edited(folder, rms_norm_eps=0.5), "the config changed"),
        (lambda folder: (folder / CERTIFICATE).write_text("[]"), "is not a certificate of midus train; remove it"),
        (None, "has no memory of known n-grams"),
    ],
)  # fmt: skip
def test_a_certificate_that_does_not_fit_is_refused(change, message, trained, texts, tmp_path, capsys):
    if change is None:
        engram(texts, tmp_path, addressing="random")  # every text reads rows
    else:
        change(shutil.copytree(trained, tmp_path / "model"))
    assert look(["touched", str(tmp_path / "model"), "--text", str(texts / "protected")]) == 2
    assert message in capsys.readouterr().err


def edited(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def retrained(folder, name, beside=None):
    model = AutoModelForCausalLM.from_pretrained(folder)
    if beside is not None:  # stays a file of the weights as they were
        shutil.copy(folder / "model.safetensors", folder / beside)
    dict((*model.named_parameters(), *model.named_buffers()))[name].data[0] += 1
    model.save_pretrained(folder)


EVERY_TEXT = "trains, which every text reads"


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("midus-hml", {}, r"inserted layer \(midus-hml\) trains, which chooses rows by hidden states.*--method engram"),
        ("ultramem-v2", {}, r"ultramem \(ultramem-v2\) trains, which chooses rows by hidden states.*--set table=exact"),
        ("hashed", {}, "table 'hashed' and addressing 'content', where texts share rows"),
        ("base", {"trainable": "all"}, f"{EVERY_TEXT}; expected only memories of known n-grams.*upscaled with"),
        ("model", {"trainable": "all"}, f"model.embed_tokens.weight {EVERY_TEXT}"),
        ("model", {"adapters": {"r": 2}}, "adapters is set and protect is"),
        ("model", {"protect": "nowhere.txt"}, "protect is 'nowhere.txt', which does not exist"),
        ("model", {"protect": "empty.txt"}, "empty"),
        ("model", {"protect": "corpus"}, "n-grams of memory 'ngram' is left"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_protection_is_refused(model, changes, message, texts, trained, upscaled, tmp_path, monkeypatch):
    if model == "hashed":
        folder = engram(texts, tmp_path, table="hashed", corpus=None, rows=199)
    else:
        folder = upscaled("llama", model) if "-" in model else trained.parent / model
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "corpus").symlink_to(texts / "corpus")
    monkeypatch.chdir(tmp_path)
    with refused(message):
        run_training(run_of(texts, folder, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
