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
from midus_hf.cli.options import Column, Device, Json, check_file, flag, model_argument, option, show, show_tables

app = command_line("Look into a model: what its memories read and do, and what has changed.")

Model = Annotated[str, model_argument("A model that upscale made.", "MODEL")]
Text = Annotated[list[str], option("File, folder or dataset id; may be repeated.", "[NAME=]PATH")]
Length = Annotated[int | None, option("Tokens per row of a text.  [default: 1024]", "N")]
MaxTokens = Annotated[int | None, option("Tokens of each text to read.  [default: all]", "N")]
BatchSize = Annotated[int, option("Rows per forward pass.", "N")]
Retriever = Annotated[str | None, option("Tree of topics by which texts fetch blocks.", "TREE")]
Dtype = Annotated[str, option("auto, float32, bfloat16 or float16.", "NAME")]
Output = Annotated[list[Path] | None, option("Write .html, .png, .pdf, .csv or .json.", "FILE")]


def of_texts(
    context: typer.Context,
    model: Model,
    text: Text,
    column: Column = "text",
    sequence_length: Length = None,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 4,
    retriever: Retriever = None,
    dtype: Dtype = "auto",
    device: Device = None,
    output: Output = None,
    json_: Json = False,
) -> None:
    """Answer a question about a model and texts."""
    _answer(TextRequest, **locals())


def of_base(
    context: typer.Context,
    model: Model,
    text: Text,
    base: Annotated[str, option("Base to compare with; self: MODEL without added parts.", "MODEL")] = "self",
    column: Column = "text",
    sequence_length: Length = None,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 4,
    retriever: Retriever = None,
    dtype: Dtype = "auto",
    device: Device = None,
    output: Output = None,
    json_: Json = False,
) -> None:
    """Answer a question about a model, its base and texts."""
    _answer(DriftRequest, **locals())


app.command("usage", help="Show slots, chapters and blocks that texts use, and how evenly.")(of_texts)
app.command("ablation", help="Show the loss of texts without each part.")(of_texts)
app.command("drift", help="Show how far predictions moved from the base's.")(of_base)


@app.command()
def heads(
    context: typer.Context,
    models: Annotated[list[str], model_argument("Models, compared side by side.", "MODEL...")],
    tasks: Annotated[str, option("Tasks of lm-eval, separated by commas.", "NAMES")],
    data: Annotated[str | None, option("Folder with the questions of local tasks.", "DIR")] = None,
    limit: Annotated[int | None, option("Questions per task.  [default: all]", "N", min=1)] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    output: Output = None,
    json_: Json = False,
) -> None:
    """Show how much each head matters for answers of tasks."""
    _answer(HeadsRequest, **locals())


@app.command()
def depth(
    context: typer.Context,
    model: Model,
    text: Text,
    layer: Annotated[int | None, option("Draw what a head of this layer reads.", "N")] = None,
    head: Annotated[int | None, option("Draw what this head of --layer reads.", "N")] = None,
    column: Column = "text",
    sequence_length: Length = None,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 4,
    retriever: Retriever = None,
    dtype: Dtype = "auto",
    device: Device = None,
    output: Output = None,
    json_: Json = False,
) -> None:
    """Show what heads read of earlier layers (moda)."""
    _answer(DepthRequest, **locals())


@app.command()
def touched(
    context: typer.Context,
    model: Model,
    text: Text,
    prove: Annotated[bool, flag("--prove", "Also compute untouched documents with and without the memory.")] = False,
    column: Column = "text",
    dtype: Dtype = "auto",
    device: Device = None,
    output: Output = None,
    json_: Json = False,
) -> None:
    """Show where texts read a memory of known n-grams (engram)."""
    _answer(TouchedRequest, **locals())


app.command("page", help="Write usage, depth, ablation and drift on one page, into --output.")(of_base)


def _answer(
    request_class: type[ModelRequest],
    *,
    context: typer.Context,
    output: list[Path] | None,
    json_: bool,
    **options: Any,
) -> None:
    """Answer the question that the command is named after: print tables or JSON, and write the files of --output."""
    from midus_hf.look.page import DRAWN_SUFFIXES, FILE_SUFFIXES

    question, files = str(context.command.name), output or []
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


main = partial(run_command, app, name="midus look")
