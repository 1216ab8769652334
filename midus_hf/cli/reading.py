"""What commands have in common, most of all those that let a model read texts: options, loading, progress, tables, files."""

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
Column = Annotated[str, typer.Option(help="Where rows of files hold the text.", metavar="NAME")]
Encoding = Annotated[str, typer.Option(help="Of plain text and JSON lines.", metavar="NAME")]
Limit = Annotated[int | None, typer.Option(help="Documents per text.  [default: all]", metavar="N")]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a row of a text.  [default: 1024]",
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
    """Return an argument that names one or several models, which have to be there before anything is imported for them.

    Args:
        help: What stands beside the argument in the help of a command.
        metavar: What the argument is called there. Default: `MODEL`.
    """
    return typer.Argument(metavar=metavar, help=help, callback=_checked_models)


def _checked_models(context: typer.Context, names: str | list[str] | None) -> str | list[str] | None:
    if not context.resilient_parsing:
        for name in [names] if isinstance(names, str) else names or []:
            check_model_name("model", name)
    return names


def sharing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its parameters that are dataclasses as options of its own, in the place of the parameter.

    Args:
        command: A function as typer takes it, some of whose parameters are annotated with a dataclass such as `Reading`.
    """
    parameters: dict[str, inspect.Parameter] = {}
    shared: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            shared[name] = parameter.annotation
            parameters |= inspect.signature(shared[name]).parameters
        else:
            parameters[name] = parameter

    def with_groups(**given: Any) -> None:
        groups = {
            name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in shared.items()
        }
        command(**given, **groups)

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    with_groups.__name__, with_groups.__doc__ = command.__name__, command.__doc__
    with_groups.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return with_groups


@dataclasses.dataclass(frozen=True)
class Loading:
    """How a model is loaded: options that commands share."""

    dtype: Dtype = "auto"
    device: Device = None

    def load(self, name: str, what: str = "model") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load a model, in eval mode, and its tokenizer; bars of libraries are shown on a terminal alone.

        Args:
            name: Folder or hub id.
            what: Whose name it is, for the error. Default: that of the model.

        Raises:
            ValueError: If the device or the dtype cannot be used, the model cannot be loaded there, or its checkpoint lacks tensors.
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
    """How texts are read: options that commands share."""

    column: Column = "text"
    encoding: Encoding = "utf-8"
    limit: Limit = None
    sequence_length: SequenceLength = None
    max_tokens: MaxTokens = None

    def documents_at(self, path: str) -> list[str]:
        """Return the documents of a file or folder; of a folder it is told what was not read.

        Raises:
            ValueError: If the limit is less than 1, or they cannot be read.
        """
        from midus_hf.documents import describe_files, read_documents

        self._check_limit()
        if (line := describe_files(path)) is not None:
            print(line, file=sys.stderr)
        return read_documents(path, self.column, self.encoding)[: self.limit]

    def named_documents(self, texts: Sequence[str]) -> dict[str, list[str]]:
        """Return the documents of each of `NAME=PATH` or `PATH`, by the name; a path without a name is named after its file.

        Raises:
            ValueError: If a text is not of that form, named twice, or cannot be read.
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
        """Return texts as rows of tokens that a model was made for, in the order of their names.

        Args:
            model: That reads them.
            tokenizer: Of the model.
            documents: Of each text.
            retriever: Tree of topics, by which rows of a document fetch blocks. Default: nothing is fetched.

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
    """How a model reads texts: options that commands share."""

    batch_size: BatchSize = 4


@contextlib.contextmanager
def working() -> Iterator[None]:
    """What is wrong with a request is refused; libraries that print do not come between the caller and the result."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except ValueError as error:
            raise Ending(WRONG_REQUEST, str(error)) from error


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


def check_file(option: str, path: Path | None, *suffixes: str) -> None:
    """See that a file can be written.

    Args:
        option: That names it, for messages.
        path: Of the file; None where none is asked for.
        suffixes: It shall end in one of these.

    Raises:
        ValueError: If it ends in something else, or its folder does not exist.
    """
    if path is None:
        return
    if path.suffix not in suffixes:
        raise ValueError(f"{option} is {str(path)!r}; expected a file ending in {', '.join(suffixes)}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, in a folder that does not exist; create it first.")


def check_picture(option: str, path: Path | None, *suffixes: str, what: str = "has pictures, which need") -> None:
    """See that a file with pictures can be written.

    Args:
        option: That names it, for messages.
        path: Of the file; None where none is asked for.
        suffixes: It shall end in one of these.
        what: That the message says of it where matplotlib is not there. Default: `"has pictures, which need"`.

    Raises:
        ValueError: If matplotlib is not installed, the file ends in something else, or its folder does not exist.
    """
    if path is not None:
        check_matplotlib(f"{option} {what}")
        check_file(option, path, *suffixes)


def check_matplotlib(what: str) -> None:
    """See that pictures can be drawn.

    Raises:
        ValueError: If matplotlib is not installed; the message begins with what needs it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{what} matplotlib; install it with pip install 'midus-hf[look]'.")
