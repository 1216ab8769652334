"""The upscaled model's tokenizer is the base's, also where transformers would choose another class for another model type."""

import itertools
import json
import re
import shutil

import pytest
from composite import composite_model
from pairs import by_default, taking_turns
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoProcessor, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.upscalers.checkpoints import RECORD, REQUEST, Recorder, edit_config, save_base, unverified
from tests.upscalers.contents import file_digests
from upscalers.checkpoint.source import Source
from upscalers.checkpoint.tokenizer import keep_tokenizer, name_processors
from upscalers.edits.checkpoint_edit import shuffle
from upscalers.request import Progress, VerificationError
from upscalers.runs.strip import extract, strip

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
OF_FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
USUAL = [*taking_turns(CLASSES, OF_FAMILIES), (None, "qwen2")]


@pytest.mark.parametrize(("tokenizer_class", "of_family"), by_default(USUAL, itertools.product(CLASSES, OF_FAMILIES)))
def test_tokenizer_reads_as_before(tmp_path, of_family, tokenizer_class):
    base, out = save_base(tmp_path / "base", of_family), tmp_path / "out"
    save_tokenizer(base, tokenizer_class)
    unverified(base, out)
    assert_reads_alike(base, out)
    made = file_digests(out)
    assert keep_tokenizer(Source(str(base), base), out, Progress()) == {}  # what is chosen right is left as it is
    assert file_digests(out) == made
    assert_strips(out, base, tmp_path)


def assert_reads_alike(base, other):
    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(other)
    assert type(after) is type(before) and after(TEXT).input_ids == before(TEXT).input_ids


def assert_strips(out, base, folder):
    strip(out, folder / "stripped")
    assert file_digests(folder / "stripped", without=RECORD) == file_digests(base)


# Types with a class of their own, without one, and those whose files Transformers corrects.
SOME_TYPES = ("qwen2", "phi3", "olmo2", "gpt_neox", "minimax_m2")
EVERY_TYPE = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,)


@pytest.mark.parametrize("types", by_default([SOME_TYPES], [SOME_TYPES, EVERY_TYPE]), ids=len)
def test_types_keep_their_tokenizers(types, tmp_path):
    """Transformers names a class for each type, and corrects what files of some types name."""
    changed, base, out = {}, tmp_path / "base", tmp_path / "out"
    for tokenizer_class, model_type in itertools.product((None, "LlamaTokenizerFast"), types):
        for folder, its_type in ((base, model_type), (out, f"midus_{model_type}")):
            folder.mkdir(exist_ok=True)
            save_tokenizer(folder, tokenizer_class)
            (folder / "config.json").write_text(json.dumps({"model_type": its_type}))
        progress = Recorder()
        record = keep_tokenizer(Source(str(base), base), out, progress)
        if progress.warnings:  # its own class wants another vocabulary
            continue
        changed[tokenizer_class, model_type] = bool(record)
        assert_reads_alike(base, out)
    assert changed[None, "qwen2"] and len(changed) > sum(changed.values()) > 1


# The expression that Mistral published first, which does not part words where capitals begin, and what it makes of digits.
PUBLISHED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CAPITALS = "eBay sells NaOH at pH 7 in mL, 2048"


def save_mistral(folder, digits: str):
    """A base of Mistral whose tokenizer Transformers mends, as it mends those of more than 100,000 tokens."""
    save_base(folder, "mistral", vocab_size=100_352, hidden_size=8, intermediate_size=8)
    bpe, split = Tokenizer(models.BPE()), pre_tokenizers.Split(Regex(PUBLISHED % digits), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([CAPITALS] * 2, trainer)
    saved = json.loads(bpe.to_str())
    saved["model"]["vocab"] |= {f"filler{number}": number for number in range(len(saved["model"]["vocab"]), 100_300)}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    (folder / "tokenizer_config.json").write_text(json.dumps({"fix_mistral_regex": True}))
    edit_config(folder, transformers_version="4.57.1")
    return folder


@pytest.mark.parametrize(("digits", "method"), [("", "midus-hml"), ("{1,3}", "midus-hml"), ("", "llama-pro")])
def test_tokenizer_fixed_by_type_stays_fixed(digits, method, tmp_path, command):
    base, out = save_mistral(tmp_path / "base", digits), tmp_path / "out"
    options = ("--set", "n=8", "--set", "k=2") if method == "midus-hml" else ("--num-new-layers", "1")
    done = command("--base", base, "--method", method, "--output", out, *options)
    mended = AutoTokenizer.from_pretrained(base)
    assert mended(CAPITALS).input_ids != Tokenizer.from_file(str(base / "tokenizer.json")).encode(CAPITALS).ids
    line = "the tokenizer is written as transformers loads the base's: by the base's model_type it reads the same files differently."
    assert done.status == 0 and (line in done.err) is (method == "midus-hml")
    assert "local_files_only" not in (out / "tokenizer_config.json").read_text()
    trained, stripped, edited = (tmp_path / name for name in ("trained", "stripped", "edited"))
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(trained)  # with the version of today, as a run does
    AutoTokenizer.from_pretrained(out).save_pretrained(trained)
    told = command("strip", out, "--output", stripped)
    assert ("the tokenizer's files are not the base's:" in told.err) is (method == "midus-hml")
    shuffle(out, edited, seed=1) if method == "midus-hml" else shutil.copytree(out, edited)
    for folder in (out, trained, stripped, edited):
        assert AutoTokenizer.from_pretrained(folder)(CAPITALS).input_ids == mended(CAPITALS).input_ids, folder


def test_changed_tokenizer_is_an_error(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    save_tokenizer(base, None)
    original = AutoTokenizer.from_pretrained

    def other_ids(*args, **kwargs):
        loaded = original(*args, **kwargs)
        if "partial" in str(args[0]):
            loaded._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return loaded

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", other_ids)
    with pytest.raises(VerificationError, match=r"tokenizes a text differently .*expected the same ids"):
        unverified(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_broken_tokenizer_is_copied_with_a_warning(tmp_path, command):
    base = save_base(tmp_path / "base", "gemma3")
    save_tokenizer(base, None)  # Gemma's own class, which wants an <unk> that this vocabulary lacks
    done = command("--base", base, *REQUEST[:2], "--output", tmp_path / "out", *REQUEST[4:])
    line = r"warning: the base's tokenizer does not work here \(.*unk.*\); its files are copied unchanged\.\n"
    assert done.status == 0 and re.search(line, done.err)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


def test_processors_stay_those_of_the_base(tmp_path, command):
    base, out, name = tmp_path / "base", tmp_path / "out", "preprocessor_config.json"
    composite_model("llava").save_pretrained(base)
    save_tokenizer(base, None)
    (base / name).write_text('{"size": {"shortest_edge": 28}}')
    done = command("--base", base, *REQUEST[:2], "--output", out, *REQUEST[4:])
    assert done.status == 0 and f"{name} names LlavaProcessor and LlavaImageProcessor, which" in done.err
    made, named = (out / name).read_bytes(), {"processor_class": "LlavaProcessor", "size": {"shortest_edge": 28}}
    assert json.loads(made).items() >= named.items()
    for auto in (AutoImageProcessor, AutoProcessor):
        before, after = auto.from_pretrained(base), auto.from_pretrained(out)
        assert type(after) is type(before) and type(before).__name__.startswith("Llava")
    assert name_processors("llava", out, Progress()) == {}  # what is named stays as it is
    assert (out / name).read_bytes() == made
    assert_strips(out, base, tmp_path)
    extract(base, tmp_path / "alone")  # of another type too
    assert_reads_alike(base, tmp_path / "alone")


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


def test_tokenizer_code_is_copied_and_never_run(tmp_path, command, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.exit("a person was asked"))
    base, out, ran = save_base(tmp_path / "base"), tmp_path / "out", tmp_path / "ran"
    (base / "tokenization_own.py").write_text(OWN_CODE.format(ran=str(ran)))
    (base / "own_letters.py").write_text("LETTERS = {chr(i): i for i in range(128)}\n")
    named = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (base / "tokenizer_config.json").write_text(json.dumps(named))
    done = command("--base", base, *REQUEST[:2], "--output", out, *REQUEST[4:])
    assert done.status == 0
    assert "own_letters.py, tokenization_own.py, code of the base's tokenizer or processor, are copied" in done.err
    assert "the base's tokenizer does not work here (it is custom code, which is never run)" in done.err
    assert_strips(out, base, tmp_path)
    unverified(base, out, overwrite=True)  # nothing in the folder is foreign
    shuffle(out, tmp_path / "edited", seed=1)
    assert (tmp_path / "edited" / "own_letters.py").is_file() and not ran.exists()
    for folder in (base, tmp_path / "edited"):
        assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("abc").input_ids == [97, 98, 99]
    assert ran.exists()


def test_git_lfs_pointers_are_refused(tmp_path, command, refused):
    base = save_base(tmp_path / "base", max_shard_size="30KB")
    for name in ("tokenizer.json", "generation_config.json", "model-00002-of-00010.safetensors"):
        (base / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 17477929\n")
        done = command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out")
        refused(done, f"{name} of {base} is a Git LFS pointer, not the file; expected what git-lfs", ["base"])
        (base / name).unlink()
