"""A table at a scale, as a comparison of its rows."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.learning import Spread, spread
from midus_hf.compare.options import OWN_FINE_TUNING_KEYS, OWN_TRAINING_KEYS, OWN_UPSCALING_KEYS, Comparison
from midus_hf.compare.report.findings import metric_of
from midus_hf.compare.reproduce.options import SCALES, RowOptions, ScaleOptions, Stage, TableOptions
from midus_hf.compare.reproduce.repository import Repository
from midus_hf.compare.results import Result
from midus_hf.config.options import read_options
from midus_hf.config.yaml_options import read_mapping, with_overrides

AVERAGE = "Average"
# The metric of tasks that measure the perplexity of a text.
_WORD_PERPLEXITY = "word_perplexity"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table at a scale.

    Args:
        paper: Name of the paper, such as `midus`.
        name: Name of the table, such as `1`.
        scale_name: Name of the scale, one of `SCALES`.
        options: Options of the table.
        scale: Options of the scale.
    """

    paper: str
    name: str
    scale_name: str
    options: TableOptions
    scale: ScaleOptions

    def number(self, column: str, stage: Stage, result: Result) -> float | None:
        """Return the number of a result in a column: an accuracy in per cent, or a perplexity; None if not measured.

        Args:
            column: A column of the table; `Average` is the mean of the accuracies.
            stage: Stage after which the number is measured.
            result: Result of a row with one seed.
        """
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
        """Return the mean and spread of a column over the seeds that have a number; None if no seed has.

        Args:
            column: A column of the table.
            stage: Stage after which the numbers are measured.
            results: Results of a row, one per seed.
        """
        numbers = [number for result in results if (number := self.number(column, stage, result)) is not None]
        return spread(numbers) if numbers else None

    def comparison(self, repository: Repository, output: Path, rows: Sequence[str]) -> Comparison:
        """Return the comparison that measures some rows of the table.

        Args:
            repository: Clone with the recipes and the material.
            output: Folder of the comparison.
            rows: Names of the rows.

        Raises:
            ValueError: If a recipe cannot be read, or material cannot be fetched.
        """
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
        variant: dict[str, Any] = {"train": {**train, **self.scale.train, **row.changes}}
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
    """Read a table and a scale from their files.

    Args:
        repository: Clone that has the files.
        paper: Name of the paper, such as `midus`.
        name: Name of the table, such as `1`.
        scale: Name of the scale, one of `SCALES`.
        overrides: Arguments `key=value` that replace keys of the scale. Default: none.

    Raises:
        ValueError: If the table or the scale does not exist, or a file has an unknown key.
    """
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
    """Read the options of a table from its file.

    Args:
        repository: Clone that has the file.
        paper: Name of the paper, such as `midus`.
        name: Name of the table, such as `1`.

    Raises:
        ValueError: If the table does not exist, or its file has an unknown key.
    """
    file = repository.table_file(paper, name)
    return read_options(TableOptions, read_mapping(file), str(file))


def variant_name(row: str) -> str:
    """Return the name of a row's variant: the row's name with `-` for each character that a folder's name should not have.

    Args:
        row: Name of the row in the table.
    """
    return "".join(letter if letter.isalnum() or letter in "._+-" else "-" for letter in row)


def _without(recipe: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key not in keys}
