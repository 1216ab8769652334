"""Questions about a model, their options, and the models, texts and rows of tokens that the options name."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import typer

from midus_hf.cli.reading import Loading, ReadingInBatches, Retriever, TaskData, TaskFiles, model_argument
from midus_hf.cli.subjects import Subjects
from midus_hf.model_names import check_model_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.text_rows import TextRows

# Names of the options of all questions for which a model reads texts.
READING = (
    *("text", "column", "encoding", "limit", "sequence_length", "max_tokens", "batch_size", "retriever"),
    *("dtype", "device"),
)


# Questions that `midus look` answers.
QUESTIONS: "Subjects[Callable[[Request], Answer]]" = Subjects("question")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(ReadingInBatches, Loading):
    """Options of a question. Each question takes some of them."""

    models: Annotated[list[str], model_argument("A model that upscale made; heads takes several.", "MODEL")]
    text: Annotated[
        list[str] | None, typer.Option(help="File or folder to read; may be repeated.", metavar="[NAME=]PATH")
    ] = None
    retriever: Retriever = None
    base: Annotated[
        str, typer.Option(help="Base to compare with; self: MODEL without added parts.", metavar="MODEL")
    ] = "self"
    memory: Annotated[str | None, typer.Option(help="One of several memories.  [default: all]", metavar="NAME")] = None
    layers: Annotated[str | None, typer.Option(help="Such as 3,7-9.  [default: all]", metavar="LIST")] = None
    heads: Annotated[str | None, typer.Option(help="Such as 0,4-5.  [default: all]", metavar="LIST")] = None
    slots: Annotated[str | None, typer.Option(help="Such as 3,7-9.  [default: most used]", metavar="LIST")] = None
    chapters: Annotated[str | None, typer.Option(help="all, or such as 3,7-9.  [default: none]", metavar="LIST")] = (
        None
    )
    mode: Annotated[str, typer.Option(help="zero, swap-random or drop chapters.", metavar="NAME")] = "zero"
    seed: Annotated[int, typer.Option(help="Seed of swap-random.", metavar="N")] = 0
    all_: Annotated[bool, typer.Option("--all", help="Ablate layers of the base as well.")] = False
    top: Annotated[int | None, typer.Option(help="How many slots, rows or chapters to show.", metavar="N")] = None
    tokens: Annotated[int, typer.Option(help="Nearest tokens to show.", metavar="N")] = 10
    rows: Annotated[bool, typer.Option("--rows", help="Show each row of a chapter.")] = False
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, separated by commas.", metavar="NAMES")] = None
    data: TaskData = None
    include_path: TaskFiles = None
    signed: Annotated[bool, typer.Option("--signed", help="Signed sums in place of absolute values.")] = False

    @property
    def model(self) -> str:
        """Name of the only model.

        Raises:
            ValueError: If several models are named.
        """
        if len(self.models) > 1:
            raise ValueError(f"{len(self.models)} models are given; expected one, for all questions but heads.")
        return self.models[0]

    @cached_property
    def documents(self) -> dict[str, list[str]]:
        """Documents of each text, by the text's name.

        Raises:
            ValueError: If a text cannot be read, or two texts have one name.
        """
        return self.named_documents(self.text or [])

    @cached_property
    def loaded(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """The model, in eval mode, and its tokenizer."""
        return self.load(self.model)

    @cached_property
    def text_rows(self) -> "list[TextRows]":
        """The texts as rows of tokens, in the order of `text`."""
        return self.rows_of(*self.loaded, self.documents, self.retriever)

    def check_counts(self) -> None:
        """Check that `top` and `tokens` are at least 1.

        Raises:
            ValueError: If one of them is less.
        """
        for option in ("top", "tokens"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"{option} is {value}; expected at least 1.")

    def numbers(self, option: str, end: int) -> tuple[int, ...] | None:
        """Return the numbers that an option lists; None for all, if the option is absent or `all`.

        Args:
            option: Name of the option: `layers`, `heads`, `slots` or `chapters`.
            end: Numbers are from 0 to `end - 1`.

        Raises:
            ValueError: If the list has another form, or numbers outside the range.
        """
        from upscalers.chapters.numbers import parse_numbers

        value = getattr(self, option)
        return None if value in (None, "all") else parse_numbers(value, end, option)

    def one_number(self, option: str, end: int) -> int | None:
        """Return the only number that an option lists; None if the option is absent.

        Raises:
            ValueError: As `numbers`, or if the option lists several numbers.
        """
        numbers = self.numbers(option, end)
        if numbers is not None and len(numbers) > 1:
            raise ValueError(f"{option} is {getattr(self, option)!r}; expected one number.")
        return None if numbers is None else numbers[0]

    def check_base(self) -> None:
        """Check that `base` names a model, or that the model without its added parts is its base.

        Raises:
            ValueError: If `base` is no model, or the weights of the base have changed or are of an unknown base.
        """
        if self.base != "self":
            check_model_name("base", self.base)
            return
        from upscalers.request.errors import RequestError
        from upscalers.runs.base_confirmation import keeps_base

        try:
            kept = keeps_base(self.model)
        except RequestError as error:
            raise ValueError(str(error)) from error
        if not kept:
            why = (
                "are not those that it was upscaled from: trained since, or cast"
                if kept is False
                else "are of no known base"
            )
            raise ValueError(
                f"base is 'self', but the base's weights in {self.model!r} {why}; expected the base itself. Give its folder as base."
            )
