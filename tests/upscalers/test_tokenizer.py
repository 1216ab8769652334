"""The upscaled model's tokenizer is the base's, also where transformers would choose another class for another model type."""

import itertools
import json
import re

import pytest
from pairs import by_default, taking_turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tests.upscalers.checkpoints import RECORD, REQUEST, file_digests, save_base, tensor_files, unverified
from upscalers.checkpoint.tokenizer import keep_tokenizer_class
from upscalers.edits.shuffling import shuffle
from upscalers.request.errors import VerificationError
from upscalers.request.progress import Progress
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
    made = file_digests(tmp_path / "out")
    assert keep_tokenizer_class(base, tmp_path / "out", Progress()) is False  # what is chosen right is left as it is
    assert file_digests(tmp_path / "out") == made
    strip(tmp_path / "out", tmp_path / "stripped")
    assert file_digests(tmp_path / "stripped", without=RECORD) == file_digests(base)


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


def test_a_tokenizer_that_does_not_work_in_the_base_travels_as_it_is_and_a_line_says_why(tmp_path, command):
    base = save_base(tmp_path / "base", "gemma3")
    save_tokenizer(base, None)  # Gemma's own class, which wants an <unk> that this vocabulary lacks
    done = command("--base", base, *REQUEST[:2], "--output", tmp_path / "out", *REQUEST[4:])
    line = r"warning: the base's tokenizer does not work here \(.*unk.*\); its files are copied unchanged\.\n"
    assert done.status == 0 and re.search(line, done.err)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


OWN_CODE = """
open({ran!r}, "a").write("ran")
from transformers import PreTrainedTokenizer
from .own_letters import LETTERS
class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 128
    def get_vocab(self): return dict(LETTERS)
    def _tokenize(self, text, **options): return list(text)
    def _convert_token_to_id(self, token): return LETTERS[token]
    def _convert_id_to_token(self, index): return chr(index)
    def save_vocabulary(self, folder, filename_prefix=None): return ()
"""


def test_a_tokenizer_of_code_travels_and_is_never_run(tmp_path, command, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.exit("a person was asked"))
    base, out = save_base(tmp_path / "base"), tmp_path / "out"
    (base / "tokenization_own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    (base / "own_letters.py").write_text("LETTERS = {chr(i): i for i in range(128)}\n")
    named = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (base / "tokenizer_config.json").write_text(json.dumps(named))
    done = command("--base", base, *REQUEST[:2], "--output", out, *REQUEST[4:])
    assert done.status == 0
    for line in (
        "own_letters.py, tokenization_own.py, code of the base's tokenizer or processor, are copied, and never run here.",
        "warning: the base's tokenizer does not work here (it is code of its publisher, which is never run); its",
    ):
        assert line in done.err
    strip(out, tmp_path / "stripped")
    assert file_digests(tmp_path / "stripped", without=RECORD) == file_digests(base)
    unverified(base, out, overwrite=True)  # nothing in the folder is foreign
    shuffle(out, tmp_path / "edited", seed=1)
    assert (tmp_path / "edited" / "own_letters.py").is_file()
    assert not (tmp_path / "ran").exists()
    for folder in (base, tmp_path / "edited"):
        assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("abc").input_ids == [97, 98, 99]
    assert (tmp_path / "ran").exists()


def test_files_that_git_lfs_left_behind_are_refused_before_anything_is_written(tmp_path, command, refused):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 17477929\n"
    base = save_base(tmp_path / "base", max_shard_size="30KB")
    for name in ("tokenizer.json", "generation_config.json", tensor_files(base)[1].name):
        (base / name).write_text(pointer)
        done = command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out")
        refused(
            done,
            f"{name} of {base} is a Git LFS pointer, not the file; expected what git-lfs downloads. Run",
            ["base"],
        )
        (base / name).unlink()
