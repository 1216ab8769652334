"""What commands that let a model read texts have in common: options, loading, progress, and how tables are shown."""

import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.cli.exit_status import WRONG_REQUEST, Ending
from midus_hf.cli.loaded_model import load_on

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.analysis.table_of_words import TableOfWords
    from midus_hf.analysis.text_rows import TextRows
    from midus_hf.evaluation.fetching import PathFinder

Texts = Annotated[
    list[str],
    typer.Option(help="A file or folder to read, and what to call it. May be given again.", metavar="NAME=PATH"),
]
Column = Annotated[str, typer.Option(help="Where rows of JSON and Parquet hold the text.", metavar="NAME")]
Encoding = Annotated[str, typer.Option(help="Of plain text and JSON lines.", metavar="NAME")]
Limit = Annotated[int | None, typer.Option(help="Documents per text.  [default: all]", metavar="N")]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a row, into which documents are cut.  [default: 1024, or what the model was made for]",
        metavar="N",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of each text to read.  [default: all]", metavar="N")]
Retriever = Annotated[
    str | None,
    typer.Option(
        help="Tree of topics by which texts fetch blocks of models with a bank.  [default: none]", metavar="TREE"
    ),
]
BatchSize = Annotated[int, typer.Option(help="Rows per forward pass.", metavar="N")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", metavar="NAME")]
Device = Annotated[
    str | None, typer.Option(help="Such as cpu or cuda:0.  [default: the first GPU, else cpu]", metavar="NAME")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


@contextlib.contextmanager
def working() -> Iterator[None]:
    """What is wrong with a request is refused; libraries that print do not come between the caller and the result."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except ValueError as error:
            raise Ending(WRONG_REQUEST, str(error)) from error


def load_to_read(
    name: str, dtype: str, device: str | None, what: str = "model"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model and its tokenizer, as `load_on`; what the dtype may be is told first."""
    from midus_hf.evaluation.settings import check_dtype

    check_dtype(dtype)
    return load_on(name, dtype, device, what)


def check_limit(limit: int | None) -> None:
    """See that a number of documents is one.

    Raises:
        ValueError: If it is less than 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; expected at least 1.")


def named_documents(texts: Sequence[str], column: str, encoding: str, limit: int | None) -> dict[str, list[str]]:
    """The documents of each text, by its name; of a folder it is told what was not read.

    Args:
        texts: `NAME=PATH`.
        column: Of rows of JSON and Parquet.
        encoding: Of plain text and JSON lines.
        limit: Documents of each.

    Raises:
        ValueError: If a text is not of that form, named twice, or cannot be read.
    """
    from midus_hf.documents import describe_files, read_documents

    check_limit(limit)
    paths: dict[str, str] = {}
    for given in texts:
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            raise ValueError(f"text is {given!r}; expected NAME=PATH, such as code=code.jsonl.")
        if name in paths:
            raise ValueError(f"text {name!r} is given twice; expected each name once.")
        paths[name] = path
    documents = {}
    for name, path in paths.items():
        if (line := describe_files(path)) is not None:
            print(line, file=sys.stderr)
        documents[name] = read_documents(path, column, encoding)[:limit]
    return documents


def rows_of(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    documents: dict[str, list[str]],
    sequence_length: int | None,
    max_tokens: int | None,
    retriever: str | None = None,
) -> "list[TextRows]":
    """Texts as rows of tokens that a model was made for, in the order of their names.

    Args:
        model: That reads them.
        tokenizer: Of the model.
        documents: Of each text.
        sequence_length: Tokens of a row.
        max_tokens: Of each text.
        retriever: Tree of topics, by which rows of a document fetch blocks. Default: nothing is fetched.

    Raises:
        ValueError: As `text_rows` and `path_finder`.
    """
    from midus_hf.analysis.text_rows import text_rows

    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    rows = [
        text_rows(name, of_text, tokenizer, longest=longest, sequence_length=sequence_length, max_tokens=max_tokens)
        for name, of_text in documents.items()
    ]
    find_paths = path_finder(model, retriever)
    return (
        rows if find_paths is None else [_with_paths(of_text, documents[of_text.name], find_paths) for of_text in rows]
    )


def path_finder(model: "PreTrainedModel", retriever: str | None) -> "PathFinder | None":
    """What finds the paths by which texts fetch blocks; None, and a line that tells so, where a model could and nothing is given.

    Args:
        model: That reads them.
        retriever: Tree of topics.

    Raises:
        ValueError: If a retriever is given and the model fetches nothing, or by a tree of another shape, or it cannot be loaded.
    """
    from midus_hf.evaluation.fetching import fetches_blocks

    if retriever is None:
        if fetches_blocks(model):
            print(
                "texts fetch nothing from the model's bank; give --retriever with its tree of topics", file=sys.stderr
            )
        return None
    if not fetches_blocks(model):
        raise ValueError(f"retriever is {retriever!r}, and the texts of this model fetch no blocks; leave it out.")
    from midus_hf.library_bars import library_bars_on_terminals
    from midus_hf.retrieval.bank_tree import check_tree
    from midus_hf.retrieval.memory_retriever import MemoryRetriever

    with library_bars_on_terminals():
        found = MemoryRetriever.load(retriever, device=str(model.device))
    check_tree(found.tree, model)
    return found.paths


def _with_paths(rows: "TextRows", documents: Sequence[str], find_paths: "PathFinder") -> "TextRows":
    """Rows that fetch by the path of the whole document; those of documents without rows are not looked for."""
    import torch

    read = sorted(set(rows.documents))
    found = find_paths([documents[number] for number in read])
    paths = torch.zeros(len(documents), found.shape[1], dtype=torch.int64)
    paths[read] = found.cpu()
    return dataclasses.replace(rows, paths=paths)


@contextlib.contextmanager
def token_bar(what: str = "reading") -> Iterator[Callable[[int, int], None]]:
    """A bar of the tokens that have been read, and what for."""
    from tqdm import tqdm

    with tqdm(desc=what, unit=" tokens", disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def adding(show: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """What takes how many tokens each pass read, and shows how many were read so far.

    Args:
        show: From `token_bar`.
        total: Tokens that there are to read.
    """
    done = 0

    def add(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        show(done, total)

    return add


def sizes_of(text: "TextRows") -> dict[str, int]:
    """What reports say of how much a text is."""
    return {"documents": len(set(text.documents)), "rows": len(text.rows), "tokens": text.num_tokens}


def show_report(report: dict[str, Any], tables: "Sequence[TableOfWords]", json_: bool) -> None:
    """Print what was found: a report as JSON, or tables of it that have rows."""
    if json_:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        show_tables(tables)


def show_tables(tables: "Sequence[TableOfWords]") -> None:
    """Print tables that have rows."""
    import rich.box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for words in tables:
        if not words.rows:
            continue
        table = Table(
            title=words.title, box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
        )
        for name in words.head:
            table.add_column(Text(name), overflow="fold")
        for row in words.rows:
            table.add_row(*map(Text, row))
        console.print(table)


def check_file(option: str, path: Path | None, suffix: str) -> None:
    """See that a file can be written.

    Args:
        option: That names it, for messages.
        path: Of the file; None where none is asked for.
        suffix: That it shall end in.

    Raises:
        ValueError: If it ends in something else, or its folder does not exist.
    """
    if path is None:
        return
    if path.suffix != suffix:
        raise ValueError(f"{option} is {str(path)!r}; expected a file ending in {suffix}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, in a folder that does not exist; create it first.")


def check_picture(option: str, path: Path | None, suffix: str) -> None:
    """See that a file with pictures can be written.

    Args:
        option: That names it, for messages.
        path: Of the file; None where none is asked for.
        suffix: That it shall end in.

    Raises:
        ValueError: If matplotlib is not installed, the file ends in something else, or its folder does not exist.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} has pictures, which need matplotlib; install it with pip install 'midus-hf[report]'."
        )
    check_file(option, path, suffix)
