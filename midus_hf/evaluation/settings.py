"""What an evaluation measures and how, from the command line or a YAML file."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from midus_hf.config.yaml_options import from_mapping, read_mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What to measure and how. Every key is also an option of `midus eval`. Paths are relative to where it runs.

    Args:
        text: File or folder to measure perplexity on, of the kinds that `read_documents` reads. Default: none.
        column: The column, or JSON key, of JSON lines and Parquet that holds the text, and documents. Default: `text`.
        encoding: Encoding of plain text and JSON lines, of text and documents. Default: `utf-8`.
        sequence_length: Tokens of a window of the text. Default: 1024, or what the model was made for.
        stride: Tokens predicted per window. Default: `sequence_length`.
        max_tokens: Tokens of the text to predict, spread evenly over it. Default: all.
        apart: Whether windows of the text end where a document ends. Default: false; true where there are a retriever or paths.
        retriever: A tree of topics, as `midus cluster build` makes it: models that fetch blocks do so by the path of a whole
            document, or of what a task asks; others are measured alike without. Default: none.
        path_column: The column, or JSON key, of JSON lines and Parquet that holds the path of each document of the text, as
            `midus cluster assign` writes it: models that fetch blocks do so by it, as their training does; others are measured alike
            without. Windows end where documents do. Default: none.
        blocked: Nodes whose blocks are never fetched, nor any below them, each as `LEVEL:NODE`: the next best is. Default: none.
        block_best: `LEVEL:COUNT`: of this level that many nodes, those that a text would fetch first, are blocked for that text
            (figure 6b). Default: none.
        tasks: Tasks of lm-evaluation-harness. Default: none.
        data: Folder with the questions of the local tasks. Default: none, every task is lm-eval's own.
        documents: File or folder, of the kinds that `text` may be: each question of a task is asked behind the document that is
            nearest to it (hierarchical memories, appendix H). Default: none.
        passage_tokens: Documents are cut into passages of at most so many tokens of the embedding model, at ends of lines where that
            is possible. Default: they stay whole.
        embedding_model: Folder or hub id of a sentence-transformers model, by which documents are near. Default: that of `retriever`.
        include_path: Folder with more task files. Default: none.
        answers: File of JSON lines that is written, a line for each question and model: what was asked, expected and answered.
            Default: none.
        num_fewshot: Worked examples before a question. Default: what the task says, else 0.
        limit: Questions per task. Default: all.
        batch_size: Windows or requests per forward pass. Default: 4.
        dtype: What the weights are loaded as: `auto` (as saved), `float32`, `bfloat16` or `float16`. Default: `auto`.
        device: Such as `cpu` or `cuda:0`. Default: the first GPU if there is one.
        trust_remote_code: Whether to run code that comes with a checkpoint. Models of this package need none.
        seed: Of the choice of worked examples. Default: 0.

    Raises:
        ValueError: If there is nothing to measure, or an option is out of range or without what it belongs to.
    """

    text: str | None = None
    column: str = "text"
    encoding: str = "utf-8"
    sequence_length: int | None = None
    stride: int | None = None
    max_tokens: int | None = None
    apart: bool = False
    retriever: str | None = None
    path_column: str | None = None
    blocked: list[str] = dataclasses.field(default_factory=list)
    block_best: str | None = None
    tasks: list[str] = dataclasses.field(default_factory=list)
    data: str | None = None
    documents: str | None = None
    passage_tokens: int | None = None
    embedding_model: str | None = None
    include_path: str | None = None
    answers: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 4
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.text is None and not self.tasks:
            raise ValueError("there is nothing to measure; give a text, tasks, or both.")
        for name in ("sequence_length", "stride", "max_tokens"):
            if self.text is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)}, but there is no text to measure.")
        for name, default in (("column", "text"), ("encoding", "utf-8")):
            if self.text is None and self.documents is None and getattr(self, name) != default:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but there is no text to measure.")
        if self.path_column is not None and (self.text is None or self.retriever is not None):
            beside = (
                "there is no text to measure" if self.text is None else "a retriever is given; expected one of them"
            )
            raise ValueError(f"path_column is {self.path_column!r}, but {beside}.")
        if self.blocked and self.retriever is None:
            raise ValueError(f"blocked is {', '.join(self.blocked)}, but there is no retriever; give one.")
        for node in self.blocked:
            if not re.fullmatch(r"[1-9]\d*:\d+", node):
                raise ValueError(f"blocked has {node!r}; expected LEVEL:NODE, such as 2:52.")
        if self.block_best is not None and self.retriever is None:
            raise ValueError(f"block_best is {self.block_best}, but there is no retriever; give one.")
        if self.block_best is not None and not re.fullmatch(r"[1-9]\d*:\d+", self.block_best):
            raise ValueError(f"block_best is {self.block_best!r}; expected LEVEL:COUNT, such as 1:1.")
        for name in ("data", "documents", "include_path", "answers", "num_fewshot", "limit"):
            if not self.tasks and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)}, but there are no tasks; name them.")
        for name in ("passage_tokens", "embedding_model"):
            if self.documents is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)}, but there are no documents; give some.")
        if self.documents is not None and self.embedding_model is None and self.retriever is None:
            raise ValueError(
                f"documents is {self.documents}, but nothing says by which model they are near; give embedding_model, or a "
                "retriever, whose tree names one."
            )
        for name, least in (
            ("limit", 1),
            ("batch_size", 1),
            ("passage_tokens", 1),
            ("num_fewshot", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}.")
        check_dtype(self.dtype)

    @property
    def blocked_nodes(self) -> list[tuple[int, int]]:
        """`blocked` as pairs of a level, counted from 1, and a node."""
        return [_pair(words) for words in self.blocked]

    @property
    def best_nodes_blocked(self) -> tuple[int, int] | None:
        """`block_best` as a level, counted from 1, and a number of nodes."""
        return None if self.block_best is None else _pair(self.block_best)


def _pair(words: str) -> tuple[int, int]:
    first, _, second = words.partition(":")
    return int(first), int(second)


def check_dtype(dtype: str) -> None:
    """See that weights can be loaded as this dtype.

    Args:
        dtype: As in `EvaluationSettings`.

    Raises:
        ValueError: If they cannot.
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; expected auto, float32, bfloat16 or float16.")


def read_settings(path: str | Path | None, overrides: dict[str, Any]) -> EvaluationSettings:
    """Read settings from a YAML file and put what is given beside it on top.

    Args:
        path: A mapping from keys of `EvaluationSettings` to values. None: only the overrides count.
        overrides: Settings that are not None replace those of the file.

    Raises:
        ValueError: If the file cannot be read, or has an unknown key or a value of the wrong type.
    """
    values = {} if path is None else read_mapping(path)
    given = {key: value for key, value in overrides.items() if value is not None}
    return from_mapping(EvaluationSettings, {**values, **given})
