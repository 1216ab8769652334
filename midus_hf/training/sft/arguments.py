"""Arguments of a run of supervised fine-tuning."""

import dataclasses
from typing import Any

from trl import SFTConfig

from midus_hf.config.errors import RequestError
from midus_hf.training.arguments import MemoryArguments
from midus_hf.training.keys import SftKeys

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
class SftArguments(SftKeys, MemoryArguments, SFTConfig):
    """Arguments of `midus sft`: the keys of TRL's `SFTConfig`, and `SftKeys`.

    Keys of TRL that would have no effect are refused (`REFUSED`).

    Raises:
        RequestError: If a value lies outside its range or contradicts another.
    """

    gradient_checkpointing: bool | None = None  # type: ignore[assignment]  # an older name, of Transformers and TRL

    def __post_init__(self) -> None:
        for key, (expected, reason) in REFUSED.items():
            value = getattr(self, key)
            if value not in expected:
                raise RequestError(f"{key} is {value!r}; expected {expected[0]!r}: {reason}. Leave it out.")
        if self.max_length is None or self.max_length < 2:
            raise RequestError(f"max_length is {self.max_length}; expected at least 2 tokens.")
        if self.packing and self.truncation_mode != "keep_start":
            raise RequestError(
                f"truncation_mode is {self.truncation_mode!r}, and packing keeps the first tokens of long chats; expected "
                "keep_start. Leave truncation_mode or packing out."
            )
        if self.include_num_input_tokens_seen is None:
            self.include_num_input_tokens_seen = "all" if self.packing else "non_padding"
        if self.activation_checkpointing is None and self.gradient_checkpointing is None:
            self.activation_checkpointing = True
        super().__post_init__()
