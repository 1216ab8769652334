"""Arguments of a run of supervised fine-tuning."""

import dataclasses
from typing import Any, ClassVar, Literal

from trl import SFTConfig

from midus_hf.training.arguments import MemoryArguments

# Keys of TRL that would have no effect, with the values that they may have and the reason.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_init_kwargs": ((None,), "a run loads its model itself; attn_implementation is a separate key"),
    "trust_remote_code": ((False,), "a run executes no code that comes with a model"),
    "dataset_kwargs": ((None,), "rows are always made into tokens and labels"),
    "dataset_text_field": (
        ("text",),
        "rows are chats, or prompts and completions; midus train reads texts, by text_column",
    ),
    "eval_packing": ((None,), "held-out texts are always packed sequences"),
    "padding_free": ((False,), "packing: true leaves padding out, and keeps max_length"),
    "loss_type": (("nll", "chunked_nll"), "the loss is computed by the model, with the terms of its memories"),
}


@dataclasses.dataclass(repr=False)
class SftArguments(MemoryArguments, SFTConfig):
    """Arguments of `midus sft`: the keys of TRL's `SFTConfig`, the keys of `MemoryArguments`, and what follows.

    Keys of TRL that would have no effect are refused (`REFUSED`).

    Args:
        dataset_name: A file of rows (JSON, CSV or Parquet), a folder, or the id of a dataset on the Hub, read as `corpus` of
            `midus train` is.
        dataset_config: Configuration of a dataset on the Hub or of a downloaded one. Default: the dataset's own.
        dataset_train_split: Split of the data. Default: the only one, or `train`.
        max_length: Most tokens of a chat, or of a sequence of packed chats; longer chats are cut. Default: 2048.
        chat_template_path: Template of chats, saved with the tokenizer: `"chatml"`, or a file with a Jinja template that has
            `{% generation %}` around answers. Default: the tokenizer's own, for training in TRL's version.
        assistant_only_loss: Compute the loss only on answers: messages of the assistant with their end tokens, or
            completions. Default: true.
        activation_checkpointing: Recompute activations in the backward pass instead of storing them. Default: true.
        completion_only_loss: Compute the loss only on completions, of rows that have them. Default: as `assistant_only_loss`.
        packing: Pack several short chats into a sequence, without attention between them. Default: false.
        include_num_input_tokens_seen: Tokens that count as seen. Default: `"non_padding"`, and `"all"` with `packing`, whose
            sequences have no padding and no attention mask.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    command: ClassVar[str] = "sft"
    data_key: ClassVar[str] = "dataset_name"
    length_key: ClassVar[str] = "max_length"

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str | None = None
    max_length: int | None = 2048
    chat_template_path: str | None = None
    assistant_only_loss: bool = True
    packing: bool = False
    gradient_checkpointing: bool | None = None  # type: ignore[assignment]  # an older name, of Transformers and TRL
    include_num_input_tokens_seen: Literal[True, False] | str | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for key, (expected, reason) in REFUSED.items():
            value = getattr(self, key)
            if value not in expected:
                raise ValueError(f"{key} is {value!r}; expected {expected[0]!r}: {reason}. Leave it out.")
        if self.max_length is None or self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; expected at least 2 tokens.")
        if self.packing and self.truncation_mode != "keep_start":
            raise ValueError(
                f"truncation_mode is {self.truncation_mode!r}, and packing keeps the first tokens of long chats; expected "
                "keep_start. Leave truncation_mode or packing out."
            )
        if self.include_num_input_tokens_seen is None:
            self.include_num_input_tokens_seen = "all" if self.packing else "non_padding"
        if self.activation_checkpointing is None and self.gradient_checkpointing is None:
            self.activation_checkpointing = True
        super().__post_init__()
