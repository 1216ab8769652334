"""Options in the files of tables and of scales."""

import dataclasses
from typing import Any, Literal

# When a number is measured: `continued` after continual pretraining, `tuned` after the fine-tuning that follows.
Stage = Literal["continued", "tuned"]

SCALES = ("paper", "small", "tiny")


@dataclasses.dataclass(kw_only=True)
class RowOptions:
    """Options of a row of a table.

    Args:
        train: Name of a recipe for `midus train`, without `.yaml`, in which `{base}` stands for the table's base.
        upscale: Name of a recipe for `upscale`, in the same form. Default: none, the base is trained.
        changes: Keys of `midus train` that replace keys of the recipe and of the scale. Default: none.
        continued: The paper's numbers after continual pretraining, one per column in order; null where the paper has none.
        tuned: The paper's numbers after fine-tuning, in the same form. Default: none.
    """

    train: str
    upscale: str | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    continued: list[float | None]
    tuned: list[float | None] | None = None


@dataclasses.dataclass(kw_only=True)
class TableOptions:
    """Options of a table of a paper.

    Args:
        title: Title of the table.
        base: Name of the base in the names of recipes, such as `llama-3.2-1b`.
        columns: Names of the columns, which scales describe; `Average` is the mean of the accuracies.
        rows: Options of the rows, by name, in the paper's order.
        scales: Name of the file of scales, without `.yaml`.
        fine_tune: Name of the recipe for `midus sft` of all rows, without `.yaml`. Default: none, the table ends with continual
            pretraining.

    Raises:
        ValueError: If a row has not one number per column.
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
                        f"rows.{name} has {len(numbers)} numbers; expected {len(self.columns)}, one per column."
                    )

    @property
    def stages(self) -> list[Stage]:
        """Stages after which the table has numbers, in order."""
        return ["continued"] if self.fine_tune is None else ["continued", "tuned"]


@dataclasses.dataclass(kw_only=True)
class ColumnOptions:
    """Task or text that a column measures.

    Args:
        task: Name of a task of `midus eval`. Default: none.
        text: File or folder of text whose perplexity is measured. Default: none.
    """

    task: str | None = None
    text: str | None = None


@dataclasses.dataclass(kw_only=True)
class ScaleOptions:
    """Scale at which a table is reproduced: its base, its data and its budget.

    A path may be `material:NAME`, which stands for the path of fetched material.

    Args:
        needs: Machine and time that the scale needs, as a sentence for people.
        columns: Task or text per column; a column that is left out is not measured and stays empty.
        base: Folder or Hub id of the base. Default: the base of the recipes.
        upscale: Keys of `upscale` that replace keys of the recipes. Default: none.
        train: Keys of `midus train` that replace keys of the recipes. Default: none.
        fine_tune: Keys of `midus sft` that replace keys of the recipe. Default: none.
        data: Folder with the questions of the local tasks. Default: none.
        limit: Questions per task. Default: all.
        num_fewshot: Worked examples before a question. Default: what the task says.
        seeds: Seeds of new parameters and of the order of texts. Default: `[0]`.
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
