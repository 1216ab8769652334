"""`midus look`: what the memories of a model read and do."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from midus_hf.cli.command_line import (
    FAILED,
    Column,
    CommandExit,
    Device,
    Json,
    check_file,
    cli_option,
    command_line,
    flag,
    model_argument,
    needing_harness,
    run_command,
    show,
    show_tables,
)
from midus_hf.config.errors import RequestError, as_request_error, format_count
from midus_hf.look.page import DRAWN_SUFFIXES, FILE_SUFFIXES, Answer
from midus_hf.sources.downloads import fetching
from midus_hf.sources.names import check_dtype, check_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.evaluation.text_rows import TextRows

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
    _answer(lambda: answer_usage(texts), output, json_)


@app.command()
def ablation(
    model: Made, text: Text, column: Column = "text", sequence_length: Length = None, max_tokens: Most = None,
    batch_size: Rows = 4, retriever: Retriever = None, dtype: Dtype = "auto", device: Device = None, output: Output = None,
    json_: Json = False,
) -> None:  # fmt: skip
    """Show the loss of texts without each part."""
    texts = Texts(Model(model, dtype, device), text, column, sequence_length, max_tokens, batch_size, retriever)
    _answer(lambda: answer_ablation(texts), output, json_)


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
    names = _split_names(tasks)
    _answer(lambda: answer_heads(asked, names, data, limit), output, json_)


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
    _answer(lambda: answer_depth(texts, layer, head), output, json_)


@app.command()
def touched(
    model: Made, text: Text, column: Column = "text",
    prove: Annotated[bool, flag("--prove", "Also compute untouched documents with and without the memory.")] = False,
    dtype: Dtype = "auto", device: Device = None, output: Output = None, json_: Json = False,
) -> None:  # fmt: skip
    """Show where texts read n-grams (engram) or names (packs)."""
    asked = Model(model, dtype, device)
    documents = _read_documents(text, column)
    _answer(lambda: answer_touched(asked, documents, prove), output, json_)


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
    batch_size: Annotated[
        int | None, cli_option("Values per forward pass.  [default: 4]", "N", min=1)
    ] = None,
    dtype: Dtype = "auto", device: Device = None, output: Output = None, json_: Json = False,
) -> None:  # fmt: skip
    """Check names of a glossary, and what the model continues (packs). With --questions: what it answers."""
    asked = Model(model, dtype, device)
    if questions_file is None:
        _answer(lambda: answer_glossary(asked, limit, at_least, batch_size or 4), output, json_)
    else:
        if batch_size is not None:
            raise RequestError(
                f"batch-size is {batch_size} and questions are given, which are asked one by one; expected one of them. Leave "
                "--batch-size out."
            )
        _answer(lambda: answer_questions(asked, questions_file, limit, at_least), output, json_)


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
    _answer(lambda: answer_page(texts), output, json_)


@dataclasses.dataclass
class Model:
    """A model by its name, loaded on first use. An unknown dtype is refused before torch is imported."""

    name: str
    dtype: str
    device: str | None

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def load(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        from midus_hf.models.saved_models import load_for_reading

        return load_for_reading(str(Path(self.name).expanduser()), self.dtype, self.device)

    @cached_property
    def loaded(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        return self.load()

    @cached_property
    def folder(self) -> Path:
        from huggingface_hub import snapshot_download

        path = Path(self.name).expanduser()
        if path.is_dir():
            return path
        with fetching(self.name):
            return Path(snapshot_download(self.name))


@dataclasses.dataclass
class Texts:
    """A model and the texts that it reads; the documents are read at once, before torch is imported."""

    model: Model
    text: list[str]
    column: str
    sequence_length: int | None
    max_tokens: int | None
    batch_size: int
    retriever: str | None

    def __post_init__(self) -> None:
        check_sources([] if self.retriever is None else [("retriever", self.retriever)])
        self.documents = _read_documents(self.text, self.column)

    @cached_property
    def rows(self) -> "list[TextRows]":
        """The texts as rows of tokens, each with the path of its blocks if there is a retriever."""
        from midus_hf.evaluation.fetching import fetches_blocks, open_retriever
        from midus_hf.evaluation.text_rows import text_rows

        model, tokenizer = self.model.loaded
        read = partial(text_rows, sequence_length=self.sequence_length, max_tokens=self.max_tokens)
        texts = [read(name, documents, tokenizer, model.config) for name, documents in self.documents.items()]
        retriever = open_retriever(model, self.retriever)
        if retriever is not None:
            paths = {name: retriever.paths(documents).cpu() for name, documents in self.documents.items()}
            return [dataclasses.replace(text, paths=paths[text.name]) for text in texts]
        if fetches_blocks(model):
            print(
                "texts fetch nothing from the model's bank; give --retriever with its tree of topics", file=sys.stderr
            )
        return texts


def _read_documents(text: list[str], column: str) -> dict[str, list[str]]:
    from midus_hf.data.corpus import read_corpus

    paths: dict[str, str] = {}
    for named in text:
        name, equals, path = named.partition("=")
        if not equals or Path(named).exists():
            name = Path(named).absolute().name
            path = named
        if not (name and path):
            raise RequestError(f"text is {named!r}; expected PATH or NAME=PATH, such as code=code.jsonl.")
        if name in paths:
            raise RequestError(f"text {name!r} is given twice; expected each name once.")
        paths[name] = path
    return {name: read_corpus(path, key="text", text_column=column)[column][:] for name, path in paths.items()}


def _split_names(tasks: str) -> list[str]:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise RequestError(f"tasks is {tasks!r}; expected names of tasks, separated by commas.")
    return names


def _about(texts: Texts, losses: dict[str, float]) -> tuple[str, dict[str, Any]]:
    read = {
        text.name: {
            "documents": len(set(text.documents)),
            "rows": len(text.rows),
            "tokens": text.num_tokens,
            "loss": losses[text.name],
        }
        for text in texts.rows
    }
    told = ", ".join(f"{name} ({text['tokens']:,} tokens, loss {text['loss']:.4f})" for name, text in read.items())
    return f"{texts.model.name} read {told}.", {"model": texts.model.name, "texts": read}


def answer_usage(texts: Texts) -> Answer:
    """Answer which slots are retrieved, which chapters opened and which blocks fetched, and how evenly."""
    from midus_hf.evaluation.text_rows import row_losses
    from midus_hf.look import usage as used

    model, _ = texts.model.loaded
    losses, counts = {}, {}
    for text in texts.rows:
        with used.record_usage(model) as counts[text.name]:
            losses[text.name] = row_losses(model, text, batch_size=texts.batch_size).mean
    rows = used.usage_rows(counts)
    summary, head = _about(texts, losses)
    return Answer(
        title="What texts use of the memories",
        summary=summary,
        report={**head, "rows": rows},
        finding=used.usage_finding(rows),
        tables=[used.usage_table(rows)],
        one_scale=True,
        panels=used.usage_panels(counts),
        details=lambda: used.every_count(counts),
    )


def answer_ablation(texts: Texts) -> Answer:
    """Answer how each text's loss changes without each added layer, memory and reading of the depth."""
    from midus_hf.look import ablation as parts_lost

    model, _ = texts.model.loaded
    measured = parts_lost.ablate(model, texts.rows, batch_size=texts.batch_size)
    rows = [effect.row() for effect in measured.effects]
    summary, head = _about(texts, measured.losses)
    return Answer(
        title="Loss of texts without parts of the model",
        summary=summary,
        report={**head, "all_of_them_is_the_base": measured.whole_base, "rows": rows},
        finding=parts_lost.ablation_finding(measured),
        tables=[parts_lost.ablation_table(measured)],
        one_scale=True,
        how_to_read=parts_lost.HOW_TO_READ,
        panels=parts_lost.ablation_panels(measured),
        details=lambda: rows,
    )


def answer_touched(asked: Model, documents: dict[str, list[str]], prove: bool) -> Answer:
    """Answer where texts read a memory of known n-grams; elsewhere logits are those without the memory."""
    from transformers import AutoConfig

    from midus_hf.look import touched as where_read
    from midus_hf.memories.engram.known_ngrams import check_certificate, read_certificate
    from midus_hf.sources.characters import texts_digest
    from midus_hf.sources.names import usable_device
    from midus_hf.sources.tokenizers import load_tokenizer

    if prove:
        usable_device(asked.device)
    with as_request_error(f"model is {asked.name!r}, which cannot be loaded", OSError, ValueError):
        config = AutoConfig.from_pretrained(asked.folder, trust_remote_code=False)
        tokenizer = load_tokenizer(str(asked.folder))
    tables = where_read.tables_in(asked.folder, config, tokenizer)
    certificate = read_certificate(asked.folder)
    if certificate is not None:
        check_certificate(certificate, asked.folder, tokenizer)
    read = {
        (name, table.memory): where_read.touched(table, texts, tokenizer)
        for name, texts in documents.items()
        for table in tables
    }
    without = "no certificate, which midus train --protect writes; what is said here was found now"
    summary = f"{asked.name}: {without if certificate is None else 'its certificate fits the folder'}."
    proven = None
    if prove:
        proven = where_read.prove_untouched(*asked.loaded, documents, read)
        summary += f" {proven:,} untouched documents computed: their logits are the same, bit for bit."
    rows = where_read.touched_rows(documents, read, certificate)
    return Answer(
        title="Where texts read a memory",
        summary=summary,
        report={
            "model": asked.name,
            "certificate": certificate,
            "rows": rows,
            "proven": proven,
            "sha256": {name: texts_digest(texts) for name, texts in documents.items()},
        },
        tables=[where_read.touched_table(rows)],
        how_to_read=where_read.HOW_TO_READ,
        details=lambda: where_read.document_rows(read),
    )


def answer_glossary(asked: Model, limit: int | None, at_least: float | None, batch_size: int) -> Answer:
    """Answer whether the model gives numbers and names of entries after their names, and which are found."""
    from midus_hf.look import glossary as entries

    model, _ = asked.loaded
    rows = entries.check_glossary(model, limit, batch_size)
    share = entries.share_of_values(rows)
    failure = ""
    if at_least is not None and share is None:
        failure = "the texts state no number and no capitalised word, so nothing was measured; expected a value for --at-least."
    elif at_least is not None and share is not None and share < at_least:
        failure = f"{share:.1%} of the values come back; expected at least {at_least:.1%} (--at-least)."
    return Answer(
        title="What the model reproduces of a glossary",
        summary=f"{asked.name}: {format_count(len(rows), 'entry')}.",
        report={"model": asked.name, "share": share, "rows": rows},
        finding=entries.glossary_finding(rows),
        tables=[entries.glossary_table(rows)],
        how_to_read=entries.HOW_TO_READ,
        details=lambda: rows,
        failure=failure,
    )


def answer_questions(asked: Model, questions: str, limit: int | None, at_least: float | None) -> Answer:
    """Answer how many glossary questions the model answers rightly, with and without texts in the prompt."""
    from midus_hf.look import glossary as entries

    read = entries.read_questions(questions, limit)
    model, tokenizer = asked.loaded
    rows = entries.check_questions(model, tokenizer, asked.name, read)
    share = sum(row["right"] for row in rows) / len(rows)
    is_short = at_least is not None and share < at_least
    return Answer(
        title="What the model answers about a glossary",
        summary=f"{asked.name}: {len(rows):,} questions.",
        report={"model": asked.name, "questions": questions, "share": share, "rows": rows},
        finding=entries.questions_finding(rows),
        tables=[entries.questions_table(rows)],
        how_to_read=entries.HOW_TO_READ_ANSWERS,
        details=lambda: rows,
        failure=f"{share:.1%} of the answers are right; expected at least {at_least:.1%} (--at-least)."
        if is_short
        else "",
    )


def answer_heads(models: list[Model], tasks: list[str], data: str | None, limit: int | None) -> Answer:
    """Answer how important each attention head is for right answers, and the spread within a layer."""
    from midus_hf.look import heads as important_heads
    from midus_hf.sources.names import short_names
    from midus_hf.sources.progress import show_progress

    names = [model.name for model in models]
    rows = {}
    tables = []
    with needing_harness():
        from midus_hf.evaluation.harness import Tasks
        from midus_hf.sources.progress import quiet_libraries

        with quiet_libraries():
            questions = Tasks(tasks, data=data)
            for model, label in zip(models, short_names(names), strict=True):
                loaded, tokenizer = model.load()
                answers = list(important_heads.task_answers(loaded, tokenizer, questions, limit))
                bar = show_progress(answers, desc=model.name, unit=" answers")
                importance = important_heads.head_importance(loaded, bar)
                rows[label] = important_heads.heads_rows(label, importance)
                title = f"{label}: {importance.answers:,} answers, {importance.loss:.3f} nats each"
                tables.append(important_heads.heads_table(title, rows[label]))
    return Answer(
        title="How important heads are",
        summary=f"{', '.join(rows)} answered {', '.join(tasks)}.",
        report={
            "models": names,
            "tasks": tasks,
            "limit": limit,
            "rows": [row for each in rows.values() for row in each],
        },
        tables=tables,
        panels=important_heads.heads_panels(rows),
    )


def answer_depth(texts: Texts, layer: int | None = None, head: int | None = None) -> Answer:
    """Answer what share of attention goes to the depth, and which earlier layers are read."""
    from midus_hf.evaluation.text_rows import row_losses
    from midus_hf.look import depth as depth_read

    model, _ = texts.model.loaded
    head_map = None
    if layer is not None and head is not None:
        head_map = depth_read.depth_map(model, texts.rows[0].rows[0][:-1], layer, head)
    with depth_read.record_depth(model) as readings:
        losses = {text.name: row_losses(model, text, batch_size=texts.batch_size).mean for text in texts.rows}
    summary, about = _about(texts, losses)
    return Answer(
        title="What heads read of the depth",
        summary=summary,
        report={**about, "rows": depth_read.depth_rows(readings)},
        finding=depth_read.depth_finding(readings),
        tables=[depth_read.depth_table(readings)],
        how_to_read=depth_read.HOW_TO_READ,
        panels=depth_read.depth_panels(readings, head_map),
    )


def answer_page(texts: Texts) -> Answer:
    """Answer every question that needs only texts: usage, ablation and reading of the depth."""
    from midus_hf.look.depth import record_depth
    from midus_hf.look.usage import record_usage

    model, _ = texts.model.loaded
    answers: dict[str, Callable[[Texts], Answer]] = {}
    for name, record, answer in (("usage", record_usage, answer_usage), ("depth", record_depth, answer_depth)):
        try:
            with record(model):
                answers[name] = answer
        except RequestError:
            continue  # the model has nothing of the kind
    answers["ablation"] = answer_ablation
    sections = {name: answer(texts) for name, answer in answers.items()}
    return Answer(
        title="Inside the model",
        summary=f"{texts.model.name}, on {', '.join(texts.documents)}.",
        finding="\n".join(section.finding for section in sections.values()),
        report={name: section.report for name, section in sections.items()},
        tables=[table for section in sections.values() for table in section.tables],
        sections=[dataclasses.replace(section, finding="") for section in sections.values()],
    )


main = partial(run_command, app, name="midus look")
