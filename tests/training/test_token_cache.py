"""Tokens are made once, whole, and from what decides them, or not at all; sequences cut from them are those that packing makes."""

import errno
import gzip
import json
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from training.cached_tokens import entries, in_a_process, row, tokens_of
from training.outcomes import flip
from training.tiny_run import refused, tiny_tokenizer, write_corpus
from transformers import AutoTokenizer

from midus_hf.topics.text_files import DocumentError
from midus_hf.training.data import token_cache
from midus_hf.training.data.former_corpus import find_corpus
from midus_hf.training.data.former_packing import CorpusTokens, PackedDataset, pack, tokenise
from midus_hf.training.data.token_cache import cached_tokens
from midus_hf.training.options import CorpusOptions

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), max_size=12)


def held(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """A chunk of documents as it lies in Arrow."""
    array = pyarrow.array(documents, pyarrow.large_list(pyarrow.int32()))
    return array.values.to_numpy(), array.offsets.to_numpy()


@settings(deadline=None)
@given(st.lists(DOCUMENTS, max_size=4), st.integers(2, 12))
def test_sequences_cut_from_arrow_are_those_that_packing_makes(chunks, length):
    tokens = CorpusTokens([held(documents) for documents in chunks])
    hypothesis.assume(tokens.num_tokens >= length)
    expected = list(pack([tokens for documents in chunks for tokens in documents], length))
    assert tokens.num_tokens // length == len(expected)
    for index, sequence in enumerate(expected):
        cut = tokens.cut(index * length, (index + 1) * length)
        assert cut.tokens.dtype == sequence.tokens.dtype and cut.starts.dtype == sequence.starts.dtype
        assert torch.equal(cut.tokens, sequence.tokens) and torch.equal(cut.starts, sequence.starts)


def test_a_slice_of_an_arrow_array_has_its_own_documents():
    values, offsets = held([[1, 2], [3], [4, 5, 6], [7]])
    cut = CorpusTokens([(values, offsets[1:4])]).cut(1, 4)
    assert (cut.tokens.tolist(), cut.starts.tolist()) == ([4, 5, 6], [True, False, False])


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("mask", [False, True])
def test_the_dataset_is_the_one_that_packing_in_memory_makes(tmp_path, monkeypatch, cores, mask):
    monkeypatch.setattr(token_cache, "usable_cores", lambda: cores)
    folder = write_corpus(tmp_path / "texts", documents=150, length=37)
    (folder / "050.txt").write_text(" \n")
    for length in (16, 50):
        mapped = PackedDataset(tokens_of(folder, tmp_path / "cache"), length, mask)
        texts = find_corpus(CorpusOptions(path=str(folder))).documents()
        in_memory = PackedDataset(CorpusTokens.held(tokenise(texts, tiny_tokenizer())), length, mask)
        for name in ("num_documents", "num_tokens"):
            assert getattr(mapped.tokens, name) == getattr(in_memory.tokens, name)
        for one, other in zip(mapped, in_memory, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert len(list(entries(tmp_path / "cache")[0].glob("*.arrow"))) == cores


def test_rows_of_every_kind_of_file_are_tokenised(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("w5")
    (tmp_path / "texts" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "w6 w7"}\n{"text": "w8"}'))
    datasets.Dataset.from_dict({"text": ["w9", " ", "w10"]}).to_parquet(str(tmp_path / "texts" / "c.parquet"))
    assert row(tokens_of(tmp_path / "texts", tmp_path / "cache")) == [5, 2, 6, 7, 2, 8, 2, 9, 2, 10, 2]


def test_the_same_text_and_tokenizer_are_tokenised_once(tmp_path):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    first = row(tokens_of(folder, cache))
    (entry,) = entries(cache)
    made = {path.name: path.stat().st_mtime_ns for path in entry.iterdir()}
    os.utime(folder / "000.txt")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer(["w5"] * 2, truncation=True, max_length=3, padding=True)
    shutil.copytree(folder, tmp_path / "moved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for same in (lambda: tokens_of(folder, cache, tokenizer), lambda: tokens_of(tmp_path / "moved", cache, loaded)):
        assert row(same()) == first
    assert entries(cache) == [entry] and {path.name: path.stat().st_mtime_ns for path in entry.iterdir()} == made


def test_what_changes_tokens_makes_others(tmp_path):
    folder, cache = write_corpus(tmp_path / "texts", documents=2), tmp_path / "cache"
    (folder / "a.jsonl").write_bytes('{"text": "w5", "body": "w6 é"}'.encode())
    kept = tokens_of(folder, cache)
    before = row(kept)
    tokens_of(folder, cache, column="body")
    tokens_of(folder, cache, encoding="latin-1")
    tokens_of(folder, cache, tiny_tokenizer(eos_token="<bos>"))
    extended = tiny_tokenizer()
    extended.add_tokens(["w5 w6"])
    tokens_of(folder, cache, extended, vocab_size=200)
    (folder / "000.txt").write_text("w9")
    assert row(tokens_of(folder, cache))[:2] == [9, 2]
    (folder / "000.txt").rename(folder / "b.txt")
    assert row(tokens_of(folder, cache))[-2:] == [9, 2]
    assert len(entries(cache)) == 7
    assert row(kept) == before, "what is mapped stays as it was"


def write_and_wait(connection, folder, cache) -> None:
    write = token_cache._write_tokens

    def slow(*args, **kwargs):
        write(*args, **kwargs)
        if worker := os.fork():  # processes that tokenise outlive a parent that is killed, and must not hold its lock
            connection.send(worker)
        time.sleep(60)

    token_cache._write_tokens = slow
    tokens_of(folder, cache)


def test_a_run_that_is_killed_leaves_nothing_to_mistake_for_tokens(tmp_path):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    process, connection = in_a_process(write_and_wait, folder, cache)
    worker = connection.recv()
    process.kill()
    process.join()
    (abandoned,) = entries(cache)
    assert abandoned.suffix == ".partial" and list(abandoned.glob("*.arrow"))
    began = time.monotonic()
    assert tokens_of(folder, cache).num_documents == 20
    assert time.monotonic() - began < 30
    os.kill(worker, signal.SIGKILL)
    (entry,) = entries(cache)
    assert entry != abandoned and entry.suffix != ".partial", "what was abandoned is gone"


def ask(connection, folder, cache) -> None:
    make, made = token_cache._make, []

    def slow(*args):
        made.append(args)
        time.sleep(1)
        make(*args)

    token_cache._make = slow
    tokens = row(tokens_of(folder, cache))
    connection.send((len(made), tokens))


def test_processes_that_want_the_same_tokens_at_once_make_them_once(tmp_path):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    processes = [in_a_process(ask, folder, cache) for _ in range(3)]
    made, tokens = zip(*(connection.recv() for _, connection in processes), strict=True)
    for process, _ in processes:
        process.join()
    assert sorted(made) == [0, 0, 1]
    assert tokens[0] == tokens[1] == tokens[2] == row(tokens_of(folder, cache))


def test_documents_of_white_space_may_fill_what_one_process_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "usable_cores", lambda: 3)
    rows = datasets.Dataset.from_dict({"text": ["w5"] * 64 + [" "] * 64 + ["w6"] * 64})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    tokens = tokens_of("owner/name", tmp_path)
    assert row(tokens) == [5, 2] * 64 + [6, 2] * 64
    assert tokens.cut(127, 130).tokens.tolist() == [2, 6, 2]


def test_a_dataset_of_the_hub_is_told_from_others_by_its_fingerprint_and_column(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_dict({"text": ["w5", " ", "w6"], "body": ["w7", "w8", "w9"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    for _ in range(2):
        assert row(tokens_of("owner/name", tmp_path)) == [5, 2, 6, 2]
        assert row(tokens_of("owner/name", tmp_path, column="body")) == [7, 2, 8, 2, 9, 2]
    rows = datasets.Dataset.from_dict({"text": ["w5", " ", "w7"]})
    assert row(tokens_of("owner/name", tmp_path)) == [5, 2, 7, 2]
    assert len(entries(tmp_path)) == 3
    with refused(r"corpus 'owner/name' has no 'body', only text; set column to the one", DocumentError):
        tokens_of("owner/name", tmp_path, column="body")
    rows = datasets.Dataset.from_dict({"text": [1, 2]})
    with refused(r"corpus 'owner/name' has a int under 'text'; expected text", DocumentError):
        tokens_of("owner/name", tmp_path)


def test_the_cache_is_that_of_the_library_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    cached_tokens(find_corpus(CorpusOptions(path=str(write_corpus(tmp_path / "texts")))), tiny_tokenizer(), 128)
    assert [path.name for path in (tmp_path / "library").iterdir()] == ["midus_hf_tokens"]


def test_a_long_work_is_told_of_and_a_short_one_is_not(tmp_path, monkeypatch, capfd):
    folder = write_corpus(tmp_path / "texts")
    tokens_of(folder, tmp_path / "cache")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(token_cache, "_WORTH_TELLING", 0)
    tokens_of(folder, tmp_path / "other")
    assert capfd.readouterr().err == (
        f"tokenising {folder} (0.0 MB of text) once, into {tmp_path / 'other'}; later runs read the tokens from there\n"
    )
    assert not datasets.are_progress_bars_disabled()


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


def on_a_full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_meanwhile_is_told_and_cleared(tmp_path, monkeypatch, cores):
    folder, cache = write_corpus(tmp_path / "texts", documents=150), tmp_path / "cache"

    monkeypatch.setattr(token_cache, "_tokenise_batch", on_a_full_disk)
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
