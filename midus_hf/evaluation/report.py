"""An evaluation's report as a table: one row per measure, one column per model."""

from typing import Any

from rich.table import Table

from midus_hf.sources.names import short_names

ABOUT_THE_TASK = ("num_fewshot", "num_questions", "dataset")


def comparison_table(report: dict[str, Any]) -> Table:
    """Return a table of the report that `evaluate` returned."""
    models = report["models"]
    table = Table(title="Evaluation")
    table.add_column("measure")
    labels = short_names([model["model"] for model in models])
    for label in labels:
        table.add_column(label, justify="right", overflow="fold")
    table.add_row("parameters", *(f"{model['parameters']:,}" for model in models))
    notes = []
    if models[0]["perplexity"] is not None:
        results = [model["perplexity"] for model in models]
        table.add_row("perplexity", *(f"{result['perplexity']:.4f}" for result in results))
        if len({result["tokens_sha256"] for result in results}) > 1:
            bits = (result["bits_per_byte"] for result in results)
            table.add_row("bits per byte", *("not known" if each is None else f"{each:.4f}" for each in bits))
            notes.append(
                "The models read the text in different tokens: perplexities, which are per token, cannot be compared; bits per "
                "byte of the text (UTF-8) can."
            )
        table.add_row("tokens predicted", *(f"{result['tokens']:,}" for result in results))
        lengths = [result["sequence_length"] for result in results]
        whole = report["settings"]["max_tokens"] is None and all(
            each["tokens"] == each["sequence_length"] for each in results
        )
        if len({*lengths}) > 1 and not whole:  # a text in one window has as many tokens as its tokenizer makes
            told = ", ".join(f"{label}: {length:,}" for label, length in zip(labels, lengths, strict=True))
            notes.append(
                f"Windows have other numbers of tokens ({told}), so results cannot be compared: pass --sequence-length "
                f"{min(lengths)}."
            )
    for task, scores in models[0]["tasks"].items():
        for metric in scores:
            if metric in ABOUT_THE_TASK or _is_error_of_another(metric, scores):
                continue
            cells = (_score(model["tasks"][task], metric) for model in models)
            table.add_row(f"{task} {metric} ({scores['num_fewshot'] or 0}-shot)", *cells)
    if ahead := ", ".join(label for label, model in zip(labels, models, strict=True) if not model["causal"]):
        read_ahead = "A model that reads tokens before it predicts them has a perplexity that cannot be compared."
        notes.append(f"Not causal: {ahead}. {read_ahead}")
    table.caption = " ".join(notes) or None
    return table


def _is_error_of_another(metric: str, scores: dict[str, Any]) -> bool:
    """Return whether a metric is the standard error of another metric in `scores`, which has its own row."""
    name, comma, filter_name = metric.partition(",")
    return name.endswith("_stderr") and f"{name.removesuffix('_stderr')}{comma}{filter_name}" in scores


def _score(scores: dict[str, Any], metric: str) -> str:
    value = scores.get(metric)
    if not isinstance(value, (int, float)):
        return value or "not finite"
    name, comma, filter_name = metric.partition(",")
    error = scores.get(f"{name}_stderr{comma}{filter_name}")
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
