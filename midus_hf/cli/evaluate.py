"""The `midus eval` command."""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from midus_hf.cli.command_line import (
    Device,
    Json,
    cli_option,
    command_line,
    flag,
    model_argument,
    needing_harness,
    run_command,
    show,
)
from midus_hf.config.yaml_options import from_mapping, read_mapping
from midus_hf.evaluation.evaluate import EvaluationSettings
from midus_hf.sources.names import check_sources, short_names

app = command_line()


@app.command()
def midus_eval(
    context: typer.Context,
    models: Annotated[list[str], model_argument("Folders or Hub ids, compared side by side.", "MODEL...")],
    text: Annotated[str | None, cli_option("File, folder or dataset id to measure perplexity on.", "PATH")] = None,
    column: Annotated[str | None, cli_option("Column that holds the text.  [default: text]", "NAME")] = None,
    sequence_length: Annotated[int | None, cli_option("Tokens per window of the text.  [default: 1024]", "N")] = None,
    max_tokens: Annotated[
        int | None, cli_option("Tokens to predict, spread over the text.  [default: all]", "N")
    ] = None,
    retriever: Annotated[str | None, cli_option("Tree of topics by which models fetch blocks.", "TREE")] = None,
    path_column: Annotated[str | None, cli_option("Column with the path to fetch blocks by.", "NAME")] = None,
    tasks: Annotated[list[str] | None, cli_option("Tasks of lm-eval, separated by commas.", "NAMES")] = None,
    data: Annotated[str | None, cli_option("Folder with the questions of local tasks.", "DIR")] = None,
    include_path: Annotated[str | None, cli_option("Folder with more task files.", "DIR")] = None,
    num_fewshot: Annotated[int | None, cli_option("Examples before a question.  [default: the task's]", "N")] = None,
    limit: Annotated[int | None, cli_option("Questions per task, from the first on.  [default: all]", "N")] = None,
    batch_size: Annotated[int | None, cli_option("Windows or requests per forward pass.  [default: 4]", "N")] = None,
    dtype: Annotated[str | None, cli_option("auto, float32, bfloat16 or float16.  [default: auto]", "NAME")] = None,
    device: Device = None,
    trust_remote_code: Annotated[bool | None, flag("--trust-remote-code", "Run code of a checkpoint.")] = None,
    config: Annotated[Path | None, cli_option("YAML file of these keys; options win.", "FILE")] = None,
    json_: Json = False,
) -> None:
    """Measure perplexity on a text, and accuracy on tasks.

    Tasks are those of lm-evaluation-harness.
    With --data, the tasks atomic_numbers, boolq, commonsenseqa, facts, logiqa, mmlu,
    openbookqa and piqa take their questions from that folder. Others are lm-eval's.
    """
    keys = {field.name for field in dataclasses.fields(EvaluationSettings)}
    given = {key: value for key, value in context.params.items() if key in keys and value not in (None, ())}
    if tasks is not None:
        given["tasks"] = [name.strip() for name in ",".join(tasks).split(",") if name.strip()]
    settings = from_mapping(EvaluationSettings, {**({} if config is None else read_mapping(config)), **given})
    named = {key: getattr(settings, key) for key in ("text", "retriever", "data", "include_path")}
    check_sources((key, name) for key, name in named.items() if name is not None)
    from midus_hf.sources.progress import quiet_libraries

    with needing_harness(), quiet_libraries():
        from midus_hf.evaluation.evaluate import evaluate

        report = evaluate(models, settings)
    for measured in report["models"]:
        if measured["reads_blocks"] is False:
            print(
                f"{measured['model']}: no block of its bank was read, since the topics of the texts are not known; pass --retriever "
                "TREE, or --path-column NAME",
                file=sys.stderr,
            )
    show(report, json_, lambda report: Console().print(comparison_table(report)), indent=2)


def comparison_table(report: dict[str, Any]) -> Table:
    """Return the report of `evaluate` as a table: rows are measures, columns models."""
    models = report["models"]
    notes = []
    table = Table(title="Evaluation")
    table.add_column("measure")
    labels = short_names([model["model"] for model in models])
    for label in labels:
        table.add_column(label, justify="right", overflow="fold")
    table.add_row("parameters", *(f"{model['parameters']:,}" for model in models))
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
        is_whole = report["settings"]["max_tokens"] is None and all(
            one["tokens"] == one["sequence_length"] for one in results
        )
        if len({*lengths}) > 1 and not is_whole:  # a text in one window has as many tokens as its tokenizer makes
            told = ", ".join(f"{label}: {length:,}" for label, length in zip(labels, lengths, strict=True))
            notes.append(
                f"Windows have other numbers of tokens ({told}), so results cannot be compared: pass --sequence-length "
                f"{min(lengths)}."
            )
    for task, scores in models[0]["tasks"].items():
        errors = {_error_of(metric) for metric in scores}
        for metric in scores:
            if metric not in ("num_fewshot", "num_questions", *errors):
                cells = (_score(model["tasks"][task], metric) for model in models)
                table.add_row(f"{task} {metric} ({scores['num_fewshot'] or 0}-shot)", *cells)
    if ahead := ", ".join(label for label, model in zip(labels, models, strict=True) if not model["causal"]):
        read_ahead = "A model that reads tokens before it predicts them has a perplexity that cannot be compared."
        notes.append(f"Not causal: {ahead}. {read_ahead}")
    table.caption = " ".join(notes) or None
    return table


def _error_of(metric: str) -> str:
    name, comma, filter_name = metric.partition(",")
    return f"{name}_stderr{comma}{filter_name}"


def _score(scores: dict[str, Any], metric: str) -> str:
    value, error = scores.get(metric), scores.get(_error_of(metric))
    if not isinstance(value, (int, float)):
        return value or "not finite"
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


main = partial(run_command, app, name="midus eval")
