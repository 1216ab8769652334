"""Settings of an evaluation, from the command line or a YAML file."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from midus_hf.config.yaml_options import from_mapping, read_mapping, with_overrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation. `midus eval --set KEY=VALUE` sets a key, and the keys that are needed most are options as well.

    Paths are relative to the current folder.

    Args:
        text: File or folder to measure perplexity on, of the kinds that `read_documents` reads. Default: none.
        column: Column, or JSON key, that holds the text in JSON lines and Parquet, for `text` and `documents`. Default: `text`.
        encoding: Encoding of plain text and JSON lines, for `text` and `documents`. Default: `utf-8`.
        sequence_length: Tokens per window of the text. Default: 1024, or the longest that the model was made for if shorter.
        stride: Tokens predicted per window. Default: `sequence_length`.
        max_tokens: Greatest number of tokens to predict, spread evenly over the text. Default: all.
        apart: Whether windows of the text end where a document ends. Default: False. It is always true with `retriever` or
            `path_column`.
        retriever: Folder of a tree of topics, as `midus cluster build` makes it. Models that fetch blocks do so by the path of a
            whole document, or of a task's question; other models are measured in the same way without blocks. Default: none.
        path_column: Column, or JSON key, that holds the path of each document in JSON lines and Parquet, as `midus cluster
            assign` writes it. Models that fetch blocks do so by this path, as in training; other models are measured in the same
            way without blocks. Windows end where documents end. Default: none.
        blocked: Nodes, each as `LEVEL:NODE`, whose blocks are never fetched, nor the blocks of nodes below them. The next best
            node is fetched instead. Default: none.
        block_best: `LEVEL:COUNT`. For each text, the first COUNT nodes of this level that it would fetch are blocked (figure
            6b). Default: none.
        tasks: Tasks of lm-evaluation-harness. Default: none.
        data: Folder with the questions of the local tasks. Default: none, and every task is lm-eval's own.
        documents: File or folder of documents, of the same kinds as `text`. The nearest document is put in front of each
            question of a task (hierarchical memories, appendix H). Default: none.
        passage_tokens: Greatest number of tokens, in the embedding model's tokens, of passages into which documents are cut, at
            ends of lines if possible. Default: documents stay whole.
        embedding_model: Folder or hub id of a sentence-transformers model, which decides which document is nearest. Default: the
            model of `retriever`.
        include_path: Folder with more task files. Default: none.
        answers: File of JSON lines to write, with a line per question and model: the question, the expected answer and the
            model's answer. Default: none.
        num_fewshot: Worked examples before a question. Default: the task's own number, else 0.
        limit: Number of questions per task, from the first on. Default: all.
        batch_size: Windows or requests per forward pass. Default: 4.
        dtype: Dtype to load weights in: `auto` (as saved), `float32`, `bfloat16` or `float16`. Default: `auto`.
        device: Device to run on, such as `cpu` or `cuda:0`. Default: the first GPU if there is one, else the CPU.
        trust_remote_code: Whether to run code that comes with a checkpoint. Models of this package need none. Default: False.
        seed: Seed for the choice of worked examples. Default: 0.

    Raises:
        ValueError: If there is nothing to measure, if an option is out of range, or if another option that it needs is missing.
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
                f"documents is {self.documents}, but no model decides which of them is nearest; give embedding_model, or a "
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
        """The nodes of `blocked` as pairs of a level, counted from 1, and a node."""
        return [_pair(text) for text in self.blocked]

    @property
    def best_nodes_blocked(self) -> tuple[int, int] | None:
        """The level of `block_best`, counted from 1, and the number of nodes to block; None if `block_best` is None."""
        return None if self.block_best is None else _pair(self.block_best)


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    return int(first), int(second)


def check_dtype(dtype: str) -> None:
    """Check that weights can be loaded in a dtype.

    Raises:
        ValueError: If the dtype is not `auto`, `float32`, `bfloat16` or `float16`.
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; expected auto, float32, bfloat16 or float16.")


def read_settings(
    path: str | Path | None, overrides: dict[str, Any], settings: Iterable[str] = ()
) -> EvaluationSettings:
    """Read settings from a YAML file, and replace some of them.

    Args:
        path: YAML file that maps keys of `EvaluationSettings` to values. None: only the overrides count.
        overrides: Settings by key. A value that is not None replaces the file's value.
        settings: Settings as words `key=value`, whose values are YAML. They win over `overrides`. Default: none.

    Raises:
        ValueError: If the file cannot be read, or has an unknown key or a value of the wrong type.
    """
    values = {} if path is None else read_mapping(path)
    replacements = {key: value for key, value in overrides.items() if value is not None}
    return from_mapping(EvaluationSettings, with_overrides(EvaluationSettings, {**values, **replacements}, settings))
