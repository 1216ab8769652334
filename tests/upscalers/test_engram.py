"""The method engram: its layers, numbers of tokens, n-grams of a corpus, and refusals."""

import json
import shutil
from unittest.mock import patch

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from midus_hf.memories.engram.known_ngrams import KnownNgrams
from midus_hf.memories.engram.options import TOKEN_NUMBER_LIMIT as LIMIT
from midus_hf.memories.engram.options import EngramOptions
from midus_hf.memories.hosting.parts import TokenPlaces
from tests.tiny import tiny_model
from tests.upscalers.contents import config_of, read_tensors, same_tensors
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

WORDS = ["<unk>", "the", "The", "THÉ", "cat", "Cat", "sat", " ", "\n", "\u3000"]
EXACT = {"table": "exact", "width": 8}
NAMES = {**EXACT, "corpus": "x", "names": True, "min_order": 1}


@pytest.fixture(scope="module")
def spoken_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spoken")
    tiny_model("llama").save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


def write_corpus(folder):
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat")
    (folder / "b.txt").write_text("The cat")
    return folder


def write_names(path, names):
    path.write_text("".join(json.dumps({"text": name}) + "\n" for name in names))
    return str(path)


@pytest.fixture(scope="module")
def learned(spoken_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    options = {**EXACT, "corpus": str(write_corpus(folder / "texts"))}
    upscale(base=spoken_base, method="engram", output=folder / "out", options=options, verify=False)
    return folder / "out"


def made(base, tmp_path, **options):
    rows = {} if options.get("table") == "exact" else {"rows": 199}
    options = {"width": 8, **rows, **options}
    upscale(base=base, method="engram", output=tmp_path / "out", options=options, verify=False)
    return read_tensors(tmp_path / "out")


def test_tokens_of_like_text_have_one_number(spoken_base, tmp_path):
    upscale(base=spoken_base, method="engram", output=tmp_path / "out", options={"rows": 199}, dtype="bfloat16")
    tensors = read_tensors(tmp_path / "out")
    numbers = tensors["model.memory_tables.ngram.0.token_numbers"]
    assert numbers.dtype == torch.int64
    assert numbers.tolist() == [0, 1, 1, 1, 4, 4, 6, 7, 7, 7, *range(10, 128)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.memory_tables["ngram"]["0"].token_numbers, numbers)
    # The second layer and the middle one have it.
    assert {name.split(".")[2] for name in tensors if ".memories." in name} == {"1", "2"}


def test_each_ngram_of_the_corpus_has_a_row(spoken_base, learned):
    tensors, model = read_tensors(learned), AutoModelForCausalLM.from_pretrained(learned)
    # As numbers from 1: the, cat, sat are 2, 5, 7.
    expected = [5 * LIMIT**0 + 2 * LIMIT, 7 + 5 * LIMIT, 7 + 5 * LIMIT + 2 * LIMIT**2]
    assert tensors["model.memory_tables.ngram.0.ngrams"].tolist() == expected
    assert tensors["model.layers.1.memories.ngram.value_table"].shape == (4, 8)
    memory, tables = model.model.layers[1].memories["ngram"], model.model.memory_tables["ngram"]["0"]()
    numbers = memory.numbers_of(torch.tensor([[2, 5, 6, 1]]), tables, TokenPlaces())
    assert memory.rows_read(numbers, tables).tolist() == [[[0, 0], [1, 0], [2, 3], [0, 0]]]
    # Records name the corpus and no folder.
    for name in ("config.json", "upscale.json", "README.md"):
        assert str(learned.parent) not in (learned / name).read_text()
    assert config_of(learned)["upscale"]["options"]["corpus"] == "texts"


def test_min_documents_limits_the_ngrams_with_rows(spoken_base, command, tmp_path):
    corpus = write_corpus(tmp_path / "texts")
    tensors = made(spoken_base, tmp_path, **EXACT, corpus=str(corpus), min_documents=2)
    assert tensors["model.memory_tables.ngram.0.ngrams"].tolist() == [5 + 2 * LIMIT]
    words = ["--set", "table=exact", "--set", f"corpus={corpus}", "--set", "width=8", "--dry-run"]
    assert command("--base", spoken_base, "--method", "engram", *words).err == "3 n-grams of the corpus have rows\n"


def test_end_tokens_are_in_no_ngram(spoken_base, learned, tmp_path):
    base, tokenizer = shutil.copytree(spoken_base, tmp_path / "base"), AutoTokenizer.from_pretrained(spoken_base)
    behind = processors.TemplateProcessing(single="$A <unk>", special_tokens=[("<unk>", 0)])
    tokenizer.backend_tokenizer.post_processor = behind
    tokenizer.save_pretrained(base)
    tensors = made(base, tmp_path, **EXACT, corpus=str(write_corpus(tmp_path / "texts")))
    name = "model.memory_tables.ngram.0.ngrams"
    assert torch.equal(tensors[name], read_tensors(learned)[name])


def test_each_name_of_a_corpus_has_one_row(spoken_base, tmp_path):
    base = shutil.copytree(spoken_base, tmp_path / "base")
    options = {**NAMES, "corpus": write_names(tmp_path / "names.jsonl", ("the cat", "cat", "dog the cat sat"))}
    tokenizer = AutoTokenizer.from_pretrained(base)
    framed = processors.TemplateProcessing(single="<unk> $A <unk>", special_tokens=[("<unk>", 0)])
    tokenizer.backend_tokenizer.post_processor = framed
    tokenizer.save_pretrained(base)
    # As numbers from 1: the, cat, sat are 2, 5, 7.
    expected = [5, 5 + 2 * LIMIT, 7 + 5 * LIMIT + 2 * LIMIT**2]
    for name, each in (("plain", spoken_base), ("framed", base)):
        upscale(base=each, method="engram", output=tmp_path / name, options=options, verify=False)
        assert read_tensors(tmp_path / name)["model.memory_tables.ngram.0.ngrams"].tolist() == expected


# Names, and the lines on those that are cut or share a row.
_NAMES = {
    "names of their own": (["the cat", "cat", "the", "the cat"], []),
    "one number": (["the Cat", "the", "THÉ cat", "The"], [
        "names that share a row, since their n-grams are one: 4 ('the Cat', 'THÉ cat', 'the', 'The')"]),
    "too long": (["the cat sat the", "cat sat the", "sat"], [
        "names longer than 3 tokens, whose last 3 have the row: 1 ('the cat sat the')",
        "names that share a row, since their n-grams are one: 2 ('the cat sat the', 'cat sat the')"]),
    "many": (["dog", "ox", "cow", "ewe", "ram", *("the " * count for count in range(4, 10))], [
        "names longer than 3 tokens, whose last 3 have the row: 6 ('the the the the', 'the the the the the', "
        "'the the the the the the', 'the the the the the the the' and 2 more)",
        "names that their tokens do not spell, whose rows other words may read: 5 ('dog', 'ox', 'cow', 'ewe' and 1 more)",
        "names that share a row, since their n-grams are one: 11 ('dog', 'ox', 'cow', 'ewe' and 7 more)"]),
}  # fmt: skip


@pytest.mark.parametrize("case", _NAMES)
def test_cut_and_shared_names_are_listed(spoken_base, command, tmp_path, case):
    names, lines = _NAMES[case]
    options = {**NAMES, "corpus": write_names(tmp_path / "names.jsonl", names)}
    words = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    request = ("--base", spoken_base, "--method", "engram", *words, "--dry-run")
    told = command(*request).err.splitlines()
    assert told[0].endswith("ends of names have rows")
    assert told[1:] == lines
    told = command(*request, "--set", "rows=1").err.splitlines()
    assert told[1:] == [line for line in lines if "share" not in line]


# Pre-tokenizers, and whether tokens are of bytes: in the manner of Llama 2, Gemma, GPT-2 and Llama 3.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_KINDS = {
    "a mark in front of each text": (pre_tokenizers.Metaspace(prepend_scheme="always", split=False), False),
    "a mark for each space": (pre_tokenizers.Metaspace(prepend_scheme="never", split=False), False),
    "bytes of words": (pre_tokenizers.ByteLevel(add_prefix_space=False), True),
    "bytes of words with a sign": (pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ]), True),
    "pieces of words": (pre_tokenizers.BertPreTokenizer(), False),
}  # fmt: skip
_SIGNS = "\"'\u201c\u2018([{<*-/#$:@|=."
_FRONTS = [*("", "in ", "\n", "in\n\n", "in\n- ", "in **", "non-"), *_SIGNS, *(f"in {sign}" for sign in _SIGNS)]
_NAMED = dict.fromkeys(("Berlin", "sodium", "Kestrel gateway", "C++"), _FRONTS) | {
    "\u5317\u4eac": ["", "\u5728", "(", "in "],
    "\u00f8": ["(", "in "],
}


@pytest.fixture(params=_KINDS)
def split_base(request, tmp_path):
    """Return a checkpoint with a tokenizer of a kind; tokens merge signs with beginnings and ends of names."""
    split, is_of_bytes = _KINDS[request.param]
    is_of_pieces = request.param == "pieces of words"
    tokenizer = Tokenizer((models.WordPiece if is_of_pieces else models.BPE)(unk_token="<unk>"))
    # As sentencepiece does, merges are learned in words with their mark.
    is_of_marks = isinstance(split, pre_tokenizers.Metaspace)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never") if is_of_marks else split
    words = ["in Berlin the sodium near a Kestrel gateway, a marigold in C++ for marigold \n\n is"] * 9
    merged = [f"in {sign}sodium {sign}s {sign}Ber {sign}C C++{sign} +{sign}" for sign in _SIGNS] * 9
    han = ["\u5728\u5317 \u5728\u5317 \u5317\u4eac"] * 99
    known = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet() if is_of_bytes else ["\u00f8", "\u0178"]}
    trainer = (trainers.WordPieceTrainer if is_of_pieces else trainers.BpeTrainer)(
        vocab_size=600, special_tokens=["<unk>"], show_progress=False, **known
    )
    tokenizer.train_from_iterator([*words, *merged, *han], trainer)
    tokenizer.pre_tokenizer = split
    marks = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    tokenizer.decoder = decoders.WordPiece() if is_of_pieces else decoders.ByteLevel() if is_of_bytes else marks
    tiny_model("llama", vocab_size=600).save_pretrained(tmp_path / "base")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.save_pretrained(tmp_path / "base")
    return tmp_path / "base", fast


def test_a_name_is_read_at_its_last_token_after_every_sign(split_base, tmp_path):
    base, tokenizer = split_base
    tensors = made(base, tmp_path, **{**NAMES, "corpus": write_names(tmp_path / "names.jsonl", [*_NAMED, "gold"])})
    ngrams, numbers = (tensors[f"model.memory_tables.ngram.0.{name}"] for name in ("ngrams", "token_numbers"))
    table = KnownNgrams("ngram", EngramOptions(table="exact", min_order=1), ngrams, numbers)
    for name, fronts in _NAMED.items():
        for front in fronts:
            for behind in (" is", *(".", ",", ")", "'") * (name == "C++")):
                text = f"{front}{name}{behind}"
                (keys,) = table.keys_of([text], tokenizer)
                offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
                last = sum(first < len(front + name) for first, _ in offsets) - 1
                assert table.reads(keys.keys).nonzero().flatten().tolist() == [last], (text, tokenizer.tokenize(text))
    (keys,) = table.keys_of(["in a marigold is", "a marigold", "in \u0178 is", "\u0178"], tokenizer)
    assert not table.reads(keys.keys).any()


KNOWN, UNKNOWN = torch.tensor([[9, 1, 4, 6, 20, 30]]), torch.tensor([[4, 1, 6, 9, 20, 30]])


def test_texts_without_known_ngrams_have_the_bases_logits(spoken_base, learned, tmp_path):
    model, taught = AutoModelForCausalLM.from_pretrained(learned), tmp_path / "taught"
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".memories." in name:
            torch.nn.init.normal_(parameter, std=0.1)
            parameter.data[0] *= "value_table" not in name
    shutil.copytree(learned, taught)
    model.save_pretrained(taught)
    base = AutoModelForCausalLM.from_pretrained(spoken_base)
    with torch.no_grad():
        assert torch.equal(model(UNKNOWN).logits, base(UNKNOWN).logits)
        differs = (model(KNOWN).logits != base(KNOWN).logits).any(-1)[0]
    assert differs.tolist() == [False, False, True, True, True, True]
    (tmp_path / "more.txt").write_text("sat cat the")
    made(taught, tmp_path, **EXACT, corpus=str(tmp_path / "more.txt"))
    strip(tmp_path / "out", output=tmp_path / "one")
    assert same_tensors(tmp_path / "one", taught)


def test_missing_tokenizer_or_datasets_is_refused(spoken_base, base, tmp_path, without):
    corpus = write_corpus(tmp_path / "texts")
    shutil.copytree(spoken_base, tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer of \S+ cannot be loaded: "):
        made(tmp_path / "base", tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer, to tokenize the corpus"):
        made(base, tmp_path, **EXACT, corpus=str(corpus))
    with patch.object(PreTrainedTokenizerFast, "is_fast", False):
        with pytest.raises(ValueError, match="does not tell what its tokens spell; expected one with"):
            made(spoken_base, tmp_path, **NAMES | {"corpus": write_names(tmp_path / "names.jsonl", ["cat"])})
    without("datasets")
    with pytest.raises(ValueError, match="needs the package datasets, not installed"):
        made(spoken_base, tmp_path, **EXACT, corpus=str(corpus))


def test_spellings_are_apart_without_compression(spoken_base, base, tmp_path):
    (tmp_path / "config.json").write_bytes((spoken_base / "config.json").read_bytes())
    request = {"method": "engram", "dry_run": True, "options": {"rows": 199, "width": 8}}
    expected, known = (upscale(base=each, **request) for each in (spoken_base, tmp_path))
    assert (known.bytes.written, known.parameters) == (expected.bytes.written, expected.parameters)
    assert not [name for name in made(spoken_base, tmp_path, compress=False) if "token_numbers" in name]
    upscale(base=base, method="engram", output=tmp_path / "other", options={"rows": 199})
    assert "no tokenizer: tokens are numbered by their ids" in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.parametrize(("options", "message"), [
    ({"table": "exact"}, "table is 'exact' and corpus None; expected a corpus if and only if"),
    ({"corpus": "x"}, "table is 'hashed' and corpus 'x'; expected a corpus if and only if"),
    ({"min_documents": 0}, "min_documents is 0; expected at least 1"),
    ({"min_documents": 2}, "min_documents is 2; expected at least 1, and a corpus for more"),
    ({"names": True}, "names is true, corpus None, min_documents 1 and min_order 2; expected a corpus of names"),
    ({**NAMES, "min_order": 2}, "corpus 'x', min_documents 1 and min_order 2; expected a corpus of names"),
    ({**NAMES, "min_documents": 2}, "corpus 'x', min_documents 2 and min_order 1; expected a corpus of names"),
    ({**NAMES, "corpus": "names.txt"}, r"names.txt has the name 'the cat\\ndog', of several lines; expected a text for"),
    ({"known_tokens": 5}, "known_tokens or known_ngrams is given; expected neither"),
    ({**EXACT, "corpus": "/nowhere"}, "corpus is '/nowhere'"),
    ({**EXACT, "corpus": "words.txt"}, "words.txt has no n-gram of 2 tokens or more that 1 .*; expected n-grams to"),
])  # fmt: skip
def test_what_it_refuses(options, message, spoken_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("cat")
    (tmp_path / "names.txt").write_text("\nthe cat\ndog\n")
    with pytest.raises(ValueError, match=message):
        upscale(base=spoken_base, method="engram", output=tmp_path / "out", options=options)
