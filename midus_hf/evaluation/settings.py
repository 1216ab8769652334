"""Settings of an evaluation: the options of `midus eval`, and the keys of its YAML file."""

import dataclasses
from typing import Annotated, Any

import typer


def _option(help: str, metavar: str) -> Any:
    return typer.Option(help=help, metavar=metavar)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Request of what is measured of models, and how. Paths are relative to the current folder.

    With a `retriever` or a `path_column`, windows end where documents end, and models that fetch blocks do so by the path of the
    whole document, with a `retriever` also by that of a task's question. Other models are measured alike, without blocks.

    Raises:
        ValueError: If there is nothing to measure, if an option is out of range, or if another option that it needs is missing.
    """

    text: Annotated[str | None, _option("File, folder or dataset id to measure perplexity on.", "PATH")] = None
    column: Annotated[str, _option("Column that holds the text.", "NAME")] = "text"
    sequence_length: Annotated[int | None, _option("Tokens per window of the text.  [default: 1024]", "N")] = None
    max_tokens: Annotated[
        int | None, _option("Tokens of the text to predict, spread evenly over it.  [default: all]", "N")
    ] = None
    retriever: Annotated[str | None, _option("Tree of topics by which models fetch blocks.", "TREE")] = None
    path_column: Annotated[str | None, _option("Column with the path to fetch blocks by.", "NAME")] = None
    tasks: Annotated[list[str] | None, _option("Tasks of lm-eval, separated by commas.", "NAMES")] = None
    data: Annotated[str | None, _option("Folder with the questions of local tasks.", "DIR")] = None
    include_path: Annotated[str | None, _option("Folder with more task files.", "DIR")] = None
    num_fewshot: Annotated[int | None, _option("Worked examples before a question.  [default: the task's]", "N")] = (
        None
    )
    limit: Annotated[int | None, _option("Questions per task, from the first on.  [default: all]", "N")] = None
    batch_size: Annotated[int, _option("Windows or requests per forward pass.", "N")] = 4
    dtype: Annotated[str, _option("auto, float32, bfloat16 or float16.", "NAME")] = "auto"
    device: Annotated[str | None, _option("Such as cpu or cuda:0.  [default: GPU, else cpu]", "NAME")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
    ] = False

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
