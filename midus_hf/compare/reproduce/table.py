"""A table at a scale, as a comparison of its rows."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from midus_hf.compare.learning import Spread, spread
from midus_hf.compare.options import OWN_FINE_TUNING_KEYS, OWN_TRAINING_KEYS, OWN_UPSCALING_KEYS, Comparison
from midus_hf.compare.report.findings import metric_of
from midus_hf.compare.reproduce.repository import Repository
from midus_hf.compare.results import Result
from midus_hf.config.options import read_options
from midus_hf.config.yaml_options import read_mapping, with_overrides

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


AVERAGE = "Average"
# The metric of tasks that measure the perplexity of a text.
_WORD_PERPLEXITY = "word_perplexity"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a paper, such as table `1` of `midus`, at a scale, one of `SCALES`."""

    paper: str
    name: str
    scale_name: str
    options: TableOptions
    scale: ScaleOptions

    def number(self, column: str, stage: Stage, result: Result) -> float | None:
        """Return the number of a result in a column: an accuracy in per cent, or a perplexity; None if not measured."""
        if column == AVERAGE:
            shares = [
                number for name in self._shares(result) if (number := self.number(name, stage, result)) is not None
            ]
            return statistics.fmean(shares) if shares else None
        how = self.scale.columns.get(column)
        measured = result.end_of(stage == "tuned")
        if how is None or measured is None:
            return None
        if how.text is not None:
            return math.exp(measured.losses[column])
        metrics = measured.tasks.get(how.task or "", {})
        share = metric_of(metrics)
        return metrics.get(_WORD_PERPLEXITY) if share is None else 100 * share

    def spread(self, column: str, stage: Stage, results: Sequence[Result]) -> Spread | None:
        """Return the mean and spread of a column over the seeds that have a number; None if no seed has."""
        numbers = [number for result in results if (number := self.number(column, stage, result)) is not None]
        return spread(numbers) if numbers else None

    def comparison(self, repository: Repository, output: Path, rows: Sequence[str]) -> Comparison:
        """Return the comparison that measures some rows of the table."""
        scale, table = self.scale, self.options
        measured = {name: how for name, how in scale.columns.items() if name in table.columns}
        tasks = {
            "names": [how.task for how in measured.values() if how.task is not None],
            "data": scale.data,
            "limit": scale.limit,
            "num_fewshot": scale.num_fewshot,
        }
        values = {
            "base": scale.base or repository.base(table.base),
            "output_dir": str(output),
            "variants": {variant_name(name): self._variant(table.rows[name], repository) for name in rows},
            "train": scale.train,
            "domain": {name: how.text for name, how in measured.items() if how.text is not None},
            "tasks": tasks if tasks["names"] else None,
            "seeds": scale.seeds,
            "controls": False,
            "evaluations": 1,
        }
        if table.fine_tune is not None:
            recipe = read_mapping(repository.recipe("sft", table.fine_tune, table.base))
            values["fine_tune"] = {**_without(recipe, OWN_FINE_TUNING_KEYS), **scale.fine_tune}
        return read_options(Comparison, repository.fetched(values), "the table")

    def _variant(self, row: RowOptions, repository: Repository) -> dict[str, Any]:
        train = _without(read_mapping(repository.recipe("train", row.train, self.options.base)), OWN_TRAINING_KEYS)
        # One recipe serves all rows, which differ in their model: a base trains whole, and an upscaled model what its method trains.
        trainable = "all" if row.upscale is None else "auto"
        variant: dict[str, Any] = {"train": {**train, "trainable": trainable, **self.scale.train, **row.changes}}
        if row.upscale is not None:
            recipe = read_mapping(repository.recipe("upscale", row.upscale, self.options.base))
            variant["upscale"] = {**_without(recipe, OWN_UPSCALING_KEYS), **self.scale.upscale}
        return variant

    def _shares(self, result: Result) -> list[str]:
        """Return the columns whose numbers are accuracies."""
        tasks = {name: how.task for name, how in self.scale.columns.items() if how.task is not None}
        return [
            name for name in self.options.columns if metric_of(result.tasks.get(tasks.get(name, ""), {})) is not None
        ]


def read_table(repository: Repository, paper: str, name: str, scale: str, overrides: Sequence[str] = ()) -> Table:
    """Read a table and a scale from their files."""
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; expected one of: {', '.join(SCALES)}.")
    options = read_options_of(repository, paper, name)
    scales_file = repository.scales_file(paper, options.scales)
    scales = read_mapping(scales_file)
    if scale not in scales:
        raise ValueError(f"scale is {scale!r}; of this table there are: {', '.join(scales)}.")
    chosen = with_overrides(ScaleOptions, scales[scale], overrides)
    return Table(paper, name, scale, options, read_options(ScaleOptions, chosen, f"scale {scale} of {scales_file}"))


def read_options_of(repository: Repository, paper: str, name: str) -> TableOptions:
    """Read the options of a table from its file."""
    file = repository.table_file(paper, name)
    return read_options(TableOptions, read_mapping(file), str(file))


def variant_name(row: str) -> str:
    """Return the name of a row's variant: the row's name with `-` for each character that a folder's name should not have."""
    return "".join(letter if letter.isalnum() or letter in "._+-" else "-" for letter in row)


def _without(recipe: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key not in keys}
