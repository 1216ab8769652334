"""Settings of an evaluation: the options of `midus eval`, and the keys of its YAML file."""

import dataclasses

from midus_hf.config.errors import RequestError
from midus_hf.sources.names import check_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation: what is measured, and how. Paths are relative to the current folder."""

    text: str | None = None
    column: str = "text"
    sequence_length: int | None = None
    max_tokens: int | None = None
    retriever: str | None = None
    path_column: str | None = None
    tasks: list[str] | None = None
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
            raise RequestError("there is nothing to measure; give a text, tasks, or both.")
        for keys, needed, missing in (
            (("column", "sequence_length", "max_tokens", "path_column"), self.text, "text to measure"),
            (("data", "include_path", "num_fewshot", "limit"), self.tasks, "task to run"),
        ):
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name in keys and not needed and value != field.default:
                    raise RequestError(
                        f"{field.name} is {value!r}, but there is no {missing}; give one, or leave it out."
                    )
        if self.path_column is not None and self.retriever is not None:
            raise RequestError(
                f"path_column is {self.path_column!r}, but a retriever is given; expected one of them. Leave one out."
            )
        check_dtype(self.dtype)
        least_of = {"limit": 1, "batch_size": 1, "sequence_length": 1, "max_tokens": 1, "num_fewshot": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{name} is {value}; expected at least {least}.")
