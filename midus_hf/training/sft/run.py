"""A run of supervised fine-tuning on chats, which TRL tokenizes, truncates and packs."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedConfig, Trainer
from trl import SFTConfig, SFTTrainer

from midus_hf.config.errors import RequestError, first_line, print_note
from midus_hf.data.held_out import choose_measured, note_nothing_held_out, split_held_out
from midus_hf.data.packing import IGNORED_LABEL, packed_sequences
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.models.host import MemoryConfig
from midus_hf.sources.tokenizers import check_ids, without_suffix_tokens
from midus_hf.training.arguments import MemoryArguments
from midus_hf.training.checks import check_chat_keys
from midus_hf.training.keys import SftKeys, planned_steps
from midus_hf.training.prepare import Prepared
from midus_hf.training.run import TrainResult, run_training
from midus_hf.training.sft.rows import read_chats
from midus_hf.training.sft.template_day import first_day, reads_clock, with_day
from midus_hf.training.texts import RunTexts, read_held_out
from midus_hf.training.trainer import MemoryTrainerMixin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(repr=False)
class SftArguments(SftKeys, MemoryArguments, SFTConfig):
    """Arguments of `midus sft`: the keys of TRL's `SFTConfig`, except those that would have no effect, and `SftKeys`."""

    gradient_checkpointing: bool | None = None  # type: ignore[assignment]  # an older name, of Transformers and TRL

    def __post_init__(self) -> None:
        check_chat_keys(self)
        if self.include_num_input_tokens_seen is None:
            self.include_num_input_tokens_seen = "all" if self.packing else "non_padding"
        if self.activation_checkpointing is None and self.gradient_checkpointing is None:
            self.activation_checkpointing = True
        super().__post_init__()


def finetune(arguments: SftArguments) -> TrainResult:
    """Fine-tune a model on chats or completions; files, log and errors are those of `run_training`."""
    return run_training(arguments, read_chat_texts, make_sft_trainer)


def read_chat_texts(
    arguments: SftArguments, config: PreTrainedConfig, tokenizer: "PreTrainedTokenizerBase"
) -> RunTexts:
    """Return chats as messages, which TRL tokenizes, and held-out texts as packed sequences."""
    length: Any = arguments.max_length
    chats = read_chats(arguments, tokenizer)
    if arguments.completion_only_loss and "completion" not in chats.column_names:
        raise RequestError(
            f"completion_only_loss is true, and dataset_name is {arguments.dataset_name!r}, whose rows have no completion; "
            "expected the columns prompt and completion. Leave completion_only_loss out."
        )

    def pack(key: str, rows: Any) -> Any:
        return packed_sequences(rows, tokenizer, length, key=key, documents_apart=False)

    if not arguments.eval_share:
        held_out = read_held_out(arguments, "text", length, pack)
        return RunTexts(chats, held_out, "")  # the Trainer knows how much of them is read
    train, held_out = split_held_out(chats, arguments.eval_share, chats.column_names)
    if not len(train) or not len(held_out):
        share = f"{arguments.eval_share:.0%}"
        note_nothing_held_out("dataset_name", f"{len(chats):,} rows are too few to hold out {share} of them")
        return RunTexts(chats, None, "")
    if arguments.process_index == 0:
        print(f"dataset_name: {len(held_out):,} of {len(chats):,} rows are held out, to measure what is learned")
    num_trained = planned_steps(arguments, len(train)) * arguments.sequences_per_step
    return RunTexts(train, choose_measured(held_out, num_trained), "")


def make_sft_trainer(prepared: Prepared) -> "SftTrainer":
    """Return TRL's Trainer on chats, leaving out those without an answer to learn from."""
    model = prepared.model
    arguments = prepared.arguments
    tokenizer = prepared.tokenizer
    texts = prepared.texts
    _check_banks(model, arguments)
    chats = texts.train
    columns = chats.column_names
    is_chat = "messages" in columns or isinstance(chats[0]["prompt"], list)
    options = copy.copy(arguments)  # TRL has other names for some arguments, which are recorded
    options.chat_template_path = None  # the tokenizer has it already
    options.assistant_only_loss = arguments.assistant_only_loss and is_chat
    if arguments.completion_only_loss is None:
        options.completion_only_loss = arguments.assistant_only_loss and "completion" in columns
    trainer = SftTrainer(
        model,
        options,
        processing_class=without_suffix_tokens(tokenizer),  # since TRL appends the end token to completions
        train_dataset=chats,
        eval_dataset=texts.held_out,
        first_day=prepared.first_day,
        saved_dtypes=prepared.saved_dtypes,
        digests=prepared.digests,
    )
    if options.assistant_only_loss:
        _stop_after_answers(model, tokenizer, trainer.first_labels)
    return trainer


def _check_banks(model: Any, arguments: SftArguments) -> None:
    """Print what chats read of a model's bank; refuse to train only blocks, which chats do not fetch."""
    banks: dict[str, Any] = block_layouts(model.config.memories()) if isinstance(model.config, MemoryConfig) else {}
    if not banks:
        return
    reads_generic = any(layout.blocks.without_ids == "generic" for layout in banks.values())
    if not reads_generic and not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError(
            f"nothing is trained: trainable is {arguments.trainable!r}, which is only the bank's blocks, and chats fetch none "
            "of them; expected trainable: all, adapters, or a model upscaled with without_ids = generic."
        )
    if arguments.process_index == 0:
        read = "read only the generic memory" if reads_generic else "fetch no blocks from the model's bank"
        subject = "chats have no paths in a tree of topics: they, and held-out text"
        print(f"{subject}, {read}, in training and where the model is measured")


def has_loss(labels: list[int], lengths: Sequence[int] = ()) -> bool:
    """Return whether a sequence has a token with a loss; the first token of each text is not predicted."""
    learned = np.asarray(labels) != IGNORED_LABEL
    learned[np.cumsum([0, *lengths[:-1]])[: len(learned)]] = False
    return bool(learned.any())


def _stop_after_answers(model: Any, tokenizer: "PreTrainedTokenizerBase", answer: Sequence[int]) -> None:
    """Make generation stop at the special token that ends answers; warn if they end in text."""
    # Some templates also mark the line break after the token that ends an answer.
    last = next((token for token in reversed(answer) if str(tokenizer.decode([token])).strip()), None)
    added = tokenizer.added_tokens_decoder
    if last not in tokenizer.all_special_ids and not (last in added and added[last].special):
        print_note("the chat template ends answers with no special token, so the model will not learn to stop")
        return
    settings = model.generation_config
    stops = settings.eos_token_id
    if stops is None:
        stops = []
    elif not isinstance(stops, list):
        stops = [stops]
    if last not in stops:
        settings.eos_token_id = [*stops, last] if stops else last


class _ModelLossTrainer(SFTTrainer):
    """TRL's trainer with the loss that the model computes, which may have terms that TRL does not know."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)


class SftTrainer(MemoryTrainerMixin, _ModelLossTrainer):
    """TRL's trainer for models with memory, on chats that are checked.

    Chat templates that write the date write `first_day`, as YYYY-MM-DD. Default: today.
    """

    def __init__(self, model: Any, *args: Any, first_day: str | None = None, **kwargs: Any):
        self._first_day = first_day
        self._vocab_size = model.config.vocab_size
        super().__init__(model, *args, **kwargs)
        # TRL's constructor needs the tokenizer, but a Trainer that keeps it rewrites the special tokens in the model's config.
        self.processing_class = None

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, packing: bool, *others: Any) -> Any:
        """Return TRL's tokens and labels, for chats in two steps: checks need them before truncation."""
        if "input_ids" in dataset.column_names:  # a held-out text, which is packed
            return super()._prepare_dataset(dataset, processing_class, args, False, *others)
        is_held_out = others[-1] != "train"
        template = self.chat_template or processing_class.chat_template
        if reads_clock(template) and not is_held_out:
            day = self._first_day or first_day()
            self.chat_template = with_day(template, day)
            print_note(
                f"the chat template writes the date: the run's first day, {day} (00:00), also when it is resumed"
            )
        whole = copy.copy(args)
        whole.max_length = None
        whole.shuffle_dataset = False
        try:
            encoded = super()._prepare_dataset(dataset, processing_class, whole, False, *others)
        except (TemplateError, RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
            # A template is a program that runs on the chat, and can fail in any of these ways.
            _refuse_row(dataset, processing_class, self.chat_template, args)
            raise RequestError(
                f"dataset_name is {args.dataset_name!r}, and TRL refuses a row of it: {first_line(error)}"
            ) from error
        if not is_held_out:
            self.first_labels = _check_encoded(encoded, processing_class, args)
        encoded = encoded.select_columns(["input_ids", "labels"])
        sequences = super()._prepare_dataset(encoded, processing_class, args, packing, *others)
        columns = [name for name in ("labels", "seq_lengths") if name in sequences.column_names]
        with_loss = sequences.filter(has_loss, input_columns=columns, load_from_cache_file=False)
        if not is_held_out:
            count = len(sequences if packing else dataset)
            _check_sequences(with_loss, count - len(with_loss), self._vocab_size, args)
        elif not len(with_loss):
            args.eval_on_start = False
            note_nothing_held_out(
                "dataset_name", f"none of the {len(dataset):,} rows that were held out has an answer"
            )
        return with_loss

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card, since the run extends the card of the model."""


def _refuse_row(dataset: Any, tokenizer: "PreTrainedTokenizerBase", template: str | None, arguments: Any) -> None:
    for number, row in enumerate(dataset, start=1):
        messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
        if not isinstance(messages[0], dict):
            return
        options = {"tools": row.get("tools"), "chat_template": template, **row.get("chat_template_kwargs", {})}
        try:
            tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            place = f"row {number} of {arguments.dataset_name!r}"
            problem = f"{place} is refused by the chat template: {first_line(error)}"
            raise RequestError(f"{problem}. Correct it, or take it out.") from error


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
                raise RequestError(
                    f"row {number} of {source!r} has a call of {name!r}, which the chat template does not write into an answer. Set "
                    "chat_template_path to one that does, or remove the row."
                )
    return next(filter(None, map(_learned, encoded["labels"])), [])


def _check_sequences(sequences: Any, left_out: int, vocab_size: int, arguments: Any) -> None:
    """Print how many sequences are trained on, and how many are left out; refuse none, and tokens that the model lacks."""
    if not len(sequences):
        reason = f"which has no answer to learn from within {arguments.max_length:,} tokens"
        raise RequestError(f"dataset_name is {arguments.dataset_name!r}, {reason}. Add data, or raise max_length.")
    check_ids(max(max(ids) for ids in sequences["input_ids"]), vocab_size)
    if left_out:
        unit = "packed sequences" if arguments.packing else "rows"
        print_note(f"{left_out:,} {unit} are left out: no answer in the part that is kept")
    tokens = sum(map(len, sequences["input_ids"]))
    labels = sum(label != IGNORED_LABEL for row in sequences["labels"] for label in row)
    if arguments.process_index == 0:
        share = f"{labels:,} of them with a loss ({labels / tokens:.1%})"
        print(f"{len(sequences):,} sequences, {tokens:,} tokens, {share}")


def _learned(labels: Sequence[int]) -> list[int]:
    return [label for label in labels if label != IGNORED_LABEL]
