"""One run of supervised fine-tuning: TRL tokenizes, truncates and packs chats; the rest is a run like any other."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedConfig

from midus_hf.config.wording import print_note
from midus_hf.data.packing import IGNORED_LABEL, packed_sequences
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.models.host import MemoryConfig
from midus_hf.saved_models import check_ids, open_ended
from midus_hf.training.run import TrainResult, run_training
from midus_hf.training.sft.arguments import SftArguments
from midus_hf.training.sft.rows import read_chats
from midus_hf.training.sft.trainer import SftTrainer
from midus_hf.training.texts import RunTexts, read_held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def finetune(arguments: SftArguments) -> TrainResult:
    """Fine-tune a model on chats, or on prompts and their completions.

    Prints what is trained, and writes the same files and log events to `arguments.output_dir` as `run_training`.

    Args:
        arguments: The arguments of the run.

    Returns:
        The folder of the trained model, and the steps, tokens and last loss of the run.

    Raises:
        ValueError: If the arguments are wrong; nothing has been written then.
        TrainingError: If a step fails. The message says how to go on.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
    """
    return run_training(arguments, read_chat_texts, make_sft_trainer)


def read_chat_texts(
    arguments: SftArguments, config: PreTrainedConfig, tokenizer: "PreTrainedTokenizerBase"
) -> RunTexts:
    """Return chats as messages, which TRL tokenizes, and held-out texts as packed sequences."""
    length: Any = arguments.max_length
    chats = read_chats(arguments, tokenizer)
    if arguments.completion_only_loss and "completion" not in chats.column_names:
        raise ValueError(
            f"completion_only_loss is true, and dataset_name is {arguments.dataset_name!r}, whose rows have no completion; "
            "expected the columns prompt and completion. Leave completion_only_loss out."
        )

    def pack(key: str, rows: Any) -> Any:
        return packed_sequences(rows, tokenizer, length, key=key, documents_apart=False)

    return RunTexts(
        chats, read_held_out(arguments, "text", length, pack), ""
    )  # the Trainer knows how much of them is read


def make_sft_trainer(
    model: Any, arguments: SftArguments, tokenizer: "PreTrainedTokenizerBase", texts: RunTexts
) -> SftTrainer:
    """Return TRL's Trainer on chats, leaving out those without an answer to learn from."""
    _check_banks(model, arguments)
    chats, source = texts.train, arguments.dataset_name
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
        train_dataset=chats,
        eval_dataset=texts.eval_dataset,
        processing_class=open_ended(tokenizer),  # TRL appends the end token to completions
    )
    if options.assistant_only_loss:
        _stop_behind_answers(model, tokenizer, trainer.first_labels)
    prepared: Any = trainer.train_dataset
    columns = [name for name in ("labels", "seq_lengths") if name in prepared.column_names]
    sequences = prepared.filter(has_loss, input_columns=columns, load_from_cache_file=False)
    if not len(sequences):
        raise ValueError(
            f"dataset_name is {source!r}, which has no answer to learn from within {arguments.max_length:,} tokens. Add data, or "
            "raise max_length."
        )
    check_ids(max(max(ids) for ids in sequences["input_ids"]), model.config.vocab_size)
    left_out = (len(prepared) if arguments.packing else len(chats)) - len(sequences)
    if left_out:
        unit = "packed sequences" if arguments.packing else "rows"
        print_note(f"{left_out:,} {unit} are left out: no answer in the part that is kept")
    tokens = sum(map(len, sequences["input_ids"]))
    labels = sum(label != IGNORED_LABEL for row in sequences["labels"] for label in row)
    if arguments.process_index == 0:
        print(
            f"{len(sequences):,} sequences, {tokens:,} tokens, {labels:,} of them with a loss ({labels / tokens:.1%})"
        )
    trainer.train_dataset = sequences
    return trainer


def _check_banks(model: Any, arguments: SftArguments) -> None:
    """Print what chats read from a model's bank, and refuse to train only blocks, which chats do not fetch."""
    banks: dict[str, Any] = block_layouts(model.config.memories()) if isinstance(model.config, MemoryConfig) else {}
    if not banks:
        return
    reads_generic = any(layout.blocks.without_ids == "generic" for layout in banks.values())
    if not reads_generic and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"nothing is trained: trainable is {arguments.trainable!r}, which is only the bank's blocks, and chats fetch none "
            "of them; expected trainable: all, adapters, or a model upscaled with without_ids = generic."
        )
    if arguments.process_index == 0:
        read = "read only the generic memory" if reads_generic else "fetch no blocks from the model's bank"
        print(
            f"chats have no paths in a tree of topics: they, and held-out text, {read}, in training and where the model is "
            "measured"
        )


def has_loss(labels: list[int], lengths: Sequence[int] = ()) -> bool:
    """Return whether a sequence of one or several texts has a token with a loss; the first token of a text is not predicted."""
    learned = np.asarray(labels) != IGNORED_LABEL
    learned[np.cumsum([0, *lengths[:-1]])[: len(learned)]] = False
    return bool(learned.any())


def _stop_behind_answers(model: Any, tokenizer: "PreTrainedTokenizerBase", answer: Sequence[int]) -> None:
    """Make generation stop at the special token that ends answers, found in some whole answers; warn if they end in text."""
    # Some templates also mark the line break after the token that ends an answer.
    last = next((token for token in reversed(answer) if str(tokenizer.decode([token])).strip()), None)
    added = tokenizer.added_tokens_decoder
    if last not in tokenizer.all_special_ids and not (last in added and added[last].special):
        print_note("the chat template ends answers with no special token, so the model will not learn to stop")
        return
    settings = model.generation_config
    stops = settings.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if last not in stops:
        settings.eos_token_id = [*stops, last] if stops else last
