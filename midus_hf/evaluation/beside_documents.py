"""Documents in front of questions: retrieval-augmented generation, with which memories are compared."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from midus_hf.documents import read_documents
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.retrieval.embedding import TextEmbedder
from midus_hf.retrieval.nearest_documents import NearestDocuments, cut_into_passages

# A function that takes questions and returns the document of each question.
DocumentFinder = Callable[[Sequence[str]], list[str]]


def nearest_documents(settings: EvaluationSettings, embedder: TextEmbedder) -> NearestDocuments:
    """Read and embed the documents from which the nearest is put in front of each question.

    Args:
        settings: Settings that name the documents and say how to cut them.
        embedder: Embedding model of documents and questions.

    Raises:
        ValueError: If documents cannot be read, or if there are none.
    """
    assert settings.documents is not None, "there are documents"
    documents = read_documents(settings.documents, settings.column, settings.encoding)
    if settings.passage_tokens is not None:
        documents = cut_into_passages(documents, embedder.tokenizer, settings.passage_tokens)
    with tqdm(desc="documents embedded", unit=" documents", total=len(documents), disable=None) as bar:
        return NearestDocuments(documents, embedder, bar.update)


def behind_documents(requests: Sequence[Any], questions: Sequence[str], find_documents: DocumentFinder) -> list[Any]:
    """Return requests of the harness with the document of each question and an empty line in front of their contexts.

    Args:
        requests: Requests whose first argument is a context. An empty context stays empty, since the request asks how likely an
            answer is without its question.
        questions: Question of each request, by which the document is found.
        find_documents: Function that finds the documents.
    """
    changed = []
    for request, document in zip(requests, find_documents(questions), strict=True):
        context, *others = request.args
        request = copy.copy(request)
        if context:
            request.arguments = (f"{document}\n\n{context}", *others)
        changed.append(request)
    return changed
