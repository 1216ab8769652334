"""`midus look`: what the memories of a model read and do, and what has changed."""

import contextlib
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.look.request import QUESTIONS, Request
from midus_hf.cli.options import Json, check_file, option, sharing_options, show, show_tables

app = command_line()


@QUESTIONS.command(app, "Look into a model: what its memories read and do, and what has changed.")
@sharing_options
def look(
    context: typer.Context,
    question: QUESTIONS.argument(),  # type: ignore[valid-type]
    *,
    request: Request,
    output: Annotated[list[Path] | None, option("Write .html, .png, .pdf, .csv or .json.", "FILE")] = None,
    json_: Json = False,
) -> None:
    """Answer a question about a model: print tables or JSON, and write the files of --output."""
    files = output or []
    with contextlib.redirect_stdout(sys.stderr):
        QUESTIONS.check_options(context, question, Request, always=("models",))
        _check_files(question, files)
        request.check()
        questions = importlib.import_module("midus_hf.cli.look.questions")  # which imports torch
        answer = getattr(questions, question)(request)
    show(answer.report, json_, lambda report: show_tables(answer.tables), indent=2)
    if not json_:
        print(answer.summary)
    for path in files:  # last, so that the answer is printed even if a file cannot be written
        answer.write(path)


def _check_files(question: str, files: list[Path]) -> None:
    """Check that files can be written, before the model is loaded.

    Raises:
        ValueError: If a file has another ending, its folder does not exist, or matplotlib is missing for pictures.
    """
    from midus_hf.look.page import DRAWN_SUFFIXES, FILE_SUFFIXES

    if question == "page" and not files:
        raise ValueError("--output is missing; page needs it, such as --output page.html.")
    for path in files:
        check_file("output", path, FILE_SUFFIXES, DRAWN_SUFFIXES)


main = partial(run_command, app, name="midus look")
