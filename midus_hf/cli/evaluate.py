"""The `midus eval` command."""

import contextlib
import json
import sys
from functools import partial
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import INTERRUPTED, WRONG_REQUEST, Ending, command_line, run_command
from midus_hf.cli.reading import Device, Json, TaskData, TaskLimit, model_argument
from midus_hf.cli.recipes import other_command
from midus_hf.config.yaml_options import read_mapping

_REST = """\b
Keys of --set and of the file, besides these options (docs/evaluate.md):
  answers          file of JSON lines to write, one per question and model
  apart            true: windows of the text end where documents end
  column           where rows of JSON and Parquet hold the text
  documents        documents, of which the nearest is put before each question
  embedding_model  model that says which is nearest, if not the retriever's
  encoding         encoding of plain text and JSON lines
  include_path     folder with more task files
  num_fewshot      worked examples before a question
  passage_tokens   longest passage that documents are cut into, in tokens
  path_column      where rows of the text hold the path to fetch blocks by
  seed             seed of the choice of worked examples
  stride           tokens predicted per window
"""
app = command_line()


@app.command(epilog=_REST)
def midus_eval(
    models: Annotated[
        list[str] | None, model_argument("Folders or Hub ids, compared side by side.", "MODEL...")
    ] = None,
    text: Annotated[str | None, typer.Option(help="File or folder to measure perplexity on.", metavar="PATH")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, separated by commas.", metavar="NAMES")] = None,
    data: TaskData = None,
    limit: TaskLimit = None,
    config: Annotated[str | None, typer.Option(help="YAML file of keys; options win.", metavar="FILE")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set a key listed below; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens per window of the text.  [default: 1024]", metavar="N")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the text to predict.  [default: all]", metavar="N")
    ] = None,
    retriever: Annotated[
        str | None, typer.Option(help="Tree of topics by which models fetch blocks.", metavar="TREE")
    ] = None,
    blocked: Annotated[
        list[str] | None,
        typer.Option("--blocked", help="Never fetch this node LEVEL:NODE, nor any below.", metavar="NODE"),
    ] = None,
    block_best: Annotated[
        str | None, typer.Option(help="Block the best COUNT nodes of level L per text.", metavar="L:COUNT")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows or requests per forward pass.  [default: 4]", metavar="N")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16.  [default: auto]", metavar="NAME")
    ] = None,
    device: Device = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", envvar="MIDUS_EVAL_VERBOSE", show_envvar=False, help="Show what libraries print as well."
        ),
    ] = False,
    json_: Json = False,
    write_tasks: Annotated[
        str | None, typer.Option(help="Only write the local tasks to a folder.", metavar="DIR")
    ] = None,
) -> None:
    """Measure the perplexity of models on a text, and their accuracy on tasks of lm-evaluation-harness.

    With --data, the tasks atomic_numbers, boolq, commonsenseqa, facts, logiqa, mmlu,
    openbookqa and piqa take their questions from that folder. Others are lm-eval's own.
    """
    if write_tasks is not None:
        _write_tasks(write_tasks, data)
        return
    if not models:
        raise ValueError("no model is given; expected one or more folders or hub ids.")
    from midus_hf.evaluation.settings import EvaluationSettings, read_settings

    if config is not None:
        other = other_command(EvaluationSettings, config, read_mapping(config))
        if other is not None:
            raise ValueError(other)
    settings = read_settings(
        config,
        {
            "text": text,
            "tasks": None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()],
            "data": data,
            "limit": limit,
            "sequence_length": sequence_length,
            "max_tokens": max_tokens,
            "retriever": retriever,
            "blocked": blocked or None,
            "block_best": block_best,
            "batch_size": batch_size,
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
        },
        set_ or [],
    )
    if settings.text is not None:
        from midus_hf.documents import describe_files

        if (line := describe_files(settings.text)) is not None:
            print(line, file=sys.stderr)
    from midus_hf.evaluation.quiet import quiet_libraries

    ending: Ending | None = None
    with _loud_libraries() if verbose else quiet_libraries():
        from midus_hf.evaluation.evaluate import EvaluationInterrupted, evaluate

        try:
            report = evaluate(models, settings, quiet=not verbose)
        except EvaluationInterrupted as interrupted:
            report, ending = {**interrupted.report, "interrupted": True}, Ending(INTERRUPTED, str(interrupted))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("lm_eval", "datasets"):
                raise
            missing = f"tasks need lm-evaluation-harness ({error.name} is missing): pip install 'midus-hf[eval]'"
            raise Ending(WRONG_REQUEST, missing) from error
    if report["models"]:
        _show(report, json_)
    if ending is not None:
        raise ending


def _loud_libraries() -> contextlib.AbstractContextManager[Any]:
    """Send what libraries print to standard error, so that standard output holds the result alone."""
    return contextlib.redirect_stdout(sys.stderr)


def _show(report: dict[str, Any], json_: bool) -> None:
    if json_:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from midus_hf.evaluation.report import comparison_table

        Console().print(comparison_table(report))


def _write_tasks(folder: str, data: str | None) -> None:
    from midus_hf.evaluation.local_tasks import write_local_tasks

    if data is None:
        raise ValueError("write_tasks needs data, the folder with the questions of the local tasks; give --data.")
    for path in write_local_tasks(folder, data):
        print(path)


main = partial(run_command, app, name="midus eval", interruption="interrupted; nothing was measured")
