"""`midus look`: what the memories of a model read, do and hold, and what has changed."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.look import depth, effects, heads, page, usage, values  # noqa: F401  # these register the questions
from midus_hf.cli.look.request import QUESTIONS, Request
from midus_hf.cli.reading import Json, check_file, check_matplotlib, sharing_options, show_tables, working

app = command_line()


@QUESTIONS.command(app, "Look into a model: what its memories read, do and hold, and what has changed.")
@sharing_options
def look(
    context: typer.Context,
    question: QUESTIONS.argument(),  # type: ignore[valid-type]
    *,
    request: Request,
    output: Annotated[
        list[Path] | None,
        typer.Option(help="Write .html, .png, .pdf, .csv or .json.", metavar="FILE"),
    ] = None,
    json_: Json = False,
) -> None:
    """Answer a question about a model: print tables or JSON, and write the files of --output."""
    files = output or []
    with working():
        QUESTIONS.check_options(context, question, Request, always=("models",))
        _check_files(question, files)
        from midus_hf.evaluation.settings import check_dtype

        check_dtype(request.dtype)
        request.check_counts()
        answer = QUESTIONS.by_name[question].work(request)
    if json_:
        print(json.dumps(answer.report, indent=2, allow_nan=False))
    else:
        show_tables(answer.tables if answer.terminal_tables is None else answer.terminal_tables)
        print(answer.summary)
    for path in files:  # last, so that the answer is printed even if a file cannot be written
        answer.write(path)


def _check_files(question: str, files: list[Path]) -> None:
    """Check that files can be written, before the model is loaded.

    Raises:
        ValueError: If a file has another ending, its folder does not exist, or matplotlib is missing for pictures.
    """
    from midus_hf.analysis.answer import DRAWN_SUFFIXES, FILE_SUFFIXES

    if question == "page" and not files:
        raise ValueError("--output is missing; page needs it, such as --output page.html.")
    for path in files:
        check_file("output", path, *FILE_SUFFIXES)
        if path.suffix in DRAWN_SUFFIXES:
            check_matplotlib("output has pictures, which need")


main = partial(run_command, app, name="midus look")
