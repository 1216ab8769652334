"""`midus look`: what the memories of a model read and do."""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from midus_hf.cli.command_line import FAILED, CommandExit, command_line, run_command
from midus_hf.cli.look import questions
from midus_hf.cli.look.request import Model, Texts, names_of_tasks, read_documents
from midus_hf.cli.options import Column, Device, Json, check_file, cli_option, flag, model_argument, show, show_tables
from midus_hf.config.errors import RequestError
from midus_hf.look.page import DRAWN_SUFFIXES, FILE_SUFFIXES, Answer
from midus_hf.sources.names import check_sources

app = command_line("Look inside a model: what its memories read and do.")


def _writable(files: list[Path] | None) -> list[Path] | None:
    for path in files or ():
        check_file("output", path, FILE_SUFFIXES, DRAWN_SUFFIXES)
    return files


Made = Annotated[str, model_argument("A model that upscale made.", "MODEL")]
Text = Annotated[list[str], cli_option("File, folder or dataset id; may be repeated.", "[NAME=]PATH")]
Length = Annotated[int | None, cli_option("Tokens per row of a text.  [default: 1024]", "N", min=1)]
Most = Annotated[int | None, cli_option("Tokens of each text to read.  [default: all]", "N", min=1)]
Rows = Annotated[int, cli_option("Rows per forward pass.", "N", min=1)]
Retriever = Annotated[str | None, cli_option("Tree of topics by which texts fetch blocks.", "TREE")]
Dtype = Annotated[str, cli_option("auto, float32, bfloat16 or float16.", "NAME")]
Output = Annotated[
    list[Path] | None, cli_option("Write .html, .png, .pdf, .csv or .json.", "FILE", callback=_writable)
]


def _answer(ask: Callable[[], Answer], output: list[Path] | None, json_: bool) -> None:
    """Print an answer as tables or JSON, and write the files of --output."""
    with contextlib.redirect_stdout(sys.stderr):
        answer = ask()
    show(answer.report, json_, lambda report: show_tables(answer.tables), indent=2)
    if not json_:
        print("\n".join(filter(None, [answer.summary, answer.finding])))
    for path in output or ():  # last, so that the answer is printed even if a file cannot be written
        answer.write(path)
    if answer.failure:
        raise CommandExit(FAILED, answer.failure)


@app.command()
def usage(
    model: Made, text: Text, column: Column = "text", sequence_length: Length = None, max_tokens: Most = None,
    batch_size: Rows = 4, retriever: Retriever = None, dtype: Dtype = "auto", device: Device = None, output: Output = None,
    json_: Json = False,
) -> None:  # fmt: skip
    """Show slots, chapters and blocks that texts use, and how evenly."""
    texts = Texts(Model(model, dtype, device), text, column, sequence_length, max_tokens, batch_size, retriever)
    _answer(lambda: questions.usage(texts), output, json_)


@app.command()
def ablation(
    model: Made, text: Text, column: Column = "text", sequence_length: Length = None, max_tokens: Most = None,
    batch_size: Rows = 4, retriever: Retriever = None, dtype: Dtype = "auto", device: Device = None, output: Output = None,
    json_: Json = False,
) -> None:  # fmt: skip
    """Show the loss of texts without each part."""
    texts = Texts(Model(model, dtype, device), text, column, sequence_length, max_tokens, batch_size, retriever)
    _answer(lambda: questions.ablation(texts), output, json_)


@app.command()
def heads(
    models: Annotated[list[str], model_argument("Models, compared side by side.", "MODEL...")],
    tasks: Annotated[str, cli_option("Tasks of lm-eval, separated by commas.", "NAMES")],
    data: Annotated[str | None, cli_option("Folder with the questions of local tasks.", "DIR")] = None,
    limit: Annotated[int | None, cli_option("Questions per task.  [default: all]", "N", min=1)] = None,
    dtype: Dtype = "auto", device: Device = None, output: Output = None, json_: Json = False,
) -> None:  # fmt: skip
    """Show how important each head is for answers of tasks."""
    asked = [Model(model, dtype, device) for model in models]
    check_sources([] if data is None else [("data", data)])
    names = names_of_tasks(tasks)
    _answer(lambda: questions.heads(asked, names, data, limit), output, json_)


@app.command()
def depth(
    model: Made, text: Text, column: Column = "text", sequence_length: Length = None, max_tokens: Most = None,
    batch_size: Rows = 4, retriever: Retriever = None,
    layer: Annotated[int | None, cli_option("Draw what a head of this layer reads.", "N")] = None,
    head: Annotated[int | None, cli_option("Draw what this head of --layer reads.", "N")] = None,
    dtype: Dtype = "auto", device: Device = None, output: Output = None, json_: Json = False,
) -> None:  # fmt: skip
    """Show what heads read of earlier layers (moda)."""
    if (layer is None) != (head is None):
        raise RequestError("layer and head together name one head; expected both or neither. Give the other as well.")
    texts = Texts(Model(model, dtype, device), text, column, sequence_length, max_tokens, batch_size, retriever)
    _answer(lambda: questions.depth(texts, layer, head), output, json_)


@app.command()
def touched(
    model: Made, text: Text, column: Column = "text",
    prove: Annotated[bool, flag("--prove", "Also compute untouched documents with and without the memory.")] = False,
    dtype: Dtype = "auto", device: Device = None, output: Output = None, json_: Json = False,
) -> None:  # fmt: skip
    """Show where texts read a memory of known n-grams (engram)."""
    asked, documents = Model(model, dtype, device), read_documents(text, column)
    _answer(lambda: questions.touched(asked, documents, prove), output, json_)


@app.command()
def glossary(
    model: Annotated[str, model_argument("A model with packs.", "MODEL")],
    questions_file: Annotated[
        str | None, cli_option("Ask these instead: rows with question and answer.", "FILE", "--questions")
    ] = None,
    limit: Annotated[int | None, cli_option("Entries or questions, the first ones.  [default: all]", "N", min=1)] = None,
    at_least: Annotated[
        float | None, cli_option("End with status 1 if fewer values or answers are right.", "SHARE", min=0, max=1)
    ] = None,
    batch_size: Annotated[int, cli_option("Values per forward pass.", "N", min=1)] = 4,
    dtype: Dtype = "auto", device: Device = None, output: Output = None, json_: Json = False,
) -> None:  # fmt: skip
    """Check names of a glossary, and what the model continues (packs). With --questions: what it answers."""
    asked = Model(model, dtype, device)
    if questions_file is None:
        _answer(lambda: questions.glossary(asked, limit, at_least, batch_size), output, json_)
    else:
        _answer(lambda: questions.answers_about(asked, questions_file, limit, at_least), output, json_)


@app.command()
def page(
    model: Made, text: Text, column: Column = "text", sequence_length: Length = None, max_tokens: Most = None,
    batch_size: Rows = 4, retriever: Retriever = None, dtype: Dtype = "auto", device: Device = None, output: Output = None,
    json_: Json = False,
) -> None:  # fmt: skip
    """Write usage, depth and ablation on one page, into --output."""
    if not output:
        raise RequestError("--output is missing; page needs it, such as --output page.html.")
    texts = Texts(Model(model, dtype, device), text, column, sequence_length, max_tokens, batch_size, retriever)
    _answer(lambda: questions.page(texts), output, json_)


main = partial(run_command, app, name="midus look")
