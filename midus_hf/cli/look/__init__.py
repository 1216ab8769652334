"""`midus look`: what the memories of a model read and do, and what has changed."""

import contextlib
import importlib
import sys
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

from midus_hf.cli.command_line import FAILED, Ending, command_line, run_command
from midus_hf.cli.look.request import Request
from midus_hf.cli.options import Column, Device, Json, check_file, cli_option, flag, model_argument, show, show_tables

app = command_line("Look into a model: what its memories read and do, and what has changed.")

Options = dict[str, tuple[Any, ...]]  # each with its type and its default, if it has one

_EVERY: Options = {
    "dtype": (Annotated[str, cli_option("auto, float32, bfloat16 or float16.", "NAME")], "auto"),
    "device": (Device, None),
    "output": (Annotated[list[Path] | None, cli_option("Write .html, .png, .pdf, .csv or .json.", "FILE")], None),
    "json_": (Json, False),
}
_DOCUMENTS: Options = {
    "model": (Annotated[str, model_argument("A model that upscale made.", "MODEL")],),
    "text": (Annotated[list[str], cli_option("File, folder or dataset id; may be repeated.", "[NAME=]PATH")],),
    "column": (Column, "text"),
}
_TEXTS: Options = {
    **_DOCUMENTS,
    "sequence_length": (
        Annotated[int | None, cli_option("Tokens per row of a text.  [default: 1024]", "N", min=1)],
        None,
    ),
    "max_tokens": (
        Annotated[int | None, cli_option("Tokens of each text to read.  [default: all]", "N", min=1)],
        None,
    ),
    "batch_size": (Annotated[int, cli_option("Rows per forward pass.", "N", min=1)], 4),
    "retriever": (Annotated[str | None, cli_option("Tree of topics by which texts fetch blocks.", "TREE")], None),
}
_BASE: Options = {
    "base": (Annotated[str, cli_option("Base to compare with; self: MODEL without added parts.", "MODEL")], "self")
}
_HEAD: Options = {
    "layer": (Annotated[int | None, cli_option("Draw what a head of this layer reads.", "N")], None),
    "head": (Annotated[int | None, cli_option("Draw what this head of --layer reads.", "N")], None),
}
_ANSWERS: Options = {
    "models": (Annotated[list[str], model_argument("Models, compared side by side.", "MODEL...")],),
    "tasks": (Annotated[str, cli_option("Tasks of lm-eval, separated by commas.", "NAMES")],),
    "data": (Annotated[str | None, cli_option("Folder with the questions of local tasks.", "DIR")], None),
    "limit": (Annotated[int | None, cli_option("Questions per task.  [default: all]", "N", min=1)], None),
}
_ENTRIES: Options = {
    "model": (Annotated[str, model_argument("A model with packs.", "MODEL")],),
    "limit": (
        Annotated[int | None, cli_option("Entries to check, the first ones.  [default: all]", "N", min=1)],
        None,
    ),
    "at_least": (
        Annotated[float | None, cli_option("End with status 1 if fewer values come back.", "SHARE", min=0, max=1)],
        None,
    ),
    "batch_size": (Annotated[int, cli_option("Values per forward pass.", "N", min=1)], 4),
}
_PROOF: Options = {
    **_DOCUMENTS,
    "prove": (
        Annotated[bool, flag("--prove", "Also compute untouched documents with and without the memory.")],
        False,
    ),
}
# Each is answered by the function of its name in `questions.py`.
_QUESTIONS: dict[str, tuple[str, Options]] = {
    "usage": ("Show slots, chapters and blocks that texts use, and how evenly.", _TEXTS),
    "ablation": ("Show the loss of texts without each part.", _TEXTS),
    "drift": ("Show how far predictions moved from the base's.", {**_TEXTS, **_BASE}),
    "heads": ("Show how much each head matters for answers of tasks.", _ANSWERS),
    "depth": ("Show what heads read of earlier layers (moda).", {**_TEXTS, **_HEAD}),
    "touched": (
        "Show where texts read a memory of known n-grams (engram).",
        _PROOF,
    ),
    "glossary": ("Show whether the texts of a glossary come back, and which names are found (packs).", _ENTRIES),
    "page": ("Write usage, depth, ablation and drift on one page, into --output.", {**_TEXTS, **_BASE}),
}


def _add_command(question: str, help: str, options: Options) -> None:
    def ask(**values: Any) -> None:
        _answer(question, **values)

    typed = {**options, **_EVERY}
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, **({"default": default[0]} if default else {}))
        for name, (kind, *default) in typed.items()
    ]
    ask.__dict__["__signature__"] = Signature(parameters)  # which typer reads
    ask.__annotations__ = {name: kind for name, (kind, *_) in typed.items()}
    app.command(question, help=help)(ask)


def _answer(question: str, *, output: list[Path] | None, json_: bool, **options: Any) -> None:
    """Answer a question: print tables or JSON, and write the files of --output."""
    from midus_hf.look.page import DRAWN_SUFFIXES, FILE_SUFFIXES

    files = output or []
    with contextlib.redirect_stdout(sys.stderr):
        if question == "page" and not files:
            raise ValueError("--output is missing; page needs it, such as --output page.html.")
        for path in files:  # before the model is loaded
            check_file("output", path, FILE_SUFFIXES, DRAWN_SUFFIXES)
        request = Request(**options)
        request.check()
        questions = importlib.import_module("midus_hf.cli.look.questions")  # which imports torch
        answer = getattr(questions, question)(request)
    show(answer.report, json_, lambda report: show_tables(answer.tables), indent=2)
    if not json_:
        print("\n".join(filter(None, [answer.summary, answer.finding])))
    for path in files:  # last, so that the answer is printed even if a file cannot be written
        answer.write(path)
    if answer.failure:
        raise Ending(FAILED, answer.failure)


for _question, (_help, _options) in _QUESTIONS.items():
    _add_command(_question, _help, _options)

main = partial(run_command, app, name="midus look")
