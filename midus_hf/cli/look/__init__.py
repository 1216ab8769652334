"""`midus look`: what the memories of a model read and do, and what has changed."""

import contextlib
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.look.request import (
    DepthRequest,
    DriftRequest,
    HeadsRequest,
    ModelRequest,
    TextRequest,
    TouchedRequest,
)
from midus_hf.cli.options import Json, check_file, option, options_of, show, show_tables

app = command_line("Look into a model: what its memories read and do, and what has changed.")

# The questions, each with the options that it takes and its help. The function of the same name in `questions.py` answers each.
QUESTIONS: dict[str, tuple[type[ModelRequest], str]] = {
    "usage": (TextRequest, "Show slots, chapters and blocks that texts use, and how evenly."),
    "ablation": (TextRequest, "Show the loss of texts without each part."),
    "drift": (DriftRequest, "Show how far predictions moved from the base's."),
    "heads": (HeadsRequest, "Show how much each head matters for answers of tasks."),
    "depth": (DepthRequest, "Show what heads read of earlier layers (moda)."),
    "touched": (TouchedRequest, "Show where texts read a memory of known n-grams (engram)."),
    "page": (DriftRequest, "Write usage, depth, ablation and drift on one page, into --output."),
}


def _enter(question: str, request_class: type[ModelRequest], help: str) -> None:
    """Make a command of a question. It prints tables or JSON, and writes the files of --output."""

    @app.command(question, help=help)
    @options_of(request_class)
    def command(
        context: typer.Context,
        *,
        options: dict[str, Any],
        output: Annotated[list[Path] | None, option("Write .html, .png, .pdf, .csv or .json.", "FILE")] = None,
        json_: Json = False,
    ) -> None:
        from midus_hf.look.page import DRAWN_SUFFIXES, FILE_SUFFIXES

        files = output or []
        with contextlib.redirect_stdout(sys.stderr):
            if question == "page" and not files:
                raise ValueError("--output is missing; page needs it, such as --output page.html.")
            for path in files:  # before the model is loaded
                check_file("output", path, FILE_SUFFIXES, DRAWN_SUFFIXES)
            request = request_class(**options)
            request.check()
            questions = importlib.import_module("midus_hf.cli.look.questions")  # which imports torch
            answer = getattr(questions, question)(request)
        show(answer.report, json_, lambda report: show_tables(answer.tables), indent=2)
        if not json_:
            print("\n".join(filter(None, [answer.summary, answer.finding])))
        for path in files:  # last, so that the answer is printed even if a file cannot be written
            answer.write(path)


for _question, (_request_class, _help) in QUESTIONS.items():
    _enter(_question, _request_class, _help)

main = partial(run_command, app, name="midus look")
