"""Tokens are made once, whole, and from what decides them; sequences cut from them are those that packing makes."""

import errno
import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from training.tiny_run import tiny_config, tiny_tokenizer, write_corpus
from transformers import AutoTokenizer

from midus_hf.documents import DocumentError
from midus_hf.training import CorpusOptions, token_cache, train
from midus_hf.training.corpus import find_corpus
from midus_hf.training.mapped_tokens import MappedDataset, MappedTokens
from midus_hf.training.packing import CorpusPass, PackedDataset, pack
from midus_hf.training.run import prepare
from midus_hf.training.token_cache import cached_tokens

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

FORK = multiprocessing.get_context("fork")
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), max_size=12)


def tokens_of(path, cache: Path, tokenizer=None, vocab_size: int = 128, **options) -> MappedTokens:
    corpus = find_corpus(CorpusOptions(path=str(path), **options))
    return cached_tokens(corpus, tokenizer or tiny_tokenizer(), vocab_size, str(cache))


def row(tokens: MappedTokens) -> list[int]:
    return tokens.cut(0, tokens.num_tokens).tokens.tolist()


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


@settings(deadline=None)
@given(st.lists(DOCUMENTS, max_size=4), st.integers(2, 12))
def test_sequences_cut_from_arrow_are_those_that_packing_makes(chunks, length):
    arrays = [pyarrow.array(documents, pyarrow.large_list(pyarrow.int32())) for documents in chunks]
    tokens = MappedTokens(arrays)
    expected = list(pack([tokens for documents in chunks for tokens in documents], length))
    assert tokens.num_tokens // length == len(expected)
    for index, sequence in enumerate(expected):
        cut = tokens.cut(index * length, (index + 1) * length)
        assert cut.tokens.dtype == sequence.tokens.dtype and cut.starts.dtype == sequence.starts.dtype
        assert torch.equal(cut.tokens, sequence.tokens) and torch.equal(cut.starts, sequence.starts)


def test_a_slice_of_an_arrow_array_has_its_own_documents():
    array = pyarrow.array([[1, 2], [3], [4, 5, 6], [7]], pyarrow.large_list(pyarrow.int32())).slice(1, 2)
    cut = MappedTokens([array]).cut(1, 4)
    assert (cut.tokens.tolist(), cut.starts.tolist()) == ([4, 5, 6], [True, False, False])


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("mask", [False, True])
def test_the_dataset_is_the_one_that_packing_in_memory_makes(tmp_path, monkeypatch, cores, mask):
    monkeypatch.setattr(token_cache, "usable_cores", lambda: cores)
    folder = write_corpus(tmp_path / "texts", documents=150, length=37)
    (folder / "050.txt").write_text(" \n")
    for length in (16, 50):
        mapped = MappedDataset(tokens_of(folder, tmp_path / "cache"), length, mask)
        texts = find_corpus(CorpusOptions(path=str(folder))).documents()
        packed = PackedDataset(CorpusPass(texts, tiny_tokenizer(), length), mask)
        assert (mapped.num_documents, mapped.num_tokens) == (packed.num_documents, packed.num_tokens)
        for one, other in zip(mapped, packed, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert len(list(entries(tmp_path / "cache")[0].glob("*.arrow"))) == cores


def test_rows_of_every_kind_of_file_are_tokenised(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("w5")
    (tmp_path / "texts" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "w6 w7"}\n{"text": "w8"}'))
    datasets.Dataset.from_dict({"text": ["w9", " ", "w10"]}).to_parquet(str(tmp_path / "texts" / "c.parquet"))
    assert row(tokens_of(tmp_path / "texts", tmp_path / "cache")) == [5, 2, 6, 7, 2, 8, 2, 9, 2, 10, 2]


@pytest.fixture
def made(monkeypatch) -> list[Path]:
    """The entries that are made from here on."""
    entries: list[Path] = []
    make = token_cache._make

    def watched(entry, *args):
        entries.append(entry)
        make(entry, *args)

    monkeypatch.setattr(token_cache, "_make", watched)
    return entries


def test_the_same_text_and_tokenizer_are_tokenised_once(tmp_path, made):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    first = row(tokens_of(folder, cache))
    os.utime(folder / "000.txt")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer(["w5"] * 2, truncation=True, max_length=3, padding=True)
    shutil.copytree(folder, tmp_path / "moved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for same in (lambda: tokens_of(folder, cache, tokenizer), lambda: tokens_of(tmp_path / "moved", cache, loaded)):
        assert row(same()) == first
    assert len(made) == 1 and [path.name for path in entries(cache)] == [made[0].name]


def test_what_changes_tokens_makes_others(tmp_path, made):
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
    assert len(set(made)) == len(made) == 7
    assert row(kept) == before, "what is mapped stays as it was"


def in_a_process(work, *args) -> tuple:
    """Start a function in another process, with what it sends back: `work(connection, ...)`."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=work, args=(theirs, *args))
    process.start()
    theirs.close()
    return process, ours


def write_and_wait(connection, folder, cache) -> None:
    write = token_cache._write_tokens

    def slow(*args, **kwargs):
        write(*args, **kwargs)
        if worker := os.fork():  # processes that tokenise outlive a parent that is killed, and must not hold its lock
            connection.send(worker)
        time.sleep(60)

    token_cache._write_tokens = slow
    tokens_of(folder, cache)


def test_a_run_that_is_killed_leaves_nothing_to_mistake_for_tokens(tmp_path, made):
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
    assert entries(cache) == made, "what was abandoned is gone"


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


def test_without_room_nothing_is_begun(tmp_path, monkeypatch):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        DocumentError,
        match=r"tokens of corpus '.*texts' need about 0\.0 MB in '.*cache', where 0\.0 MB are free\. Make room, or set corpus",
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


@pytest.mark.parametrize("cores", [1, 2])
def test_a_disk_that_fills_meanwhile_is_told_and_cleared(tmp_path, monkeypatch, cores):
    folder, cache = write_corpus(tmp_path / "texts", documents=150), tmp_path / "cache"

    class FullDisk(token_cache._Tokenise):
        def __call__(self, texts):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(token_cache, "usable_cores", lambda: cores)
    monkeypatch.setattr(token_cache, "_Tokenise", FullDisk)
    with pytest.raises(
        DocumentError,
        match=r"cannot be written to '.*cache': .*No space left on device\. Set corpus\.cache_dir to a fold",
    ):
        tokens_of(folder, cache)
    assert entries(cache) == []


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(
        DocumentError, match=r"cannot be written to '.*cache': .*File exists.*Set corpus\.cache_dir to"
    ):
        tokens_of(write_corpus(tmp_path / "texts"), tmp_path / "cache")


@pytest.mark.parametrize("cores", [1, 2])
def test_text_that_cannot_be_read_is_named_and_leaves_no_entry(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(token_cache, "usable_cores", lambda: cores)
    monkeypatch.setattr(token_cache, "_SAMPLE", 10)
    folder = write_corpus(tmp_path / "texts", documents=150)
    (folder / "140.txt").write_bytes(b"\xff")
    with pytest.raises(DocumentError, match=r"140\.txt' is not text in utf-8"):
        tokens_of(folder, tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


@pytest.mark.parametrize("cores", [1, 2])
def test_an_id_that_the_model_does_not_embed_is_refused_before_and_after_tokens_are_kept(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(token_cache, "usable_cores", lambda: cores)
    monkeypatch.setattr(token_cache, "_SAMPLE", 10)
    folder, cache = write_corpus(tmp_path / "texts", documents=150), tmp_path / "cache"
    for _ in range(2):
        with pytest.raises(ValueError, match=r"yields id \d+, but the model embeds 100 ids; use the tokenizer that"):
            tokens_of(folder, cache, vocab_size=100)
        assert tokens_of(folder, cache).num_documents == 150


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the tokenizer has no EOS token"):
        tokens_of(write_corpus(tmp_path / "texts"), tmp_path / "cache", tiny_tokenizer(eos_token=None))


@pytest.mark.parametrize("cores", [1, 2])
def test_a_corpus_of_white_space_is_empty(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(token_cache, "usable_cores", lambda: cores)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(DocumentError, match=r"the corpus is empty: it has no document with a visible character"):
        tokens_of(tmp_path / "a.txt", tmp_path / "cache")


def test_documents_of_white_space_may_fill_what_one_process_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "usable_cores", lambda: 3)
    rows = datasets.Dataset.from_dict({"text": ["w5"] * 64 + [" "] * 64 + ["w6"] * 64})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    tokens = tokens_of("owner/name", tmp_path)
    assert row(tokens) == [5, 2] * 64 + [6, 2] * 64
    assert tokens.cut(127, 130).tokens.tolist() == [2, 6, 2]


def test_a_dataset_of_the_hub_is_told_from_others_by_its_fingerprint_and_column(tmp_path, monkeypatch, made):
    rows = datasets.Dataset.from_dict({"text": ["w5", " ", "w6"], "body": ["w7", "w8", "w9"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    for _ in range(2):
        assert row(tokens_of("owner/name", tmp_path)) == [5, 2, 6, 2]
        assert row(tokens_of("owner/name", tmp_path, column="body")) == [7, 2, 8, 2, 9, 2]
    rows = datasets.Dataset.from_dict({"text": ["w5", " ", "w7"]})
    assert row(tokens_of("owner/name", tmp_path)) == [5, 2, 7, 2]
    assert len(made) == 3
    with pytest.raises(DocumentError, match=r"corpus 'owner/name' has no 'body', only text; set column to the one"):
        tokens_of("owner/name", tmp_path, column="body")
    rows = datasets.Dataset.from_dict({"text": [1, 2]})
    with pytest.raises(DocumentError, match=r"corpus 'owner/name' has a int under 'text'; expected text"):
        tokens_of("owner/name", tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda entry: (entry / "00000.arrow").unlink(), "No such file"),
        (lambda entry: os.truncate(entry / "00000.arrow", 900), ""),
        (lambda entry: (entry / "entry.json").write_text("{"), ""),
        (
            lambda entry: (entry / "entry.json").write_text(
                json.dumps({**json.loads((entry / "entry.json").read_text()), "tokens": 9})
            ),
            "it has 1220 tokens instead of 9",
        ),
    ],
)
def test_a_damaged_entry_says_how_to_mend_it(tmp_path, damage, reason):
    folder, cache = write_corpus(tmp_path / "texts"), tmp_path / "cache"
    tokens_of(folder, cache)
    (entry,) = entries(cache)
    damage(entry)
    with pytest.raises(
        DocumentError, match=rf"'{entry}' are damaged: .*{reason}.*\. Remove this folder; it is made ag"
    ):
        tokens_of(folder, cache)
    shutil.rmtree(entry)
    assert tokens_of(folder, cache).num_tokens == 1220


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


def test_a_corpus_is_trained_on_without_being_held_in_memory(upscaled, corpus, tmp_path):
    """Thirty million tokens, 120 MB: a step may touch pages of the map, but nothing of it becomes memory of the run."""
    making, connection = in_a_process(make_a_long_corpus, tmp_path / "cache")
    assert connection.recv() > 30_000_000
    making.join()
    training, connection = in_a_process(train_on_a_long_corpus, upscaled("llama"), corpus, tmp_path)
    tokens, steps, grown = connection.recv()
    training.join()
    assert tokens > 30_000_000 and steps == 3
    assert grown < 30e6


def train_on_a_long_corpus(connection, model, corpus, folder) -> None:
    options = {"sequence_length": 128, "max_steps": 3, "corpus_options": {"cache_dir": str(folder / "cache")}}
    train(tiny_config(model, corpus, folder / "short", **options))
    before = anonymous_memory()
    datasets.load_dataset = lambda *args, **kwargs: a_row()
    run = prepare(tiny_config(model, Path("owner/name"), folder / "long", **options))
    dataset = run.trainer.train_dataset
    for index in range(0, len(dataset), 5):
        dataset[index]
    result = run.execute()
    connection.send((dataset.num_tokens, result.steps, anonymous_memory() - before))


def anonymous_memory() -> int:
    """Bytes of this process that no file backs, so that mapped pages, which the system may drop, do not count."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def a_row():
    return datasets.Dataset.from_dict({"text": ["w5"]})


def make_a_long_corpus(connection, cache: Path) -> None:
    """Keep thirty million tokens as those of a dataset of the Hub."""
    datasets.load_dataset = lambda *args, **kwargs: a_row()
    tile = token_cache._Tokenise.__call__

    def many(self, texts):
        table = tile(self, texts)
        values = np.tile(table.column("tokens").chunk(0).values.to_numpy(), 15_500_000)
        offsets = np.arange(0, len(values) + 1, 200, dtype=np.int64)
        return pyarrow.table({"tokens": pyarrow.LargeListArray.from_arrays(offsets, values[: offsets[-1]])})

    token_cache._Tokenise.__call__ = many
    connection.send(tokens_of("owner/name", cache).num_tokens)


def test_resuming_makes_no_tokens_and_reads_no_sequence_that_was_trained_on(upscaled, corpus, tmp_path, monkeypatch):
    options = {"save_every": 8, "max_steps": 20, "corpus_options": {"cache_dir": str(tmp_path / "cache")}}
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", **options))
    options["resume"] = str(tmp_path / "out" / "checkpoint-16")
    for name in ("_make", "tokenise"):
        monkeypatch.setattr(token_cache, name, lambda *args: pytest.fail("tokens are made again"))
    run = prepare(tiny_config(upscaled("llama"), corpus, tmp_path / "out", **options))
    read: list[int] = []
    get = MappedDataset.__getitem__
    monkeypatch.setattr(MappedDataset, "__getitem__", lambda self, index: read.append(index) or get(self, index))
    assert run.execute().steps == 20
    assert len(read) == len(set(read)) == (20 - 16 + 1) * 2, "those of four steps, and of one that is read ahead"


def test_where_datasets_is_not_installed_local_text_trains_from_memory(
    upscaled, corpus, tmp_path, monkeypatch, capsys
):
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "mapped", max_steps=3))
    assert "is not installed" not in capsys.readouterr().out
    monkeypatch.setattr("midus_hf.training.training_data.importlib.util.find_spec", lambda name: None)
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "held", max_steps=3))
    assert (
        "datasets is not installed: tokens are in memory, and made again at the next start" in capsys.readouterr().out
    )
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("mapped", "held")]
    assert weights[0] == weights[1]
