"""TRL's trainer on chats, which are checked after tokenization and before truncation."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers import Trainer
from trl import SFTTrainer

from midus_hf.config.wording import first_line, print_note
from midus_hf.data.packing import IGNORED_LABEL
from midus_hf.training.trainer import MemoryTrainerMixin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _ModelLossTrainer(SFTTrainer):
    """TRL's trainer with the loss that the model computes, which may have terms that TRL does not know."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)


class SftTrainer(MemoryTrainerMixin, _ModelLossTrainer):
    """TRL's trainer for models with memory, on chats that are checked."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # TRL's constructor needs the tokenizer, but a Trainer that keeps it rewrites the special tokens in the model's config.
        self.processing_class = None

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, packing: bool, *others: Any) -> Any:
        """Return tokens and labels as TRL makes them, for chats in two steps, since checks need them before truncation."""
        if "input_ids" in dataset.column_names:  # a held-out text
            return super()._prepare_dataset(dataset, processing_class, args, packing, *others)
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        try:
            encoded = super()._prepare_dataset(dataset, processing_class, whole, False, *others)
        except (TemplateError, RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
            # A template is a program that runs on the chat, and can fail in any of these ways.
            _refuse_row(dataset, processing_class, self.chat_template, args)
            raise ValueError(
                f"dataset_name is {args.dataset_name!r}, and TRL refuses a row of it: {first_line(error)}"
            ) from error
        self.first_labels = _check_encoded(encoded, processing_class, args)
        encoded = encoded.select_columns(["input_ids", "labels"])
        return super()._prepare_dataset(encoded, processing_class, args, packing, *others)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card, since the run extends the card of the model."""


def _refuse_row(dataset: Any, tokenizer: "PreTrainedTokenizerBase", template: str | None, arguments: Any) -> None:
    """Raise a `ValueError` about the first chat that a template refuses, if there is one."""
    for number, row in enumerate(dataset, start=1):
        messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
        if not isinstance(messages[0], dict):
            return
        options = {"tools": row.get("tools"), "chat_template": template, **row.get("chat_template_kwargs", {})}
        try:
            tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            raise ValueError(
                f"row {number} of {arguments.dataset_name!r} is refused by the chat template: {first_line(error)}. Correct it, or "
                "take it out."
            ) from error


def _check_encoded(encoded: Any, tokenizer: "PreTrainedTokenizerBase", arguments: Any) -> list[int]:
    """Print how many rows will be truncated; return the labels of the first row that has some."""
    source, limit = arguments.dataset_name, arguments.max_length
    long = sum(len(ids) > limit for ids in encoded["input_ids"])
    if long:
        kept = f"keep their {'first' if arguments.truncation_mode == 'keep_start' else 'last'} tokens"
        if arguments.packing and arguments.packing_strategy != "bfd":
            kept = "continue in another sequence, which does not see their beginning"
        print_note(f"{long:,} of {len(encoded):,} rows are longer than max_length, {limit:,} tokens, and {kept}")
    for number, row in enumerate(encoded, start=1):
        answers = row.get("messages") or row["completion"]
        if isinstance(answers, str):
            break
        calls = [call for message in answers for call in message.get("tool_calls") or ()]
        learned = tokenizer.decode(_learned(row["labels"])) if calls else ""
        for call in calls:  # templates may write only those of the last turn, or outside of their markers of answers
            name = call.get("function", call)["name"]
            if name not in learned:
                raise ValueError(
                    f"row {number} of {source!r} has a call of {name!r}, which the chat template does not write into an answer. Set "
                    "chat_template_path to one that does, or remove the row."
                )
    return next(filter(None, map(_learned, encoded["labels"])), [])


def _learned(labels: Sequence[int]) -> list[int]:
    return [label for label in labels if label != IGNORED_LABEL]
