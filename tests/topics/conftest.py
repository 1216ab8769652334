"""A tiny embedding model, its tokenizer, and a corpus of two topics."""

import json

import pytest
from topics.tiny_bert import save_tiny_bert

from midus_hf.topics.building import TreeOptions
from midus_hf.topics.memory_retriever import TextEmbedder
from midus_hf.topics.run import build
from midus_hf.topics.windows import load_fast_tokenizer


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """Folder of a model, which has a tokenizer that cuts windows too."""
    return str(save_tiny_bert(tmp_path_factory.mktemp("bert") / "model"))


@pytest.fixture(scope="session")
def embedder(bert):
    return TextEmbedder(bert, batch_size=4)


@pytest.fixture(scope="session")
def tokenizer(bert):
    return load_fast_tokenizer(bert)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A file of forty documents of 1 to 12 words; every second has words of its own, the third is blank."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = []
    for number in range(40):
        first = 30 * (number % 2)
        words = [f"w{first + (7 * number + index) % 30}" for index in range(1 + 5 * number % 12)]
        rows.append({"text": " ".join(words) if number != 2 else " \n"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def tree_of_corpus(bert, corpus):
    """A function that builds a tree of the corpus, in windows of 5 tokens, into a folder."""

    def build_into(output, **changes):
        options = TreeOptions(branching=3, levels=2, steps=4, samples=50)
        models = {"embedding_model": bert, "tokenizer": bert, "output": output}
        return build(corpus, **models, **{"options": options, "window_tokens": 5, **changes})

    return build_into


@pytest.fixture(scope="session")
def built(tree_of_corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("built") / "tree"
    tree_of_corpus(output)
    return output
