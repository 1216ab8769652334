"""The document that is nearest to a question: what retrieval-augmented generation puts in front of it."""

from collections.abc import Callable, Sequence

import torch

from midus_hf.retrieval.embedding import TextEmbedder

_QUESTIONS_AT_A_TIME = 256


class NearestDocuments:
    """Finds the one document whose embedding is nearest to that of a question (hierarchical memories, appendix H).

    The paper looks among the documents of the question's cluster; here all are compared, which finds one that is at least as near.

    Args:
        documents: Those that there are.
        embedder: Of documents and questions; it reads the first `embedder.max_tokens` tokens of each.
        progress: Told of the number of documents of each batch that is embedded. Default: None.

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
        """The document of each question; of several that are as near, the first."""
        new = [question for question in dict.fromkeys(questions) if question not in self._known]
        for first in range(0, len(new), _QUESTIONS_AT_A_TIME):
            some = new[first : first + _QUESTIONS_AT_A_TIME]
            nearness: torch.Tensor = self.embedder.embed(some) @ self._rows.T  # [questions, documents]
            self._known |= zip(some, nearness.argmax(dim=1).tolist(), strict=True)
        return [self.documents[self._known[question]] for question in questions]
