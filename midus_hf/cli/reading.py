"""Parts that commands share, above all commands in which a model reads texts: options, loading, progress, tables, files."""

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.cli.command_line import WRONG_REQUEST, Ending
from midus_hf.model_names import check_model_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.analysis.table_of_words import TableOfWords
    from midus_hf.analysis.text_rows import TextRows
    from midus_hf.evaluation.fetching import PathFinder

Texts = Annotated[
    list[str],
    typer.Option(help="A file or folder to read, and what to call it. May be given again.", metavar="NAME=PATH"),
]
Column = Annotated[str, typer.Option(help="Column that holds the text.", metavar="NAME")]
Encoding = Annotated[str, typer.Option(help="Encoding of plain text and JSON.", metavar="NAME")]
Limit = Annotated[int | None, typer.Option(help="Documents per text.  [default: all]", metavar="N")]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        help="Tokens per row of a text.  [default: 1024]",
        metavar="N",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of each text to read.  [default: all]", metavar="N")]
Retriever = Annotated[
    str | None,
    typer.Option(help="Tree of topics by which texts fetch blocks.", metavar="TREE"),
]
BatchSize = Annotated[int, typer.Option(help="Rows per forward pass.", metavar="N")]
TaskData = Annotated[
    str | None,
    typer.Option(help="Folder with the questions of local tasks.", metavar="DIR"),
]
TaskFiles = Annotated[str | None, typer.Option(help="Folder with more task files.", metavar="DIR")]
TaskLimit = Annotated[int | None, typer.Option(help="Questions per task.  [default: all]", metavar="N")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", metavar="NAME")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.  [default: GPU, else cpu]", metavar="NAME")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def model_argument(help: str, metavar: str = "MODEL") -> Any:
    """Return a typer argument that names one or several models, and checks that they exist before heavy imports.

    Args:
        help: Help text of the argument.
        metavar: Name of the argument in the help. Default: `MODEL`.
    """
    return typer.Argument(metavar=metavar, help=help, callback=_checked_models)


def _checked_models(context: typer.Context, names: str | list[str] | None) -> str | list[str] | None:
    if not context.resilient_parsing:
        for name in [names] if isinstance(names, str) else names or []:
            check_model_name("model", name)
    return names


def sharing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a command by one option per field of the dataclass.

    Args:
        command: Function for typer, some of whose parameters are annotated with a dataclass such as `Reading`.
    """
    parameters: dict[str, inspect.Parameter] = {}
    shared: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            shared[name] = parameter.annotation
            parameters |= inspect.signature(shared[name]).parameters
        else:
            parameters[name] = parameter

    def with_groups(**options: Any) -> None:
        groups = {
            name: group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in shared.items()
        }
        command(**options, **groups)

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    with_groups.__name__, with_groups.__doc__ = command.__name__, command.__doc__
    with_groups.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return with_groups


@dataclasses.dataclass(frozen=True)
class Loading:
    """Options of commands that load a model."""

    dtype: Dtype = "auto"
    device: Device = None

    def load(self, name: str, what: str = "model") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load a model, in eval mode, and its tokenizer. Progress bars of libraries are shown on terminals only.

        Args:
            name: Folder or hub id.
            what: Name of the option that holds `name`, for the error. Default: `"model"`.

        Raises:
            ValueError: If the device or the dtype cannot be used, the model cannot be loaded, or its checkpoint lacks tensors.
        """
        import torch

        from midus_hf.config.usable_device import usable_device
        from midus_hf.evaluation.settings import check_dtype
        from midus_hf.library_bars import library_bars_on_terminals
        from midus_hf.saved_models import check_whole, load_model, load_tokenizer, refusing

        check_dtype(self.dtype)
        device = usable_device(self.device)
        unloaded = f"{what} is {name!r}, which cannot be loaded on {device}"
        with refusing(unloaded, OSError, RuntimeError, ValueError), library_bars_on_terminals():
            tokenizer = load_tokenizer(name)
            model, missing = load_model(name, self.dtype)
            model.to(torch.device(device))  # type: ignore[arg-type]  # transformers' wrapper hides the argument
        check_whole(name, missing)
        return model.eval(), tokenizer


@dataclasses.dataclass(frozen=True)
class Reading:
    """Options of commands that read texts."""

    column: Column = "text"
    encoding: Encoding = "utf-8"
    limit: Limit = None
    sequence_length: SequenceLength = None
    max_tokens: MaxTokens = None

    def documents_at(self, path: str) -> list[str]:
        """Return the documents of a file or folder, and print on standard error which files of a folder were not read.

        Raises:
            ValueError: If the limit is less than 1, or the documents cannot be read.
        """
        from midus_hf.documents import describe_files, read_documents

        self._check_limit()
        if (line := describe_files(path)) is not None:
            print(line, file=sys.stderr)
        return read_documents(path, self.column, self.encoding)[: self.limit]

    def named_documents(self, texts: Sequence[str]) -> dict[str, list[str]]:
        """Return the documents of each text, by the text's name.

        Args:
            texts: Texts as `NAME=PATH`, or as `PATH`, whose name is the last part of the path.

        Raises:
            ValueError: If a text has another form or cannot be read, or two texts have one name.
        """
        self._check_limit()
        paths: dict[str, str] = {}
        for text in texts:
            name, equals, path = text.partition("=")
            if not equals or Path(text).exists():
                name, path = Path(text).absolute().name, text
            if not (name and path):
                raise ValueError(f"text is {text!r}; expected PATH or NAME=PATH, such as code=code.jsonl.")
            if name in paths:
                raise ValueError(f"text {name!r} is given twice; expected each name once.")
            paths[name] = path
        return {name: self.documents_at(path) for name, path in paths.items()}

    def rows_of(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        documents: dict[str, list[str]],
        retriever: str | None = None,
    ) -> "list[TextRows]":
        """Return each text as rows of tokens, no longer than the model's positions, in the order of `documents`.

        Args:
            model: Model that shall read the rows.
            tokenizer: The model's tokenizer.
            documents: Documents of each text, by the text's name.
            retriever: Folder of the tree of topics by which the rows fetch blocks. Default: the rows fetch nothing.

        Raises:
            ValueError: As `text_rows` and `path_finder`.
        """
        from midus_hf.analysis.text_rows import text_rows

        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        lengths = {"longest": longest, "sequence_length": self.sequence_length, "max_tokens": self.max_tokens}
        rows = [text_rows(name, of_text, tokenizer, **lengths) for name, of_text in documents.items()]
        find_paths = path_finder(model, retriever)
        if find_paths is None:
            return rows
        return [_with_paths(of_text, documents[of_text.name], find_paths) for of_text in rows]

    def _check_limit(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; expected at least 1.")


@dataclasses.dataclass(frozen=True)
class ReadingInBatches(Reading):
    """Options of commands in which a model reads texts."""

    batch_size: BatchSize = 4


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Turn a `ValueError` into an `Ending` with the status of a wrong request, and send prints to standard error meanwhile."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except ValueError as error:
            raise Ending(WRONG_REQUEST, str(error)) from error


def path_finder(model: "PreTrainedModel", retriever: str | None) -> "PathFinder | None":
    """Return the function that finds the paths by which texts fetch blocks; None without a retriever.

    If the model fetches blocks and there is no retriever, a line on standard error says so.

    Args:
        model: Model that shall read the texts.
        retriever: Folder of a tree of topics, or None.

    Raises:
        ValueError: If a retriever is given, but the model fetches no blocks or needs a tree of another shape, or the
            retriever cannot be loaded.
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
    from midus_hf.retrieval.cluster_tree import check_tree
    from midus_hf.retrieval.memory_retriever import MemoryRetriever

    with library_bars_on_terminals():
        loaded = MemoryRetriever.load(retriever, device=str(model.device))
    check_tree(loaded.tree, model)
    return loaded.paths


def _with_paths(rows: "TextRows", documents: Sequence[str], find_paths: "PathFinder") -> "TextRows":
    """Return the rows with the path of each document, found from the whole document. Documents without rows keep zeros."""
    import torch

    read = sorted(set(rows.documents))
    document_paths = find_paths([documents[number] for number in read])
    paths = torch.zeros(len(documents), document_paths.shape[1], dtype=torch.int64)
    paths[read] = document_paths.cpu()
    return dataclasses.replace(rows, paths=paths)


@contextlib.contextmanager
def token_bar(what: str = "reading") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of tokens, titled `what`. Yield the function that sets the tokens done and in total."""
    from tqdm import tqdm

    with tqdm(desc=what, unit=" tokens", disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def sizes_of(text: "TextRows") -> dict[str, int]:
    """Return the numbers of documents, rows and tokens of a text, as reports hold them."""
    return {"documents": len(set(text.documents)), "rows": len(text.rows), "tokens": text.num_tokens}


def show_report(report: dict[str, Any], tables: "Sequence[TableOfWords]", json_: bool) -> None:
    """Print a report as JSON, or its tables that have rows."""
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
    for table_of_words in tables:
        if not table_of_words.rows:
            continue
        table = Table(
            title=table_of_words.title,
            box=rich.box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )
        for name in table_of_words.head:
            table.add_column(Text(name), overflow="fold")
        for row in table_of_words.rows:
            table.add_row(*map(Text, row))
        console.print(table)


def check_file(option: str, path: Path | None, *suffixes: str) -> None:
    """Check that a file has one of some endings, and that its folder exists.

    Args:
        option: Option that names the file, for messages.
        path: Path of the file; None if no file shall be written.
        suffixes: Endings that are allowed, such as `".csv"`.

    Raises:
        ValueError: If the file has another ending, or its folder does not exist.
    """
    if path is None:
        return
    if path.suffix not in suffixes:
        raise ValueError(f"{option} is {str(path)!r}; expected a file ending in {', '.join(suffixes)}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, in a folder that does not exist; create it first.")


def check_picture(option: str, path: Path | None, *suffixes: str, what: str = "has pictures, which need") -> None:
    """Check that a file with pictures can be written.

    Args:
        option: Option that names the file, for messages.
        path: Path of the file; None if no file shall be written.
        suffixes: Endings that are allowed, such as `".png"`.
        what: Words between the option and "matplotlib" in the message about a missing matplotlib.
            Default: `"has pictures, which need"`.

    Raises:
        ValueError: If matplotlib is not installed, the file has another ending, or its folder does not exist.
    """
    if path is not None:
        check_matplotlib(f"{option} {what}")
        check_file(option, path, *suffixes)


def check_matplotlib(what: str) -> None:
    """Check that matplotlib is installed.

    Args:
        what: First words of the message, which say what needs matplotlib, such as `"output has pictures, which need"`.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{what} matplotlib; install it with pip install 'midus-hf[look]'.")
