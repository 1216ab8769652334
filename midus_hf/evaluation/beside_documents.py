"""Questions that are asked behind a document: retrieval-augmented generation, which memories are compared with."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from midus_hf.documents import read_documents
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.retrieval.embedding import TextEmbedder
from midus_hf.retrieval.nearest_documents import NearestDocuments
from midus_hf.retrieval.passages import cut_into_passages

DocumentFinder = Callable[[Sequence[str]], list[str]]
"""The document of each question."""


def nearest_documents(settings: EvaluationSettings, embedder: TextEmbedder) -> NearestDocuments:
    """Read and embed the documents that questions are asked behind.

    Args:
        settings: Which they are, and how they are cut.
        embedder: Of documents and questions.

    Raises:
        ValueError: If documents cannot be read, or there are none.
    """
    assert settings.documents is not None, "there are documents"
    documents = read_documents(settings.documents, settings.column, settings.encoding)
    if settings.passage_tokens is not None:
        documents = cut_into_passages(documents, embedder.tokenizer, settings.passage_tokens)
    with tqdm(desc="documents embedded", unit=" documents", total=len(documents), disable=None) as bar:
        return NearestDocuments(documents, embedder, bar.update)


def behind_documents(requests: Sequence[Any], questions: Sequence[str], find_documents: DocumentFinder) -> list[Any]:
    """Requests of the harness, each with the document of its question and an empty line in front of its context.

    Args:
        requests: Whose first argument is a context. An empty one stays empty: it asks how likely an answer is without the question.
        questions: Of each request, by which its document is found.
        find_documents: Finds them.
    """
    changed = []
    for request, document in zip(requests, find_documents(questions), strict=True):
        context, *others = request.args
        request = copy.copy(request)
        if context:
            request.arguments = (f"{document}\n\n{context}", *others)
        changed.append(request)
    return changed
