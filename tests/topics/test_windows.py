"""Windows are the text of their documents, and are embedded once: an interrupted run goes on and ends in the same bytes."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from topics.tiny_bert import save_tiny_bert
from transformers import PreTrainedTokenizerFast

from midus_hf.data.corpus import read_corpus
from midus_hf.topics import windows as module
from midus_hf.topics.memory_retriever import TextEmbedder
from midus_hf.topics.windows import cut_windows, load_fast_tokenizer, open_windows, store_windows, windows_of_corpus

ARRAYS = ("embeddings.npy", "documents.npy", "windows.json")


@pytest.fixture(autouse=True, scope="module")
def short_stretches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_STRETCH", 16)
        yield


@pytest.fixture(scope="module")
def whole(corpus, tokenizer, embedder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "windows"
    store(folder, corpus, tokenizer, embedder)
    return folder


def digests(folder):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ARRAYS}


def store(folder, corpus, tokenizer, embedder, **arguments):
    rows = read_corpus(corpus)
    return store_windows(folder, rows, corpus, "text", tokenizer, embedder, **{"window_tokens": 5, **arguments})


def test_store_holds_every_window_with_its_document(tmp_path, corpus, tokenizer, embedder):
    stored = store(tmp_path / "windows", corpus, tokenizer, embedder)
    windows = list(cut_windows(read_corpus(corpus)["text"], tokenizer, 5))
    assert len(windows) > 60
    assert isinstance(stored.embeddings, np.memmap)
    assert stored.embeddings.dtype == np.float32
    assert stored.documents.tolist() == [window.document for window in windows]
    expected = embedder.embed([window.text for window in windows])
    torch.testing.assert_close(torch.from_numpy(np.array(stored.embeddings)), expected, atol=1e-5, rtol=0)
    assert (stored.corpus, stored.column) == (corpus, "text")


@pytest.mark.parametrize(("calls", "is_torn"), [(0, False), (1, True), (3, False)])
def test_resuming_ends_in_the_same_bytes(whole, tmp_path, corpus, tokenizer, embedder, calls, is_torn, monkeypatch):
    embed, done, limit = embedder.embed, [], calls

    def counted(texts, progress):
        if len(done) == limit:
            raise KeyboardInterrupt
        done.append(len(texts))
        return embed(texts, progress)

    monkeypatch.setattr(embedder, "embed", counted)
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path / "resumed", corpus, tokenizer, embedder)
    with pytest.raises(ValueError, match=r"holds no windows, or not all of a corpus; .* Run midus cluster build"):
        open_windows(tmp_path / "resumed")
    if is_torn:  # the next stretch had reached the disk in part
        with (tmp_path / "resumed" / "embeddings.npy").open("r+b") as file:
            file.seek(-50, 2)
            file.write(b"half a row")
    limit = None
    stored = store(tmp_path / "resumed", corpus, tokenizer, embedder)
    assert digests(tmp_path / "resumed") == digests(whole)
    store(tmp_path / "resumed", corpus, tokenizer, embedder)
    assert sum(done) == len(stored.documents), "nothing is embedded twice"


def test_another_request_is_refused(whole, tmp_path, corpus, bert, tokenizer, embedder):
    longer, other_model = tmp_path / "corpus.jsonl", TextEmbedder(str(save_tiny_bert(tmp_path / "other", seed=1)))
    longer.write_text(Path(corpus).read_text() + json.dumps({"text": "w1"}) + "\n")
    other_tokenizer = load_fast_tokenizer(bert)
    other_tokenizer(["w1 w2", "w3"], truncation=True, max_length=3, padding=True)
    store(whole, corpus, other_tokenizer, embedder)  # what a tokenizer has done before makes no other request
    other_tokenizer.add_tokens(["w1 w2"])
    usual = (corpus, tokenizer, embedder)
    for request, changes, message in (
        (usual, {"window_tokens": 0}, "window_tokens is 0; expected at least 1"),
        (usual, {"window_tokens": 6}, "another window_tokens, 5; expected 6"),
        ((corpus, tokenizer, other_model), {}, "another embedding_model, .* or delete this folder"),
        ((str(longer), tokenizer, embedder), {}, "another texts, .* or delete this folder"),
        ((corpus, other_tokenizer, embedder), {}, "another tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            store(whole, *request, **changes)


def test_windows_follow_their_texts(whole, tmp_path, corpus):
    rows = read_corpus(corpus)
    moved = rows.map(lambda row: {"body": row["text"]}, remove_columns="text")
    assert windows_of_corpus(whole, moved, "body").corpus == corpus
    joined = rows.map(lambda row, index: {"text": row["text"] + "w1" * (index == 0)}, with_indices=True)
    assert windows_of_corpus(whole, joined, "text") is None
    assert windows_of_corpus(tmp_path / "absent", rows, "text") is None


def texts_of(windows):
    results = {}
    for window in windows:
        results.setdefault(window.document, []).append(window.text)
        assert window.number == len(results[window.document]) - 1
    return results


def test_windows_have_so_many_tokens_in_order(tokenizer):
    documents = ["w1 w2  w3\nw4 w5 ", "w6", "w1 w2"]
    windows = texts_of(cut_windows(documents, tokenizer, 2))
    assert windows == {0: ["w1 w2  ", "w3\nw4 ", "w5 "], 1: ["w6"], 2: ["w1 w2"]}
    assert all(len(tokenizer.tokenize(text)) <= 2 for of_document in windows.values() for text in of_document)
    many = (f"w{number % 60} w1 w2" for number in range(150))  # more than are tokenised at a time
    windows = [(window.document, window.number) for window in cut_windows(many, tokenizer, 2)]
    assert windows == [(n, w) for n in range(150) for w in (0, 1)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_character_is_lost(size):
    alphabet = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    text = "naïve 東京 👩‍🚀 ok"
    windows = cut_windows([text], PreTrainedTokenizerFast(tokenizer_object=tokenizer), size)
    assert "".join("".join(window.text.split()) for window in windows) == "".join(text.split())


def test_unsuitable_tokenizer_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="tokenizer is 'absent/one', which cannot be loaded: "):
        load_fast_tokenizer("absent/one")
    monkeypatch.setattr("midus_hf.topics.windows.load_tokenizer", lambda name: SimpleNamespace(is_fast=False))
    with pytest.raises(ValueError, match="tokenizer is 'slow', which does not know the positions of its tokens"):
        load_fast_tokenizer("slow")
