"""The document nearest to a question, which retrieval-augmented generation puts before the question."""

from collections.abc import Callable, Sequence

import torch

from midus_hf.retrieval.embedding import TextEmbedder

_QUESTIONS_AT_A_TIME = 256


class NearestDocuments:
    """Finder of the one document whose embedding is nearest to a question's (hierarchical memories, appendix H).

    The paper compares only the documents of the question's cluster. This class compares all documents, so the document
    that it returns is at least as near.

    Args:
        documents: The documents to choose from.
        embedder: Embedder of documents and questions. It reads the first `embedder.max_tokens` tokens of each.
        progress: Called with the number of documents of each batch that is embedded. Default: None.

    Raises:
        ValueError: If there are no documents.
    """

    def __init__(
        self, documents: Sequence[str], embedder: TextEmbedder, progress: Callable[[int], None] | None = None
    ):
        if not documents:
            raise ValueError("there are no documents; expected one or more.")
        self.documents, self.embedder = list(documents), embedder
        self._rows = embedder.embed(self.documents, progress)  # [documents, c]
        self._known: dict[str, int] = {}

    def __call__(self, questions: Sequence[str]) -> list[str]:
        """Return the nearest document of each question, or the first among equally near ones."""
        new = [question for question in dict.fromkeys(questions) if question not in self._known]
        for first in range(0, len(new), _QUESTIONS_AT_A_TIME):
            batch = new[first : first + _QUESTIONS_AT_A_TIME]
            nearness: torch.Tensor = self.embedder.embed(batch) @ self._rows.T  # [questions, documents]
            self._known |= zip(batch, nearness.argmax(dim=1).tolist(), strict=True)
        return [self.documents[self._known[question]] for question in questions]
