"""What an interrupted run has left goes on and ends in the bytes of a run that was not interrupted."""

import hashlib
import json

import numpy as np
import pytest
import torch
from filelock import FileLock

from midus_hf.topics import windows as module
from midus_hf.topics.corpus import Corpus, cut_windows, load_fast_tokenizer, read_corpus
from midus_hf.topics.text_files import DocumentError
from midus_hf.topics.windows import open_windows, store_windows

ARRAYS = ("embeddings.npy", "documents.npy", "labels.npy", "windows.json")


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch):
    monkeypatch.setattr(module, "_STRETCH", 16)


def digests(folder):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ARRAYS}


def store(folder, corpus, tokenizer, embedder, **given):
    return store_windows(folder, corpus, tokenizer, embedder, **{"window_tokens": 5, **given})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_store_holds_every_window_with_its_document_and_label(tmp_path, corpus, tokenizer, embedder, dtype):
    stored = store(tmp_path / "windows", corpus, tokenizer, embedder, dtype=dtype)
    windows = list(cut_windows(read_corpus(corpus), tokenizer, 5))
    assert len(windows) > 60 and isinstance(stored.embeddings, np.memmap) and stored.embeddings.dtype == dtype
    assert stored.documents.tolist() == [window.document.number for window in windows]
    assert [stored.label_names[label] for label in stored.labels] == [window.document.label for window in windows]
    expected = embedder.embed([window.text for window in windows])
    close = {"atol": 1e-5 if dtype == "float32" else 1e-3, "rtol": 0}
    torch.testing.assert_close(torch.from_numpy(np.array(stored.embeddings, np.float32)), expected, **close)
    assert stored.corpus == corpus


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("rest", [b"", b"half a row"])
def test_resuming_ends_in_the_same_bytes(tmp_path, corpus, tokenizer, embedder, calls, rest, interrupted, monkeypatch):
    store(tmp_path / "whole", corpus, tokenizer, embedder)
    with interrupted(calls, embedder, "embed") as passed:
        store(tmp_path / "resumed", corpus, tokenizer, embedder)
    with pytest.raises(ValueError, match="holds no windows, or not all of a corpus"):
        open_windows(tmp_path / "resumed")
    with (tmp_path / "resumed" / "embeddings.npy").open("ab") as file:
        file.write(rest)
    embed, done = embedder.embed, [len(texts) for texts, _ in passed]
    monkeypatch.setattr(embedder, "embed", lambda texts, progress: done.append(len(texts)) or embed(texts, progress))
    stored = store(tmp_path / "resumed", corpus, tokenizer, embedder)
    assert digests(tmp_path / "resumed") == digests(tmp_path / "whole")
    twice = 16 if calls else 0
    assert sum(done) == len(stored.documents) + twice, "the last stretch alone is embedded twice"
    store(tmp_path / "resumed", corpus, tokenizer, embedder)
    assert sum(done) == len(stored.documents) + twice, "nothing of what is complete is"


def test_another_request_is_refused(tmp_path, corpus, tokenizer, embedder):
    store(tmp_path / "windows", corpus, tokenizer, embedder)
    with pytest.raises(
        ValueError, match=r"holds windows that were made with another window_tokens, 5; expected 6\. Choo"
    ):
        store(tmp_path / "windows", corpus, tokenizer, embedder, window_tokens=6)
    with pytest.raises(ValueError, match=r"made with another dtype, 'float32'; expected 'float16'"):
        store(tmp_path / "windows", corpus, tokenizer, embedder, dtype="float16")
    with open(corpus.path, "a") as file:
        file.write(json.dumps({"text": "w1", "label": "a"}) + "\n")
    with pytest.raises(ValueError, match=r"made with another files, .* or delete this folder"):
        store(tmp_path / "windows", corpus, tokenizer, embedder)


def test_what_a_tokenizer_has_done_before_makes_no_other_request(tmp_path, corpus, bert, embedder):
    tokenizer = load_fast_tokenizer(bert)
    store(tmp_path / "windows", corpus, tokenizer, embedder)
    tokenizer(["w1 w2", "w3"], truncation=True, max_length=3, padding=True)
    store(tmp_path / "windows", corpus, tokenizer, embedder)
    tokenizer.add_tokens(["w1 w2"])
    with pytest.raises(ValueError, match=r"made with another tokenizer"):
        store(tmp_path / "windows", corpus, tokenizer, embedder)


def test_wrong_options_and_folders_are_refused(tmp_path, corpus, tokenizer, embedder):
    folder = tmp_path / "windows"
    with pytest.raises(ValueError, match=r"window_tokens is 0; expected at least 1\."):
        store(folder, corpus, tokenizer, embedder, window_tokens=0)
    with pytest.raises(ValueError, match=r"dtype is 'int8'; expected float16 or float32\."):
        store(folder, corpus, tokenizer, embedder, dtype="int8")
    with pytest.raises(DocumentError, match=r"which does not exist"):
        store(folder, Corpus("absent"), tokenizer, embedder)
    (tmp_path / "blank.txt").write_text(" ")
    with pytest.raises(ValueError, match=r"has no document with a visible character\. Add text"):
        store(folder, Corpus(str(tmp_path / "blank.txt")), tokenizer, embedder)
    with pytest.raises(ValueError, match=r"holds no windows, or not all of a corpus; .* Run midus cluster build\."):
        open_windows(folder)


def test_a_store_that_has_lost_something_is_refused(tmp_path, corpus, tokenizer, embedder):
    folder = tmp_path / "windows"
    store(folder, corpus, tokenizer, embedder)
    (folder / "embeddings.npy").write_bytes((folder / "embeddings.npy").read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"embeddings.npy' is absent or not whole: .* Delete its folder, and build"):
        store(folder, corpus, tokenizer, embedder)
    for text in ("{", "{}", '{"request": 3}'):
        (folder / "windows.json").write_text(text)
        with pytest.raises(ValueError, match=r"windows.json' was altered or is not whole\. Delete its folder"):
            store(folder, corpus, tokenizer, embedder)


def test_two_runs_do_not_write_one_store(tmp_path, corpus, tokenizer, embedder):
    (tmp_path / "windows").mkdir()
    with FileLock(tmp_path / "windows" / ".lock"):
        with pytest.raises(ValueError, match=r"is being written by another run; wait for that run, or choose another"):
            store(tmp_path / "windows", corpus, tokenizer, embedder)
