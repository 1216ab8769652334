"""The method packs: what a glossary may hold, what protected texts promise, and what reports say of both."""

import json
import shutil
from string import ascii_lowercase

import pytest
import torch
from models.pack_models import tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from midus_hf.cli.look import main as look
from midus_hf.cli.upscale import main as upscale_command
from midus_hf.files.checkpoint_files import CARD_FILE
from tests.tiny import save_tiny_model, save_tiny_tokenizer
from tests.upscalers import checkpoints
from tests.upscalers.checkpoints import save_base
from tests.upscalers.contents import same_tensors
from tests.upscalers.word_glossaries import ENTRIES, entries_in, glossary, logits, made, save_base_of_words
from upscalers.request import Progress
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base_of_words(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    made(base, folder)
    return folder / "out"


def test_the_checkpoint_holds_texts(base, model, tmp_path):
    assert entries_in(model) == [
        {"name": ["word5"], "text": "word7 word8\nword13"},
        {"name": ["word20 word21", "word22"], "text": "word9 word10 word11"},
        {"name": ["word30"], "text": "word12"},
    ]
    assert not (model / "memory_bank").exists()
    assert same_tensors(model, base)
    assert "bank" not in inspect_checkpoint(model)["parameters"], "texts are no parameters"
    assert not torch.equal(logits(model, [5, 50]), logits(base, [5, 50]))
    assert torch.equal(logits(model, [6, 50]), logits(base, [6, 50]))


WRONG_ROWS = [
    ([{"text": "word7"}], {}, "has the columns text; expected name and text"),
    ([ENTRIES[0], {"name": "word6", "text": " "}], {}, "row 2 of corpus .* has the text ' '; expected what is"),
    ([*ENTRIES, {"name": "word22", "text": "word1"}], {}, "row 5 of .* also find the entry of row 2 of .*; expected"),
    ([ENTRIES[0], {"name": "unknown", "text": "word1"}], {}, "row 2 of .* 'unknown', which the model's .* do not spell"),
    (ENTRIES, {"corpus": None}, "corpus is missing; expected a file of names and texts"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "options", "message"), WRONG_ROWS)
def test_wrong_rows_and_options_are_refused(rows, options, message, base, tmp_path):
    with pytest.raises(ValueError, match=message):
        made(base, tmp_path, rows, **options)
    assert not (tmp_path / "out").exists()


def test_frequent_words_are_refused_as_names(base, tmp_path):
    folder, words = shutil.copytree(base, tmp_path / "base"), [f"letter{each}" for each in ascii_lowercase]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "x", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    rows = [{"name": ["x", "letterc"], "text": "x"}]
    message = "single characters or frequent words, which almost every text has: 'x', 'letterc'; expected names"
    with pytest.raises(ValueError, match=message):
        made(folder, tmp_path, rows)
    made(folder, tmp_path, rows, common_names=True)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_by_the_length_of_a_text_are_refused(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 64}
    folder = save_base(tmp_path / "base", rope_parameters=rope)
    save_tiny_tokenizer(folder)
    with pytest.raises(ValueError, match=rf"rotates keys by the length of the text \(rope_type '{kind}'\)"):
        made(folder, tmp_path)


def test_bases_without_tokenizer_or_with_packs_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer, to find names in texts; expected one next to the"):
        made(save_base(tmp_path / "base"), tmp_path)
    with pytest.raises(ValueError, match=r"has packs; expected one glossary .*\. Add entries.*: midus edit add"):
        made(model, tmp_path)


def test_protected_texts_keep_their_logits(tmp_path):
    folder = save_tiny_model("llama", tmp_path / "base")
    tiny_tokenizer().save_pretrained(folder)
    rows = [{"name": name, "text": "Of q."} for name in ("Ann", "19", "caf\u00e9")]
    texts = {"An apolis": [], "Annapolis": ["Ann"], "In 1970": ["19"], "cafe": []}
    for number, (text, touched) in enumerate(texts.items()):
        (tmp_path / "text.txt").write_text(text)
        room, ids = tmp_path / str(number), tiny_tokenizer()(text)["input_ids"]
        if touched:
            with pytest.raises(ValueError, match=rf"names of the glossary: '{touched[0]}' \(1 text\); expected none"):
                made(folder, room, rows, protect=str(tmp_path / "text.txt"))
        made(folder, room, rows, **({} if touched else {"protect": str(tmp_path / "text.txt")}))
        assert torch.equal(logits(room / "out", ids), logits(folder, ids)) == (not touched)


@pytest.mark.parametrize("method", ["llama-pro", "midus-hml", "moc", "hier-ffn"])
def test_a_second_upscaling_and_strip_keep_the_glossary(method, model, tmp_path):
    upscale(base=model, method=method, output=tmp_path / "more", options=checkpoints.SMALL.get(method))
    strip(tmp_path / "more", tmp_path / "out-again")
    assert strip(model, tmp_path / "base-again")["base_confirmed"]
    assert not (tmp_path / "base-again" / "glossary.jsonl").exists()
    for name in ("more", "out-again"):
        assert entries_in(tmp_path / name) == entries_in(model)
        assert torch.equal(logits(tmp_path / name, [5, 50, 51]), logits(model, [5, 50, 51]))


def test_a_checkpoint_without_its_glossary_is_refused(model, tmp_path):
    without = shutil.copytree(model, tmp_path / "without")
    (without / "glossary.jsonl").unlink()
    with pytest.raises(
        ValueError, match=r"there is no glossary\.jsonl in .*without; expected one next to the weights"
    ):
        upscale(base=without, method="llama-pro", output=tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_reports_promise_the_base_without_names_only(base, model, tmp_path, capsys):
    def shown(*words):
        upscale_command([*map(str, words)])
        return " ".join(capsys.readouterr().out.split())

    left_out = ", but for texts with a name of the glossary, which change from the name on"
    corpus = ["--set", f"corpus={glossary(tmp_path, ENTRIES)}", "--set", "common_names=true"]
    request = ["--base", base, "--method", "packs", "--output", tmp_path / "out", *corpus]
    for more, said in (
        ("--dry-run", f"promised{left_out}"),
        ("--no-verify", f"promised by the method{left_out}; nothing was compared"),
        ("--overwrite", f"largest difference 0 (base and result in float32){left_out}"),
    ):
        assert said in shown(*request, more)
    start = "Before any training it computes exactly the same as the base"
    assert f"{start}{left_out}.\n" in (model / CARD_FILE).read_text()
    assert f"exact at the start{left_out}" in shown("methods", "packs")
    inspected, last = shown("inspect", model), len(inspect_checkpoint(model)["layers"]) - 1
    assert f"added memory packs (inside-attention) in layers 0-{last}; a glossary of 3 entries" in inspected
    assert "base 0" not in inspected


def test_what_an_answer_reads_is_told_by_the_glossary(model):
    glossary = AutoModelForCausalLM.from_pretrained(model).glossary
    ids = AutoTokenizer.from_pretrained(model)("word1 word5 word20 word21 word2", return_tensors="pt")["input_ids"]
    assert [entry.names[0] for entry in glossary.open_at_end(ids[0])] == ["word5", "word20 word21"]
    assert glossary.open_at_end([1, 2]) == []


def test_a_template_without_marks_is_reported(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(shutil.copytree(base, tmp_path / "base"))
    progress, told = Progress(), []
    progress.note = told.append
    made(tmp_path / "base", tmp_path, progress=progress)
    remark = "the chat template does not show where questions and answers begin: packs close at the ends of lines"
    assert sum(line.startswith(remark) for line in told) == 1
    with pytest.warns(UserWarning, match=remark):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_touched_tells_from_ids_what_an_entry_can_change(base, model, tmp_path, capsys):
    texts = ["word1 word2 word3", "word1 word22 word3 word4", "word20 word2 word5"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["touched", str(model), "--text", str(tmp_path / "texts.jsonl")]
    assert look([*words, "--json", "--output", str(tmp_path / "rows.csv")]) in (0, None)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row | {"memory": "packs", "documents": 3, "untouched": 1, "tokens": 10, "differing": 0.4} == row
    firsts = [line.split(",")[-1] for line in (tmp_path / "rows.csv").read_text().splitlines()[1:]]
    assert firsts == ["", "1", "2"]
    for text, first in zip(([1, 2, 3], [1, 22, 3, 4], [20, 2, 5]), (3, 1, 2), strict=True):
        same = (logits(model, text) == logits(base, text)).all(-1)[0]
        assert same.tolist() == [True] * first + [False] * (len(text) - first)
    assert look([*words, "--prove"]) in (0, None)
    assert "1 untouched documents computed: their logits are the same" in capsys.readouterr().out
    assert look([*words, "--prove", "--json"]) in (0, None)
    report = json.loads(capsys.readouterr().out)
    assert report["proven"] == 1
    assert [len(digest) for digest in report["sha256"].values()] == [64]
