"""The `midus eval` command."""

import contextlib
import dataclasses
import sys
from functools import partial
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import (
    Device,
    Json,
    TaskData,
    TaskLimit,
    flag,
    model_argument,
    needing_harness,
    option,
    refuse_other_command,
    sharing_options,
    show,
)

app = command_line()


@dataclasses.dataclass(kw_only=True)
class _Keys:
    """The keys of `EvaluationSettings` as options."""

    text: Annotated[str | None, option("File or folder to measure perplexity on.", "PATH")] = None
    tasks: Annotated[str | None, option("Tasks of lm-eval, separated by commas.", "NAMES")] = None
    data: TaskData = None
    limit: TaskLimit = None
    include_path: Annotated[str | None, option("Folder with more task files.", "DIR")] = None
    num_fewshot: Annotated[int | None, option("Worked examples before a question.", "N")] = None
    column: Annotated[str | None, option("Column that holds the text.  [default: text]", "NAME")] = None
    path_column: Annotated[str | None, option("Column with the path to fetch blocks by.", "NAME")] = None
    sequence_length: Annotated[int | None, option("Tokens per window of the text.  [default: 1024]", "N")] = None
    max_tokens: Annotated[int | None, option("Tokens of the text to predict.  [default: all]", "N")] = None
    retriever: Annotated[str | None, option("Tree of topics by which models fetch blocks.", "TREE")] = None
    batch_size: Annotated[int | None, option("Windows or requests per forward pass.  [default: 4]", "N")] = None
    dtype: Annotated[str | None, option("auto, float32, bfloat16 or float16.  [default: auto]", "NAME")] = None
    device: Device = None
    trust_remote_code: Annotated[
        bool | None, flag("--trust-remote-code", "Run code that comes with a checkpoint.")
    ] = None


@app.command()
@sharing_options
def midus_eval(
    models: Annotated[
        list[str] | None, model_argument("Folders or Hub ids, compared side by side.", "MODEL...")
    ] = None,
    *,
    keys: _Keys,
    config: Annotated[str | None, option("YAML file of keys; options win.", "FILE")] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", envvar="MIDUS_EVAL_VERBOSE", show_envvar=False, help="Show what libraries print as well."
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """Measure the perplexity of models on a text, and their accuracy on tasks of lm-evaluation-harness.

    With --data, the tasks atomic_numbers, boolq, commonsenseqa, facts, logiqa, mmlu,
    openbookqa and piqa take their questions from that folder. Others are lm-eval's own.
    """
    if not models:
        raise ValueError("no model is given; expected one or more folders or hub ids.")
    from midus_hf.evaluation.settings import EvaluationSettings, read_settings

    if config is not None:
        refuse_other_command(EvaluationSettings, config)
    passed = vars(keys)
    if keys.tasks is not None:
        passed["tasks"] = [name.strip() for name in keys.tasks.split(",") if name.strip()]
    settings = read_settings(config, passed)
    if settings.text is not None:
        from midus_hf.topics.documents import describe_files

        if (line := describe_files(settings.text)) is not None:
            print(line, file=sys.stderr)
    from midus_hf.evaluation.quiet import quiet_libraries

    # What libraries print goes to standard error, so that standard output holds the result alone.
    with needing_harness(), contextlib.redirect_stdout(sys.stderr) if verbose else quiet_libraries():
        from midus_hf.evaluation.evaluate import evaluate

        report = evaluate(models, settings, quiet=not (verbose or sys.stderr.isatty()))
    show(report, json_, _print_table, indent=2)


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console

    from midus_hf.evaluation.report import comparison_table

    Console().print(comparison_table(report))


main = partial(run_command, app, name="midus eval")
