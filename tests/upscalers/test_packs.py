"""The method packs: what a glossary may hold, names as texts spell them, deletion of entries, and texts that must stay."""

import json
import shutil

import pytest
import torch
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from midus_hf.banks.level_file import BankError
from midus_hf.cli.edit import main as edit
from midus_hf.cli.upscale import main as upscale_command
from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, BANKS_FOLDER
from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.saved_models import load_for_reading
from tests.tiny import save_tiny_model, save_tiny_tokenizer
from tests.upscalers import checkpoints
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.edits.packs import delete_names
from upscalers.methods.packs import spelled_names
from upscalers.request.errors import RequestError
from upscalers.request.progress import Progress
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

ENTRIES = [
    {"name": "word5", "text": "word7 word8"},
    {"name": ["word20 word21", "word22"], "text": "word9 word10 word11"},
    {"name": "word30", "text": "word12"},
    {"name": "word5", "text": "word13"},
]
COMMON = {"common_names": True}  # every token of the tiny vocabulary is frequent


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("base"))
    save_tiny_tokenizer(folder)
    return folder


def glossary(tmp_path, rows):
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "glossary.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def made(base, tmp_path, rows=ENTRIES, progress=None, **options):
    options = {"corpus": glossary(tmp_path, rows), **COMMON, **options}
    return upscale(base=base, method="packs", output=tmp_path / "out", options=options, progress=progress)


@pytest.fixture(scope="module")
def model(base, tmp_path_factory):
    """Return a model with the packs of all entries; nobody may change it."""
    folder = tmp_path_factory.mktemp("model")
    made(base, folder)
    return folder / "out"


def bank_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).model.services["packs"].banks["packs"]


def logits(folder, tokens):
    return checkpoints.logits(folder, input_ids=torch.tensor([tokens]))


WRONG_ROWS = [
    ([{"name": "", "text": "word7"}], "row 1 of corpus .* has the name ''; expected a name"),
    (
        [ENTRIES[0], {"name": "word6", "text": " "}],
        "row 2 of corpus .* has the text ' '; expected what is to be known",
    ),
    ([{"text": "word7"}], "has the columns text; expected name and text"),
    (
        [*ENTRIES, {"name": "unknown", "text": "word1"}, {"name": "unheard", "text": "word2"}],
        "name 'unheard' of corpus .* has the tokens of 'unknown', another entry; expected names that the tokenizer tells apart",
    ),
    (
        [*ENTRIES, {"name": "word22", "text": "word1"}],
        "row 5 of corpus .* has the name 'word22', which row 2 has beside other names; expected one list",
    ),
]
WRONG_OPTIONS = [
    ({"corpus": None}, "corpus is missing; expected a file of names and texts"),
    ({"max_tokens": 0}, "max_tokens is 0; expected at least 1"),
    ({"open": 0}, "open is 0; expected at least one name"),
    ({"score_bias": float("inf")}, "score_bias is inf; expected a number"),
    ({"distance": -1}, "distance is -1; expected 0 or more positions"),
    ({"common_names": False}, "are one frequent token, which almost every text has: 'word5', 'word22', 'word30'; "),
]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [*((rows, {}, said) for rows, said in WRONG_ROWS), *((ENTRIES, *case) for case in WRONG_OPTIONS)],
)
def test_rows_and_options_that_are_refused(rows, options, message, base, tmp_path):
    with pytest.raises(RequestError, match=message):
        made(base, tmp_path, rows, **options)
    assert not (tmp_path / "out").exists()


def test_protected_texts_hold_no_name(base, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "word1 word20 word22"}) + "\n" + json.dumps({"text": "word3"}) + "\n")
    message = r"hold names of the corpus: 'word20 word21' \(1 texts\); expected none"
    with pytest.raises(RequestError, match=message):
        made(base, tmp_path, protect=str(texts))
    made(base, tmp_path, rows=[ENTRIES[0]], protect=str(texts))
    assert json.loads((tmp_path / "out" / "upscale.json").read_text())["options"]["protect"] == "texts.jsonl"


def test_texts_of_one_name_are_joined_and_long_ones_are_cut_which_a_line_says(base, model, tmp_path):
    progress, told = Progress(), []
    progress.note = told.append
    made(base, tmp_path, max_tokens=2, progress=progress)
    assert "entries longer than 2 tokens, of which the rest is cut: 2" in told
    assert "3 entries of 5 tokens: a bank of 0.0 MB in float32 (512 bytes a token)" in told
    cut, whole = bank_of(tmp_path / "out"), bank_of(model)
    assert [cut.num_tokens(entry) for entry in (1, 2, 3)] == [2, 2, 1]
    assert [whole.num_tokens(entry) for entry in (1, 2, 3)] == [3, 3, 1]


def test_names_are_found_as_texts_spell_them(base):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    assert spelled_names(tokenizer, ["word20 word21", "word3"]) == [[(20, 21)], [(3,)]]
    assert spelled_names(tokenizer, []) == []


def test_a_deleted_name_is_computed_as_by_the_base_and_others_as_before(base, model, tmp_path):
    without = tmp_path / "without"
    assert delete_names(EditRequest(model, without), ["word22"])["banks"] == {"packs": [["word20 word21", "word22"]]}
    for name in ([20, 21], [22]):
        text = [*name, 50, 51]
        assert torch.equal(logits(without, text), logits(base, text))
        assert not torch.equal(logits(model, text), logits(base, text))
    for name in ([5], [30]):
        assert torch.equal(logits(without, [*name, 50, 51]), logits(model, [*name, 50, 51]))
    gone = bank_of(model).pack(2).contiguous().view(torch.uint8).numpy().tobytes()
    assert not any(gone in path.read_bytes() for path in without.rglob("*") if path.is_file())
    assert "word22" not in (without / BANKS_FOLDER / "packs" / "names.json").read_text()


def test_blocks_or_names_are_deleted_and_others_are_refused(model, tmp_path, capsys):
    arguments = ["delete", str(model), "--output", str(tmp_path / "without")]
    for names, message in (
        ([], "expected blocks (--node, perhaps with --subtree) or names of packs (--name), one of both"),
        (["word9"], "name 'word9' is none of the model's"),
        (["word5", "word22", "word30"], "every entry is named; expected some that stay"),
    ):
        assert edit([*arguments, *(word for name in names for word in ("--name", name))]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "without").exists()
    assert edit([*arguments, "--name", "word5"]) == 0
    assert "deleted word5 of packs" in capsys.readouterr().out


def test_what_is_printed_and_the_card_promise_the_base_for_texts_without_a_name_alone(base, model, tmp_path, capsys):
    left_out = ", but for texts with a name of the glossary, which change from the name on"
    corpus = ["--set", f"corpus={glossary(tmp_path, ENTRIES)}", *(f"--set={key}=true" for key in COMMON)]
    request = ["--base", str(base), "--method", "packs", "--output", str(tmp_path / "out"), *corpus]
    for more, said in (
        (["--dry-run"], f"promised{left_out}"),
        (["--no-verify"], f"promised by the method{left_out}; nothing was compared"),
        (["--overwrite"], f"largest difference 0 (base and result in float32){left_out}"),
    ):
        upscale_command([*request, *more])
        assert said in " ".join(capsys.readouterr().out.split())
    start = "Before any training it computes exactly what the base computes"
    assert f"{start}{left_out}.\n" in (model / CARD_FILE).read_text()
    upscale_command(["methods", "packs"])
    assert f"exact at the start{left_out}" in " ".join(capsys.readouterr().out.split())


def test_strip_gives_the_base_back_and_a_second_upscaling_keeps_the_packs(model, tmp_path):
    upscale(base=model, method="llama-pro", output=tmp_path / "deeper")
    strip(tmp_path / "deeper", tmp_path / "out-again")
    text = [5, 50, 51]
    for name in ("deeper", "out-again"):
        assert torch.equal(logits(tmp_path / name, text), logits(model, text))
    assert strip(model, tmp_path / "base-again")["base_confirmed"]
    assert not (tmp_path / "base-again" / BANKS_FOLDER).exists()


def test_a_bank_of_another_base_or_none_is_refused(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    path = copy / BANKS_FOLDER / "packs" / BANK_DESCRIPTION
    described = json.loads(path.read_text())
    described["layout"]["base"] = "0" * 64
    for description, message in (
        (described, "belongs to another model: its base is '0000"),
        (
            {**described, "format": 1},
            r"is not of format 2; expected a bank of packs that this version reads. Upscale again.",
        ),
        (None, r"there is no bank of packs in .*; expected one beside the model"),
    ):
        path.unlink() if description is None else path.write_text(json.dumps(description))
        with pytest.raises(BankError, match=message):
            AutoModelForCausalLM.from_pretrained(copy)


def test_the_tokenizer_of_another_model_is_refused_where_a_command_reads_both(base, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    load_for_reading(str(copy), "auto", "cpu")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    words = {f"word{127 - number}": number for number in range(128)}
    tokenizer.backend_tokenizer.model = WordLevel(words, unk_token="word0")
    tokenizer.save_pretrained(copy)
    message = (
        r"the tokenizer makes tokens \[122\] of the name 'word5', which the packs in .* do not know; expected the"
    )
    with pytest.raises(BankError, match=message):
        load_for_reading(str(copy), "auto", "cpu")
