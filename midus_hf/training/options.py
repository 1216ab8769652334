"""Options of a run of continual pretraining."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

from midus_hf.training.optim.rates import Rates
from midus_hf.training.run_options import RunOptions


@dataclasses.dataclass(kw_only=True)
class CorpusOptions:
    """Source of the text, and how to read it.

    Args:
        path: A text file, a folder of them, or the id of a dataset on the Hub. `.jsonl` and `.parquet` have a document
            per row, other files are one document. A folder is read with its subfolders, in sorted order, and only its
            `.txt`, `.md`, `.jsonl` and `.parquet` files. All but Parquet may be compressed (`.gz` or `.zst` after the
            ending).
        config: Configuration of a dataset on the Hub. Default: the dataset's own.
        split: Split of a dataset on the Hub. Default: `"train"`.
        column: Column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Encoding of plain text and JSON lines. Default: `"utf-8"`.
        streaming: Read the text while training instead of before; needs `max_steps`. Default: false.
        shuffle_buffer: Number of documents of a streamed dataset that are read ahead, to be drawn in random order; 0
            keeps the order of the dataset. Default: 0.
        path_column: Column, or JSON key, with each document's path in a tree of topics, from `midus cluster assign`.
            Documents are then packed within leaves, and fetch blocks by this path. Default: none.
        cache_dir: Folder that keeps tokens between runs. Default: `midus_hf_tokens` in the cache of `datasets`, which
            HF_HOME and HF_DATASETS_CACHE move.

    Raises:
        ValueError: If an option contradicts another.
    """

    path: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    encoding: str = "utf-8"
    streaming: bool = False
    shuffle_buffer: int = 0
    path_column: str | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("corpus.path is empty; expected a file, a folder or a dataset id.")
        if self.shuffle_buffer < 0:
            raise ValueError(f"corpus.shuffle_buffer is {self.shuffle_buffer}; expected 0 or more documents.")
        if self.shuffle_buffer and not self.streaming:
            raise ValueError(
                "corpus.shuffle_buffer needs corpus.streaming: true; text read beforehand is always shuffled."
            )
        if self.path_column is not None and self.streaming:
            raise ValueError(
                "corpus.path_column and corpus.streaming are given; expected one of them: documents of a leaf are packed together."
            )


@dataclasses.dataclass(kw_only=True)
class WeightedCorpus(CorpusOptions):
    """One corpus of several, with the keys of `CorpusOptions` and a weight.

    Args:
        weight: The corpus gives `weight / (sum of all weights)` of the run's sequences, and so of its tokens, whatever
            its length. A short corpus is repeated.

    Raises:
        ValueError: If an option contradicts another, or the weight is not above 0.
    """

    weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight <= 0:
            raise ValueError(f"corpus.weight is {self.weight:g}; expected a number above 0.")
        if self.streaming:
            raise ValueError(
                "corpus.streaming is true in a list of corpora; set it to false: shares are drawn from text read beforehand."
            )


@dataclasses.dataclass(kw_only=True)
class TrainConfig(Rates, RunOptions):
    """One run of continual pretraining, with the keys of `RunOptions` and of `Rates`.

    Args:
        corpus: The keys of `CorpusOptions`; a YAML file may give just a path or dataset id instead. Or a list of corpora,
            each with these keys and a `weight` (`WeightedCorpus`).
        sequence_length: T, tokens per sequence. Default: 2048.
        tree: Folder of the tree of topics that gave the paths; it is saved beside the model, and paths of another tree
            are refused. Default: the tree that the corpus names, which is not saved.
        generic_share: In a corpus with `path_column`, share of the sequences that read the generic memory instead of
            their path's blocks, drawn anew each epoch (hierarchical memories, section 4). Default: 1 / 17.
        document_mask: Attend only within documents. Default: false, a sequence is one context, as in the paper.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    corpus: CorpusOptions | list[WeightedCorpus]
    sequence_length: int = 2048
    document_mask: bool = False
    tree: str | None = None
    generic_share: float = 1 / 17

    def __post_init__(self) -> None:
        Rates.__post_init__(self)
        RunOptions.__post_init__(self)
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length is {self.sequence_length}; expected at least 2 tokens.")
        if not 0 <= self.generic_share <= 1:
            raise ValueError(f"generic_share is {self.generic_share}; expected a share from 0 to 1.")
        if self.tree is not None and all(corpus.path_column is None for corpus in self.corpora):
            raise ValueError(
                f"tree is {self.tree!r}, and no corpus has a path_column; expected the column with the paths of its documents. "
                "Leave tree out, or give the column."
            )
        if not self.corpora:
            raise ValueError("corpus is an empty list; expected one or more corpora, each with a weight.")
        if self.corpora[0].streaming and self.max_steps is None:
            raise ValueError("corpus.streaming needs max_steps: a stream does not say how long it is.")

    @property
    def corpora(self) -> Sequence[CorpusOptions]:
        """Corpora of the run, as a list even where there is only one."""
        return self.corpus if isinstance(self.corpus, list) else [self.corpus]

    def sources(self) -> list[tuple[str, str]]:
        trees = [] if self.tree is None else [("tree", self.tree)]
        return [*(("corpus", corpus.path) for corpus in self.corpora), *trees, *super().sources()]

    def to_share(self, label: Callable[[str], str]) -> Self:
        corpora = [dataclasses.replace(corpus, path=label(corpus.path), cache_dir=None) for corpus in self.corpora]
        corpus: Any = corpora if isinstance(self.corpus, list) else corpora[0]
        tree = None if self.tree is None else label(self.tree)
        return dataclasses.replace(super().to_share(label), corpus=corpus, tree=tree)
