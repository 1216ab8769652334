"""What a run of continual pretraining may be told."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

from midus_hf.training.optim.rates import Rates
from midus_hf.training.run_options import RunOptions


@dataclasses.dataclass(kw_only=True)
class CorpusOptions:
    """Where the text comes from.

    Args:
        path: A text file, a folder of them, or the id of a dataset on the Hub. Plain text (`.txt`, `.md`, or a file
            with any other ending) is one document per file; `.jsonl` and `.parquet` hold one document per row. A folder
            is read recursively in sorted order, and only its `.txt`, `.md`, `.jsonl` and `.parquet` files. All but
            Parquet may be compressed, with `.gz` or `.zst` behind their ending.
        config: The configuration of a dataset. Default: its own.
        split: The split of a dataset. Default: `"train"`.
        column: The column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Encoding of plain text and JSON lines. Default: `"utf-8"`.
        streaming: Read while training instead of before it; needs `max_steps`. Default: false.
        shuffle_buffer: Documents of a streamed dataset held at a time to draw from in random order; 0 keeps the
            dataset's order. Default: 0.
        path_column: The column, or JSON key, that holds each document's node of each level of a tree of topics, as `midus cluster
            assign` writes it: documents are packed within leaves, and blocks are fetched by the path. Default: none.
        id_column: The column, or JSON key, that names each document, for the record of `audit`. Default: none, lines say which it is.
        cache_dir: Folder where tokens are kept between runs. Default: `midus_hf_tokens` in the cache of the library
            `datasets`, which the variables HF_HOME and HF_DATASETS_CACHE move.

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
    id_column: str | None = None
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
    """One corpus of several, with the keys of `CorpusOptions` and one more.

    Args:
        weight: The corpus gives `weight / (sum of all weights)` of the sequences that the run trains on, however long
            it is; a short one is gone through again and again. Sequences have one length, so this is its share of
            tokens too.

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
        corpus: The keys of `CorpusOptions`; in a file, a path or dataset id may stand for all of them. Or a list of
            corpora, each with the same keys and a `weight`, its share of the sequences: see `WeightedCorpus`.
        sequence_length: T, tokens per sequence. Default: 2048.
        tree: Folder of the tree of topics by which the paths of the corpus were found. The tree is saved beside the model, and paths
            of another tree are refused. Default: the tree that the corpus names, without its files.
        generic_share: Of a corpus with `path_column`, share of sequences that read the generic memory instead of the blocks of
            their path (section 4 of hierarchical memories); which these are is drawn anew in each epoch. Default: 1 / 17.
        audit: Whether to record which documents train each block that is fetched, in a file beside the bank that `midus bank
            audit` reads; every corpus then has a `path_column`. Default: false.
        document_mask: Whether tokens attend only within their document. Default: false, as in the paper: documents
            are concatenated and a sequence is one context.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    corpus: CorpusOptions | list[WeightedCorpus]
    sequence_length: int = 2048
    document_mask: bool = False
    tree: str | None = None
    generic_share: float = 1 / 17
    audit: bool = False

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
        for corpus in self.corpora:
            if self.audit and corpus.path_column is None:
                raise ValueError(
                    f"audit is true, and corpus {corpus.path!r} has no path_column; expected the column with the paths by which its "
                    "documents fetch blocks. Leave audit out, or give it."
                )
            if corpus.id_column is not None and not self.audit:
                raise ValueError(
                    f"corpus.id_column is {corpus.id_column!r}, which names documents in the record of what trains blocks; expected "
                    "audit: true with it. Leave it out, or set both."
                )
        if self.corpora[0].streaming and self.max_steps is None:
            raise ValueError("corpus.streaming needs max_steps: a stream does not say how long it is.")

    @property
    def corpora(self) -> Sequence[CorpusOptions]:
        """All corpora of the run."""
        return self.corpus if isinstance(self.corpus, list) else [self.corpus]

    def sources(self) -> list[tuple[str, str]]:
        trees = [] if self.tree is None else [("tree", self.tree)]
        return [*(("corpus", corpus.path) for corpus in self.corpora), *trees, *super().sources()]

    def to_share(self, label: Callable[[str], str]) -> Self:
        corpora = [dataclasses.replace(corpus, path=label(corpus.path), cache_dir=None) for corpus in self.corpora]
        corpus: Any = corpora if isinstance(self.corpus, list) else corpora[0]
        tree = None if self.tree is None else label(self.tree)
        return dataclasses.replace(super().to_share(label), corpus=corpus, tree=tree)
