"""What a run of supervised fine-tuning may be told."""

import dataclasses
from collections.abc import Callable
from typing import Self

from midus_hf.training.optim.rates import Rates
from midus_hf.training.run_options import RunOptions


@dataclasses.dataclass(kw_only=True)
class DataOptions:
    """Where the chats come from.

    Args:
        path: A `.jsonl`, `.json` or `.parquet` file of rows, a folder, whose files of these endings are read with those
            of its subfolders in the order of their paths, or the id of a dataset on the Hub. All but Parquet may be
            compressed, with `.gz` or `.zst` behind their ending.
        format: What rows hold: `"messages"`, `"sharegpt"`, `"alpaca"`, `"dolly"` or `"prompt-completion"`. Default:
            what the columns of the first row say.
        config: The configuration of a dataset. Default: its own.
        split: The split of a dataset. Default: `"train"`.
        encoding: Encoding of JSON. Default: `"utf-8"`.

    Raises:
        ValueError: If the path is empty.
    """

    path: str
    format: str | None = None
    config: str | None = None
    split: str = "train"
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("data.path is empty; expected a file, a folder or a dataset id.")


@dataclasses.dataclass(kw_only=True)
class SftConfig(Rates, RunOptions):
    """One run of supervised fine-tuning, with the keys of `RunOptions` and of `Rates`.

    Args:
        data: The keys of `DataOptions`; in a file, a path or dataset id may stand for all of them.
        sequence_length: Tokens of a chat, or of a sequence of packed ones, at most; what is longer is cut. Default: 2048.
        chat_template: What chats are written out with: `"chatml"`, `"alpaca"`, or a file with a Jinja template. It is
            saved with the tokenizer. Default: the tokenizer's own.
        assistant_only_loss: Whether the loss is of answers alone: what the assistant says, with the token that ends it, or
            completions. Default: true.
        packing: Whether short chats share a sequence, where they do not see one another. Default: false.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    data: DataOptions
    sequence_length: int = 2048
    chat_template: str | None = None
    assistant_only_loss: bool = True
    packing: bool = False

    def __post_init__(self) -> None:
        Rates.__post_init__(self)
        RunOptions.__post_init__(self)
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length is {self.sequence_length}; expected at least 2 tokens.")

    def sources(self) -> list[tuple[str, str]]:
        return [("data", self.data.path), *super().sources()]

    def to_share(self, label: Callable[[str], str]) -> Self:
        template = None if self.chat_template is None else label(self.chat_template)
        data = dataclasses.replace(self.data, path=label(self.data.path))
        return dataclasses.replace(super().to_share(label), data=data, chat_template=template)
