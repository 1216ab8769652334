"""New tokens: files of them, what they do to texts, and the ids that they may get."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from upscalers.checkpoint.new_tokens import ids_in_use, new_tokens, read_tokens

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ("instead", "water")
ROWS = 1000


def with_words(alphabet, space):
    """Return the model of a tokenizer that has each of WORDS as one token with the space in front, and not without it."""
    vocabulary, merges = ["<unk>", *alphabet], []
    for word in WORDS:
        left, right = space + word[:3], word[3:]
        pairs = [(left[:end], left[end]) for end in range(1, len(left))]
        pairs += [(right[first], right[first + 1 :]) for first in range(len(right) - 2, -1, -1)]
        merges += [*pairs, (left, right)]
    vocabulary += map("".join, merges)
    numbered = {token: number for number, token in enumerate(dict.fromkeys(vocabulary))}
    return Tokenizer(models.BPE(numbered, list(dict.fromkeys(merges)), unk_token="<unk>"))


def byte_level():
    tokenizer = with_words(BYTES, "Ġ")
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def metaspace(scheme):
    tokenizer = with_words("abcdefghijklmnopqrstuvwxyzéč,▁", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def llama_2():
    tokenizer = with_words("abcdefghijklmnopqrstuvwxyzéč,▁", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def added(folder, tokens, tokenizer=None, in_use=None, special=False, inside_words=False):
    (folder / "t.json").write_text(json.dumps(tokens))
    return new_tokens(str(folder / "t.json"), tokenizer or byte_level(), ROWS, in_use or {}, special, inside_words)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.txt", b"\xef\xbb\xbfab\ncd\n"),
        ("t.txt", b"ab\r\ncd\r\n"),
        ("t.txt", b"ab\ncd"),
        ("t.json", b'\xef\xbb\xbf["ab", "cd"]'),
        ("T.JSON", b'["ab", "cd"]'),
    ],
)
def test_files_as_editors_write_them(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert read_tokens(tmp_path / name) == ({"ab": "ab", "cd": "cd"}, [])


def test_accents_are_composed(tmp_path):
    (tmp_path / "t.txt").write_text(unicodedata.normalize("NFD", "café\nab\n"))
    texts, remarks = read_tokens(tmp_path / "t.txt")
    assert texts == {"café": "café", "ab": "ab"}
    assert remarks == ["tokens whose accents were characters of their own, and are composed now (NFC): 'café'"]


@pytest.mark.parametrize("token", ["electro\u200blyser", "a\x07", "\ufeffab", "soft\u00adhyphen"])
def test_tokens_that_no_text_has_are_refused(token, tmp_path):
    with pytest.raises(
        ValueError, match="has tokens with control characters or invisible ones, which texts lack: '"
    ) as told:
        added(tmp_path, [token])
    assert ascii(token) in str(told.value)
    assert len(added(tmp_path, ["क्\u200dष", "👩\u200d👩"], tokenizer=byte_level()).ids) == 2  # joiners are spelling


@pytest.mark.parametrize("token", ["đem", "Ångström"])
def test_tokens_whose_texts_are_not_read_back_are_refused(token, tmp_path):
    """A byte-level decoder takes letters for bytes where it can; a space in front is no byte."""
    with pytest.raises(
        ValueError, match=f"would not be decoded to themselves: '{token}' \\(read back as .*put a space"
    ):
        added(tmp_path, [token, "ab"])
    assert read_back(added(tmp_path, [f" {token}", "Dvořák"]).tokenizer, f"the {token}, Dvořák")


def read_back(tokenizer, text):
    return tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize("made", [lambda: metaspace("always"), llama_2], ids=["always", "Llama 2"])
def test_spaces_behind_tokens_are_refused_but_for_marks(made, tmp_path):
    for tokens in (["<|tool|>"], [" café"], ["café"]):
        with pytest.raises(ValueError, match="texts with them would not be decoded to themselves"):
            added(tmp_path, tokens, made())
    assert len(added(tmp_path, ["<|tool|>"], made(), special=True).ids) == 1
    tokenizer = added(tmp_path, ["<|tool|>", " café", "xyz"], metaspace("first")).tokenizer
    assert read_back(tokenizer, "call <|tool|>now, café and xyz, cafés")


def test_tokens_do_not_cut_words_of_the_base(tmp_path):
    base = byte_level()
    for token in (" inst", " instea", "instead", " wate"):
        with pytest.raises(
            ValueError, match=r"cut words that the base has as one token: ' ?[a-z]+' \(in '(instead|water)'\)"
        ):
            added(tmp_path, [token])
        result = added(tmp_path, [token], inside_words=True)
        assert result.ids[0] in result.tokenizer(" instead of water").input_ids
    result = added(tmp_path, ["ate", "stea", " steam"])  # found as words alone
    for text in (" instead of water", " later", "stead"):
        assert result.tokenizer(text).input_ids == base(text).input_ids
    assert [*result.ids[:2]] == [each for each in result.tokenizer("the ate, stea.").input_ids if each in result.ids]


def test_scripts_without_spaces_have_no_words_to_keep_whole(tmp_path):
    result = added(tmp_path, ["東京", "塔"])
    assert [*result.ids] == [each for each in result.tokenizer("は東京塔は").input_ids if each in result.ids]


def test_of_another_tokenizer_what_does_harm_is_left_out_and_said(tmp_path):
    pieces = ["<unk>", *BYTES, "Ġinst", "Ġsteam", "pli", "ĠĠ", "Ġ\u0107", "<|x|>", "»."]
    other = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    other.pre_tokenizer, other.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=other, unk_token="<unk>").save_pretrained(tmp_path / "other")
    source = str(tmp_path / "other")
    result = new_tokens(source, byte_level(), ROWS, {}, False, False)
    assert result.tokenizer.convert_ids_to_tokens([*result.ids]) == [" steam", "<|x|>"]
    told = "\n".join(result.remarks)
    for line in (
        f"tokens of {source} that continue words (inside_words=true adds them), and are not added: 1",
        f"tokens of {source} of white space or invisible characters, and are not added: 2",
        f"tokens of {source} are left out, since they would cut words that the base has as one token: 1: ' inst' (in 'instead'); "
        "inside_words=true adds them",
    ):
        assert line in told
    whole = new_tokens(source, byte_level(), ROWS, {}, False, True)
    assert whole.tokenizer.convert_ids_to_tokens([*whole.ids]) == [" inst", " steam", "pli", "<|x|>"]


def test_ids_that_configs_name_are_skipped(tmp_path):
    configs = {
        "config.json": {
            "pad_token_id": 5,
            "text_config": {"eos_token_id": [6, 7]},
            "image_token_index": 8,
            "hidden_size": 9,
        },
        "generation_config.json": {
            "suppress_tokens": [10],
            "forced_decoder_ids": [[1, 11]],
            "num_token_ids": None,
            "top_k": 50,
        },
    }
    used = ids_in_use(configs)
    assert used.keys() == {1, *range(5, 9), 10, 11} and used[7] == "eos_token_id"
    base = byte_level()
    first = len(base)
    for ids, expected in (
        ((first,), first + 1),
        ((first + 1,), first + 2),
        ((first + 2,), first),
        ((first, first + 2), first + 3),
        ((first, first + 3), first + 1),
    ):
        result = added(tmp_path, ["ab", "<|t|>"], in_use=dict.fromkeys(ids, "pad_token_id"))
        assert result.ids == range(expected, expected + 2)
        assert [*result.reserved] == [*range(first, expected)]
        told = f"the ids {first} to {expected - 1} are skipped, since the config has pad_token_id = "
        assert any(told in line for line in result.remarks) is (expected > first)
        assert result.tokenizer("ab<|t|>").input_ids == [*result.ids] and not {*ids} & {*result.ids}


@given(st.lists(st.text("abé ř東<|>", min_size=1, max_size=6), min_size=1, max_size=3, unique=True), st.booleans())
def test_tokens_are_refused_or_texts_are_read_back(tmp_path_factory, tokens, inside_words):
    folder = tmp_path_factory.mktemp("tokens")
    try:
        tokenizer = added(folder, tokens, inside_words=inside_words).tokenizer
    except ValueError:
        return
    for token in tokens:
        assert read_back(tokenizer, f"the {token} of, {token.strip()}, and instead")
    assert tokenizer(" instead").input_ids == byte_level()(" instead").input_ids
