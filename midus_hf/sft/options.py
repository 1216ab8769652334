"""Options of a run of supervised fine-tuning."""

import dataclasses
from collections.abc import Callable
from typing import Self

from midus_hf.training.optim.rates import Rates
from midus_hf.training.run_options import RunOptions


@dataclasses.dataclass(kw_only=True)
class SftConfig(Rates, RunOptions):
    """Options of one run of supervised fine-tuning, with the keys of `RunOptions` and of `Rates`.

    Args:
        dataset_name: A `.jsonl`, `.json` or `.parquet` file of rows, a folder (with its subfolders, by path), or the id
            of a dataset on the Hub. All but Parquet may be compressed (`.gz` or `.zst` after the ending).
        dataset_config: Configuration of a dataset on the Hub. Default: the dataset's own.
        dataset_train_split: Split of a dataset on the Hub. Default: `"train"`.
        dataset_format: `"messages"`, `"sharegpt"`, `"alpaca"`, `"dolly"` or `"prompt-completion"`. Default: the format
            whose columns the first row has.
        dataset_encoding: Encoding of JSON files. Default: `"utf-8"`.
        max_length: Most tokens of a chat, or of a sequence of packed chats; longer chats are cut. Default: 2048.
        chat_template: Template of chats, saved with the tokenizer: `"chatml"`, `"alpaca"`, or a file with a Jinja
            template. Default: the tokenizer's own.
        assistant_only_loss: Compute the loss only on answers: what the assistant says with the token that ends it, or
            completions. Default: true.
        packing: Let short chats share a sequence, where they do not see one another. Default: false.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    dataset_name: str
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_format: str | None = None
    dataset_encoding: str = "utf-8"
    max_length: int = 2048
    chat_template: str | None = None
    assistant_only_loss: bool = True
    packing: bool = False

    def __post_init__(self) -> None:
        Rates.__post_init__(self)
        RunOptions.__post_init__(self)
        if not self.dataset_name:
            raise ValueError("dataset_name is empty; expected a file, a folder or a dataset id.")
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; expected at least 2 tokens.")

    def sources(self) -> list[tuple[str, str]]:
        return [("dataset_name", self.dataset_name), *super().sources()]

    def to_share(self, label: Callable[[str], str]) -> Self:
        template = None if self.chat_template is None else label(self.chat_template)
        return dataclasses.replace(
            super().to_share(label), dataset_name=label(self.dataset_name), chat_template=template
        )
