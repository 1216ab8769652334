"""Settings of an evaluation, from the command line or a YAML file."""

import dataclasses
from pathlib import Path
from typing import Any

from midus_hf.config.yaml_options import from_mapping, read_mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation: the options of `midus eval`, and the keys of its YAML file.

    Paths are relative to the current folder.

    Args:
        text: File or folder to measure perplexity on, of the kinds that `read_documents` reads. Default: none.
        column: Column, or JSON key, that holds the text in JSON lines and Parquet. Default: `text`.
        sequence_length: Tokens per window of the text. Default: 1024, or the longest that the model was made for if shorter.
        max_tokens: Greatest number of tokens to predict, spread evenly over the text. Default: all.
        retriever: Folder of a tree of topics, as `midus cluster build` makes it. Models that fetch blocks do so by the path of a
            whole document, or of a task's question; other models are measured in the same way without blocks. Windows end where
            documents end. Default: none.
        path_column: Column, or JSON key, that holds the path of each document in JSON lines and Parquet, as `midus cluster
            assign` writes it. Models that fetch blocks do so by this path, as in training; other models are measured in the same
            way without blocks. Windows end where documents end. Default: none.
        tasks: Tasks of lm-evaluation-harness. Default: none.
        data: Folder with the questions of the local tasks. Default: none, and every task is lm-eval's own.
        include_path: Folder with more task files. Default: none.
        num_fewshot: Worked examples before a question. Default: the task's own number, else 0.
        limit: Number of questions per task, from the first on. Default: all.
        batch_size: Windows or requests per forward pass. Default: 4.
        dtype: Dtype to load weights in: `auto` (as saved), `float32`, `bfloat16` or `float16`. Default: `auto`.
        device: Device to run on, such as `cpu` or `cuda:0`. Default: the first GPU if there is one, else the CPU.
        trust_remote_code: Whether to run code that comes with a checkpoint. Models of this package need none. Default: False.

    Raises:
        ValueError: If there is nothing to measure, if an option is out of range, or if another option that it needs is missing.
    """

    text: str | None = None
    column: str = "text"
    sequence_length: int | None = None
    max_tokens: int | None = None
    retriever: str | None = None
    path_column: str | None = None
    tasks: list[str] = dataclasses.field(default_factory=list)
    data: str | None = None
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 4
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.text is None and not self.tasks:
            raise ValueError("there is nothing to measure; give a text, tasks, or both.")
        for keys, needed, missing in (
            (("column", "sequence_length", "max_tokens", "path_column"), self.text, "text to measure"),
            (("data", "include_path", "num_fewshot", "limit"), self.tasks, "task to run"),
        ):
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name in keys and not needed and value != field.default:
                    raise ValueError(
                        f"{field.name} is {value!r}, but there is no {missing}; give one, or leave it out."
                    )
        if self.path_column is not None and self.retriever is not None:
            raise ValueError(
                f"path_column is {self.path_column!r}, but a retriever is given; expected one of them. Leave one out."
            )
        for name, least in (("limit", 1), ("batch_size", 1), ("num_fewshot", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}.")
        check_dtype(self.dtype)


def check_dtype(dtype: str) -> None:
    """Check that weights can be loaded in a dtype.

    Raises:
        ValueError: If the dtype is not `auto`, `float32`, `bfloat16` or `float16`.
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; expected auto, float32, bfloat16 or float16.")


def read_settings(path: str | Path | None, overrides: dict[str, Any]) -> EvaluationSettings:
    """Read settings from a YAML file, and replace some of them.

    Args:
        path: YAML file that maps keys of `EvaluationSettings` to values. None: only the overrides count.
        overrides: Settings by key. A value that is not None replaces the file's value.

    Raises:
        ValueError: If the file cannot be read, or has an unknown key or a value of the wrong type.
    """
    values = {} if path is None else read_mapping(path)
    values |= {key: value for key, value in overrides.items() if value is not None}
    return from_mapping(EvaluationSettings, values)
