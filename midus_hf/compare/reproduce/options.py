"""What the file of a table says, and what one of a scale says."""

import dataclasses
from typing import Any, Literal

Stage = Literal["continued", "tuned"]
"""After continual pretraining, and after fine-tuning behind it."""

SCALES = ("paper", "small", "tiny")


@dataclasses.dataclass(kw_only=True)
class RowOptions:
    """A row of a table.

    Args:
        train: A recipe for `midus train`, by the name of its file, with `{base}` where the base's is.
        upscale: One for `upscale`, likewise. Default: none, the base is trained.
        changes: Keys of `midus train` that replace those of the recipe. Default: none.
        continued: The paper's numbers after continual pretraining, in the order of columns; null where it has none.
        tuned: Those after fine-tuning, likewise. Default: none.
    """

    train: str
    upscale: str | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    continued: list[float | None]
    tuned: list[float | None] | None = None


@dataclasses.dataclass(kw_only=True)
class TableOptions:
    """A table of a paper.

    Args:
        title: What it shows.
        base: The base in the names of recipes, such as `llama-3.2-1b`.
        columns: Names of what is measured, known to every scale; `Average` is that of the accuracies.
        rows: By name, in the paper's order.
        scales: The file of scales, by its name without an ending.
        fine_tune: The recipe for `midus sft` of all rows, likewise. Default: none, the table ends with continual pretraining.

    Raises:
        ValueError: If a row has another number of columns.
    """

    title: str
    base: str
    columns: list[str]
    rows: dict[str, RowOptions]
    scales: str
    fine_tune: str | None = None

    def __post_init__(self) -> None:
        for name, row in self.rows.items():
            for numbers in (row.continued, row.tuned):
                if numbers is not None and len(numbers) != len(self.columns):
                    raise ValueError(
                        f"rows.{name} has {len(numbers)} numbers; expected {len(self.columns)}, one a column."
                    )

    @property
    def stages(self) -> list[Stage]:
        """Those that the table tells."""
        return ["continued"] if self.fine_tune is None else ["continued", "tuned"]


@dataclasses.dataclass(kw_only=True)
class ColumnOptions:
    """How a column is measured: a task, or a text.

    Args:
        task: Of `midus eval`. Default: none.
        text: File or folder whose perplexity is measured. Default: none.
    """

    task: str | None = None
    text: str | None = None


@dataclasses.dataclass(kw_only=True)
class ScaleOptions:
    """How large a table is done.

    Paths may be `material:NAME`, which is fetched.

    Args:
        needs: Machine and time, in words.
        columns: How each column is measured; one that is left out is not, and stays empty.
        base: Folder or Hub id. Default: that of the recipes.
        upscale: Keys of `upscale` that replace those of recipes. Default: none.
        train: Keys of `midus train`, likewise. Default: none.
        fine_tune: Keys of `midus sft`, likewise. Default: none.
        data: Folder with the questions of the local tasks. Default: none.
        limit: Questions per task. Default: all.
        num_fewshot: Worked examples before a question. Default: what the task says.
        seeds: As in `Comparison`. Default: `[0]`.
    """

    needs: str
    columns: dict[str, ColumnOptions]
    base: str | None = None
    upscale: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: dict[str, Any] = dataclasses.field(default_factory=dict)
    fine_tune: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
