"""The table that people read: one row a measure, one column a model."""

from pathlib import Path
from typing import Any

from rich.table import Table

_METRICS_SHOWN = ("acc", "acc_norm", "exact_match", "f1", "word_perplexity", "byte_perplexity", "bits_per_byte")


def comparison_table(report: dict[str, Any]) -> Table:
    """Lay out what `evaluate` returned.

    Accuracies have their standard error beside them. Metrics of a task that are not shown are in the report.
    """
    models = report["models"]
    table = Table(title="Evaluation")
    table.add_column("measure")
    for label in _labels([model["model"] for model in models]):
        table.add_column(label, justify="right", overflow="fold")
    table.add_row("parameters", *(f"{model['parameters']:,}" for model in models))
    if models[0]["perplexity"] is not None:
        results = [model["perplexity"] for model in models]
        table.add_row("perplexity", *(f"{result['perplexity']:.4f}" for result in results))
        table.add_row("bits a byte", *(f"{result['bits_per_byte']:.4f}" for result in results))
        table.add_row("tokens predicted", *(f"{result['tokens']:,}" for result in results))
        table.add_row("tokens a second", *(f"{result['tokens_per_second']:,.0f}" for result in results))
    for task, scores in models[0]["tasks"].items():
        shown = [metric for metric in scores if metric.partition(",")[0] in _METRICS_SHOWN]
        for metric in shown:
            cells = (_score(model["tasks"][task], metric) for model in models)
            table.add_row(f"{task} {metric} ({scores['num_fewshot'] or 0}-shot)", *cells)
    table.add_row("seconds", *(f"{model['seconds']:.1f}" for model in models))
    return table


def _score(scores: dict[str, Any], metric: str) -> str:
    name, comma, filter_name = metric.partition(",")
    error = scores.get(f"{name}_stderr{comma}{filter_name}")
    return f"{scores[metric]:.4f}" if error is None else f"{scores[metric]:.4f} ± {error:.4f}"


def _labels(names: list[str]) -> list[str]:
    """The last part of each name where that tells them apart, else the whole names."""
    short = [Path(name).name or name for name in names]
    return short if len(set(short)) == len(short) else names
