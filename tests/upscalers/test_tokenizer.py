"""The upscaled model's tokenizer is the base's, also where transformers would choose another class for another model type."""

import itertools
import json

import pytest
from pairs import by_default, taking_turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tests.upscalers.checkpoints import RECORD, file_digests, save_base, unverified
from upscalers.checkpoint.tokenizer import keep_tokenizer_class
from upscalers.request.errors import VerificationError
from upscalers.runs.strip import strip

TEXT = "In 1984, don't   forget: naïve x=3.14!"


def save_tokenizer(folder, tokenizer_class: str | None) -> None:
    """A byte-level BPE without the pre-tokenizer that a family's own class would put in its place."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = ["In 1984, don't forget 3.14", "naive x=3.14! don't", "1984 1984  3.14   forget"]
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=128, initial_alphabet=[], show_progress=False))
    bpe.save(str(folder / "tokenizer.json"))
    config = {"model_max_length": 128} | ({"tokenizer_class": tokenizer_class} if tokenizer_class else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


CLASSES = [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"]
OF_FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.mark.parametrize(
    ("tokenizer_class", "of_family"),
    by_default([*taking_turns(CLASSES, OF_FAMILIES), (None, "qwen2")], itertools.product(CLASSES, OF_FAMILIES)),
)
def test_the_tokenizer_reads_as_before_and_comes_back(tmp_path, of_family, tokenizer_class):
    base = save_base(tmp_path / "base", of_family)
    save_tokenizer(base, tokenizer_class)
    unverified(base, tmp_path / "out")
    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(after) is type(before)
    assert after(TEXT).input_ids == before(TEXT).input_ids
    strip(tmp_path / "out", tmp_path / "stripped")
    assert file_digests(tmp_path / "stripped", without=RECORD) == file_digests(base)


def test_a_tokenizer_that_is_chosen_right_is_left_as_it_is(tmp_path):
    for name in ("base", "copy"):
        save_tokenizer(save_base(tmp_path / name, "llama"), "PreTrainedTokenizerFast")
    before = file_digests(tmp_path / "copy")
    assert keep_tokenizer_class(tmp_path / "base", tmp_path / "copy") is False
    assert file_digests(tmp_path / "copy") == before


def test_a_tokenizer_that_reads_otherwise_even_so_is_an_error(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    save_tokenizer(base, None)
    original = AutoTokenizer.from_pretrained

    def other_ids(*args, **kwargs):
        loaded = original(*args, **kwargs)
        if "partial" in str(args[0]):
            loaded._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return loaded

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", other_ids)
    with pytest.raises(VerificationError, match=r"reads a text otherwise than the base's .*expected the same ids"):
        unverified(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_does_not_work_in_the_base_travels_as_it_is(tmp_path):
    base = save_base(tmp_path / "base", "gemma3")
    save_tokenizer(base, None)  # Gemma's own class, which wants an <unk> that this vocabulary lacks
    unverified(base, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
