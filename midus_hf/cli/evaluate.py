"""The `midus eval` command."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import (
    Json,
    model_argument,
    needing_harness,
    option,
    options_of,
    refuse_other_command,
    show,
)
from midus_hf.config.yaml_options import from_mapping, read_mapping
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.model_names import check_column, check_sources

app = command_line()


@app.command()
@options_of(EvaluationSettings)
def midus_eval(
    context: typer.Context,
    models: Annotated[list[str], model_argument("Folders or Hub ids, compared side by side.", "MODEL...")],
    *,
    options: dict[str, Any],
    config: Annotated[Path | None, option("YAML file of these keys; options win.", "FILE")] = None,
    json_: Json = False,
) -> None:
    """Measure the perplexity of models on a text, and their accuracy on tasks of lm-evaluation-harness.

    With --data, the tasks atomic_numbers, boolq, commonsenseqa, facts, logiqa, mmlu,
    openbookqa and piqa take their questions from that folder. Others are lm-eval's own.
    """
    if "tasks" in options:
        names = ",".join(options["tasks"]).split(",")
        options["tasks"] = [name.strip() for name in names if name.strip()]
    keys = {} if config is None else read_mapping(config)
    if config is not None:
        refuse_other_command(EvaluationSettings, config)
    settings = from_mapping(EvaluationSettings, {**keys, **options})
    if settings.text is not None:
        check_sources([("text", settings.text)])
        check_column("text", settings.text, settings.column)
    from midus_hf.evaluation.quiet import quiet_libraries

    with needing_harness(), quiet_libraries():
        from midus_hf.evaluation.evaluate import evaluate

        report = evaluate(models, settings)
    show(report, json_, _print_table, indent=2)


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console

    from midus_hf.evaluation.report import comparison_table

    Console().print(comparison_table(report))


main = partial(run_command, app, name="midus eval")
