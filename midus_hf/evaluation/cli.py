"""The `midus-eval` command."""

import contextlib
import json
import sys
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def midus_eval(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Folders or hub ids, compared side by side.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Measure perplexity on this file or folder.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, separated by commas.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder with the questions of the local tasks.")] = None,
    include_path: Annotated[str | None, typer.Option(help="Folder with more task files.")] = None,
    config: Annotated[str | None, typer.Option(help="Settings from a YAML file; options override it.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Worked examples before a question.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions a task.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a window of the text.")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens predicted a window.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of the text to predict.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows or requests a forward pass.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the choice of worked examples.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
    write_tasks: Annotated[
        str | None, typer.Option(help="Only write the local tasks to this folder, for lm_eval --include_path.")
    ] = None,
) -> None:
    """Measure the perplexity of models on a text, and their accuracy on tasks of lm-evaluation-harness.

    With --data, the tasks boolq, commonsenseqa, logiqa, mmlu, openbookqa and piqa take their questions from that
    folder and nothing is fetched. Other tasks are lm-eval's own, whose questions come from the hub.
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
            "sequence_length": sequence_length,
            "stride": stride,
            "max_tokens": max_tokens,
            "tasks": None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()],
            "data": data,
            "include_path": include_path,
            "num_fewshot": num_fewshot,
            "limit": limit,
            "batch_size": batch_size,
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "seed": seed,
        },
    )
    # Libraries that print must not come between the caller and the result.
    with contextlib.redirect_stdout(sys.stderr):
        from midus_hf.evaluation.evaluate import evaluate

        report = evaluate(models, settings)
    if json_output:
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


def main(arguments: list[str] | None = None) -> None:
    """Run the command. Exit status: 0 done, 2 the request is wrong, 1 the work failed; one line says what is wrong."""
    try:
        app(arguments, standalone_mode=False, prog_name="midus-eval")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "datasets"):
            raise
        _fail(f"tasks need lm-evaluation-harness ({error.name} is missing): pip install 'midus-hf[eval]'", 2)
    except ValueError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if hasattr(error, "format_message"):  # what the option parser says of a wrong command line
            _fail(error.format_message(), 2)
        _fail(f"{type(error).__name__}: {error}", 1)


def _fail(message: str, status: int) -> None:
    print(f"midus-eval: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
