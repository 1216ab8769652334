"""Text, disks and entries of which no tokens can be made are told, and nothing is left of them."""

import errno
import gzip
import json
import os
import random
import shutil

import pytest
from training.cached_tokens import entries, row, tokens_of
from training.outcomes import flip
from training.tiny_run import refused, tiny_tokenizer, write_corpus

from midus_hf.documents import DocumentError
from midus_hf.training.data import token_cache
from midus_hf.training.data.corpus import find_corpus
from midus_hf.training.data.token_cache import cached_tokens
from midus_hf.training.options import CorpusOptions

datasets = pytest.importorskip("datasets")


@pytest.fixture(params=[1, 2])
def cores(request, monkeypatch) -> int:
    """Let so many processes tokenise."""
    monkeypatch.setattr(token_cache, "usable_cores", lambda: request.param)
    return request.param


def test_without_room_nothing_is_begun(tmp_path, monkeypatch):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with refused(
        r"tokens of corpus '.*texts' need about 0\.0 MB in '.*cache', where 0\.0 MB are free\. Make room, or set corpus",
        DocumentError,
    ):
        tokens_of(folder, cache)
    assert entries(cache) == []


def test_room_is_needed_for_tokens_and_for_the_text_of_compressed_files(tmp_path, monkeypatch):
    words = [f"w{index}" for index in range(3, 128)]
    texts = [" ".join(random.Random(seed).choices(words, k=500)) for seed in range(200)]
    rows = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    (tmp_path / "a.jsonl").write_bytes(rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows))
    for name in ("a.jsonl", "b.jsonl.gz"):
        corpus = find_corpus(CorpusOptions(path=str(tmp_path / name)))
        _, needed = token_cache._estimate(corpus, tiny_tokenizer(), 128)
        tokens = cached_tokens(corpus, tiny_tokenizer(), 128, str(tmp_path / "cache"))
        used = 4 * tokens.num_tokens + len(rows)
        assert used < needed < 3 * used


def test_a_disk_that_fills_meanwhile_is_told_and_cleared(tmp_path, monkeypatch, cores):
    folder, cache = write_corpus(tmp_path / "texts", documents=150), tmp_path / "cache"

    class FullDisk(token_cache._Tokenise):
        def __call__(self, texts):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(token_cache, "_Tokenise", FullDisk)
    with refused(
        r"cannot be written to '.*cache': .*No space left on device\. Set corpus\.cache_dir to a fold", DocumentError
    ):
        tokens_of(folder, cache)
    assert entries(cache) == []


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "cache").touch()
    with refused(r"cannot be written to '.*cache': .*File exists.*Set corpus\.cache_dir to", DocumentError):
        tokens_of(write_corpus(tmp_path / "texts"), tmp_path / "cache")


def test_text_that_cannot_be_read_is_named_and_leaves_no_entry(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(token_cache, "_SAMPLE", 10)
    folder = write_corpus(tmp_path / "texts", documents=150)
    (folder / "140.txt").write_bytes(b"\xff")
    with refused(r"140\.txt' is not text in utf-8", DocumentError):
        tokens_of(folder, tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_an_id_that_the_model_does_not_embed_is_refused_before_and_after_tokens_are_kept(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(token_cache, "_SAMPLE", 10)
    folder, cache = write_corpus(tmp_path / "texts", documents=150), tmp_path / "cache"
    for _ in range(2):
        with refused(r"yields id \d+, but the model embeds 100 ids; use the tokenizer that"):
            tokens_of(folder, cache, vocab_size=100)
        assert tokens_of(folder, cache).num_documents == 150


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    with refused(r"the tokenizer has no EOS token"):
        tokens_of(write_corpus(tmp_path / "texts"), tmp_path / "cache", tiny_tokenizer(eos_token=None))


def test_a_corpus_of_white_space_is_empty(tmp_path, cores):
    (tmp_path / "a.txt").write_text(" \n")
    with refused(r"the corpus is empty: it has no document with a visible character", DocumentError):
        tokens_of(tmp_path / "a.txt", tmp_path / "cache")


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


ALTERED = "does not have the contents that were written"
DAMAGES = {
    "tokens-missing": (lambda arrow, record: arrow.unlink(), "00000.arrow is missing"),
    "tokens-cut": (lambda arrow, record: os.truncate(arrow, 900), r"00000.arrow has 900 bytes instead of [\d,]+"),
    "tokens-of-zeros": (
        lambda arrow, record: arrow.write_bytes(bytes(arrow.stat().st_size)),
        f"00000.arrow {ALTERED}",
    ),
    "a-bit-of-a-token": (lambda arrow, record: flip(arrow, arrow.stat().st_size // 2), f"00000.arrow {ALTERED}"),
    "a-bit-of-the-schema": (lambda arrow, record: flip(arrow, 40), f"00000.arrow {ALTERED}"),
    "record-missing": (lambda arrow, record: record.unlink(), "No such file"),
    "record-cut": (lambda arrow, record: os.truncate(record, 30), ""),
    "record-nested": (lambda arrow, record: record.write_text("[" * 100_000), "it is nested too deeply"),
    "number-in-the-record": (lambda arrow, record: edit(record, tokens=9), f"entry.json {ALTERED}"),
    "id-in-the-record": (lambda arrow, record: edit(record, largest_id=9), f"entry.json {ALTERED}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_never_trained_on_and_says_how_to_mend_it(tmp_path, damage, monkeypatch):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    tokens_of(folder, cache)
    (entry,) = entries(cache)
    work, reason = DAMAGES[damage]
    work(entry / "00000.arrow", entry / "entry.json")
    monkeypatch.setattr(token_cache, "_SEEN_WHOLE", set())  # as in another process
    with refused(rf"'{entry}' are damaged: .*{reason}.*\. Remove this folder; it is made ag", DocumentError):
        tokens_of(folder, cache)
    shutil.rmtree(entry)
    assert tokens_of(folder, cache).num_tokens == 1220


def test_an_entry_is_read_for_its_digests_once_in_a_process(tmp_path, monkeypatch):
    folder, cache, checks = write_corpus(tmp_path / "texts"), tmp_path / "cache", []
    honest = token_cache.first_damage
    monkeypatch.setattr(token_cache, "first_damage", lambda *args: checks.append(args) or honest(*args))
    tokens_of(folder, cache)
    tokens_of(folder, cache)
    assert not checks, "it was made by this very process"
    monkeypatch.setattr(token_cache, "_SEEN_WHOLE", set())
    for _ in range(2):
        tokens_of(folder, cache)
    assert len(checks) == 1


@pytest.mark.parametrize("change", ["before", "behind"])
def test_text_that_changes_while_it_is_tokenised_is_not_kept_under_the_name_of_the_old(tmp_path, monkeypatch, change):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    write, changed = token_cache._write_tokens, []

    def meanwhile(*args, **kwargs):
        before = (folder / "000.txt").read_text()
        if change == "before":
            (folder / "000.txt").write_text("w9")
        made = write(*args, **kwargs)
        if change == "behind":
            (folder / "000.txt").write_text("w9")
        changed.append(before)
        return made

    monkeypatch.setattr(token_cache, "_write_tokens", meanwhile)
    with pytest.raises(DocumentError) as raised:
        tokens_of(folder, cache)
    assert str(raised.value) == (
        f"corpus {str(folder)!r} changed while it was tokenised; expected the same text from beginning to end. Start again once "
        "nothing writes to it; the tokens that were made are not kept."
    )
    assert entries(cache) == []
    monkeypatch.undo()
    assert row(tokens_of(folder, cache))[:2] == [9, 2]
    (folder / "000.txt").write_text(changed[0])
    assert row(tokens_of(folder, cache))[:2] != [9, 2]
