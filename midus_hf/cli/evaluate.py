"""The `midus eval` command."""

import contextlib
import json
import sys
from functools import partial
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import INTERRUPTED, WRONG_REQUEST, Ending, command_line, run_command
from midus_hf.cli.reading import Device, Json, TaskData, TaskFiles, TaskLimit, model_argument

app = command_line()


@app.command()
def midus_eval(
    models: Annotated[
        list[str] | None, model_argument("Folders or hub ids, compared side by side.", "MODEL...")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Measure perplexity on this file or folder.  [default: none]", metavar="PATH")
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Where rows of JSON and Parquet hold the text.  [default: text]", metavar="NAME"),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of plain text and JSON lines.  [default: utf-8]", metavar="NAME")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Of lm-eval, separated by commas.  [default: none]", metavar="NAMES")
    ] = None,
    data: TaskData = None,
    include_path: TaskFiles = None,
    documents: Annotated[
        str | None,
        typer.Option(
            help="Ask each question of a task behind the document of this file or folder that is nearest to it.  [default: none]",
            metavar="PATH",
        ),
    ] = None,
    passage_tokens: Annotated[
        int | None,
        typer.Option(
            help="Cut documents into passages of at most so many tokens.  [default: they stay whole]", metavar="N"
        ),
    ] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="Of sentence-transformers, by which documents are near.  [default: that of the retriever]",
            metavar="NAME",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="YAML file with these options; the command line wins.  [default: none]", metavar="FILE"),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(help="Worked examples before a question.  [default: the task's, else 0]", metavar="N"),
    ] = None,
    limit: TaskLimit = None,
    answers: Annotated[
        str | None,
        typer.Option(
            help="Write a line of JSON for each question and model to this file.  [default: none]", metavar="FILE"
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window of the text.  [default: 1024, or what the model was made for]", metavar="N"
        ),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens predicted per window.  [default: sequence-length]", metavar="N")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the text to predict.  [default: all]", metavar="N")
    ] = None,
    apart: Annotated[
        bool | None, typer.Option("--apart", help="End windows of the text where a document ends.  [default: no]")
    ] = None,
    retriever: Annotated[
        str | None,
        typer.Option(
            help="Tree of topics by which models that fetch blocks do so; implies --apart.  [default: none]",
            metavar="TREE",
        ),
    ] = None,
    path_column: Annotated[
        str | None,
        typer.Option(
            help="Where rows of the text hold the paths by which models that fetch blocks do so; implies --apart.  [default: none]",
            metavar="NAME",
        ),
    ] = None,
    blocked: Annotated[
        list[str] | None,
        typer.Option(
            "--blocked",
            help="Never fetch this node, LEVEL:NODE, nor any below; repeat at will.  [default: none]",
            metavar="NODE",
        ),
    ] = None,
    block_best: Annotated[
        str | None,
        typer.Option(
            help="Block so many nodes of a level for each text, those it would fetch first.  [default: none]",
            metavar="LEVEL:COUNT",
        ),
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
    seed: Annotated[
        int | None, typer.Option(help="Of the choice of worked examples.  [default: 0]", metavar="N")
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", envvar="MIDUS_EVAL_VERBOSE", help="Show the warnings, logs and bars of libraries as well."
        ),
    ] = False,
    json_: Json = False,
    write_tasks: Annotated[
        str | None,
        typer.Option(help="Only write the local tasks to this folder, for lm_eval --include_path.", metavar="DIR"),
    ] = None,
) -> None:
    """Measure the perplexity of models on a text, and their accuracy on tasks of lm-evaluation-harness.

    With --data, the tasks atomic_numbers, boolq, commonsenseqa, facts, logiqa, mmlu, openbookqa and piqa take their
    questions from that folder and nothing is fetched. Other tasks are lm-eval's own, whose questions come from the hub.
    """
    if write_tasks is not None:
        _write_tasks(write_tasks, data)
        return
    if not models:
        raise ValueError("no model is given; expected one or more folders or hub ids.")
    from midus_hf.evaluation.settings import read_settings

    settings = read_settings(
        config,
        {
            "text": text,
            "column": column,
            "encoding": encoding,
            "sequence_length": sequence_length,
            "stride": stride,
            "max_tokens": max_tokens,
            "apart": apart,
            "retriever": retriever,
            "path_column": path_column,
            "blocked": blocked or None,
            "block_best": block_best,
            "tasks": None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()],
            "data": data,
            "documents": documents,
            "passage_tokens": passage_tokens,
            "embedding_model": embedding_model,
            "include_path": include_path,
            "answers": answers,
            "num_fewshot": num_fewshot,
            "limit": limit,
            "batch_size": batch_size,
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "seed": seed,
        },
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
    """Libraries that print must not come between the caller and the result."""
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
