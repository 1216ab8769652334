"""One run of supervised fine-tuning: TRL makes tokens and labels of chats, cuts and packs them; the rest is a run as any other."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from midus_hf.config.wording import print_note
from midus_hf.data.packing import IGNORED_LABEL, packed_sequences
from midus_hf.models.host import MemoryConfig
from midus_hf.saved_models import check_ids, open_ended
from midus_hf.training.run import RunTexts, TrainingRun, TrainResult
from midus_hf.training.sft.arguments import SftArguments
from midus_hf.training.sft.rows import read_chats
from midus_hf.training.sft.trainer import SftTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def finetune(arguments: SftArguments) -> TrainResult:
    """Fine-tune a model on chats, or on prompts and their completions.

    Prints what trains, and writes the same files and log events to `arguments.output_dir` as `train`.

    Args:
        arguments: The arguments of the run.

    Returns:
        The folder of the trained model, and the steps, tokens and last loss of the run.

    Raises:
        ValueError: If the arguments are wrong; nothing has been written then.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
    """
    return SftRun(arguments).execute()


class SftRun(TrainingRun):
    """A run of supervised fine-tuning, ready to start."""

    length_key = "max_length"

    def read_data(self) -> RunTexts:
        arguments = self.arguments
        chats = read_chats(arguments, self.tokenizer)
        if arguments.completion_only_loss and "completion" not in chats.column_names:
            raise ValueError(
                f"completion_only_loss is true, and dataset_name is {arguments.dataset_name!r}, whose rows have no completion; "
                "expected the columns prompt and completion. Leave completion_only_loss out."
            )

        def pack(key: str, rows: Any) -> Any:
            return packed_sequences(rows, self.tokenizer, self.length, key=key, documents_apart=False)

        return RunTexts(chats, self.read_held_out(pack), "")  # what is read of them, the Trainer knows

    def make_trainer(self) -> SftTrainer:
        arguments, tokenizer, source = self.arguments, self.tokenizer, self.arguments.dataset_name
        self._check_banks()
        chats, held_out = self.texts.train, self.texts.held_out
        columns = chats.column_names
        is_chat = "messages" in columns or isinstance(chats[0]["prompt"], list)
        options = copy.copy(arguments)  # TRL has other words for what the arguments say, which are recorded
        options.chat_template_path = None  # the tokenizer has it already
        options.assistant_only_loss = arguments.assistant_only_loss and is_chat
        if arguments.completion_only_loss is None:
            options.completion_only_loss = arguments.assistant_only_loss and "completion" in columns
        trainer = SftTrainer(
            self.model,
            options,
            train_dataset=chats,
            eval_dataset=held_out.get("", held_out) or None,
            processing_class=open_ended(tokenizer),  # TRL puts the end token behind completions
        )
        if options.assistant_only_loss:
            _stop_behind_answers(self.model, tokenizer, trainer.first_labels)
        prepared: Any = trainer.train_dataset
        columns = [name for name in ("labels", "seq_lengths") if name in prepared.column_names]
        sequences = prepared.filter(has_loss, input_columns=columns, load_from_cache_file=False)
        if not len(sequences):
            raise ValueError(
                f"dataset_name is {source!r}, which has no answer to learn from within {arguments.max_length:,} tokens. Add data, or "
                "raise max_length."
            )
        check_ids(max(max(ids) for ids in sequences["input_ids"]), self.config.vocab_size)
        left_out = (len(prepared) if arguments.packing else len(chats)) - len(sequences)
        if left_out:
            unit = "packed sequences" if arguments.packing else "rows"
            print_note(f"{left_out:,} {unit} are left out: no answer in the part of them that is kept")
        tokens = sum(map(len, sequences["input_ids"]))
        labels = sum(label != IGNORED_LABEL for row in sequences["labels"] for label in row)
        self.texts = self.texts._replace(reads=f"dataset_name: {len(sequences):,} sequences")
        if arguments.process_index == 0:
            print(
                f"{len(sequences):,} sequences, {tokens:,} tokens, {labels:,} of them with a loss ({labels / tokens:.1%})"
            )
        trainer.train_dataset = sequences
        return trainer

    def _check_banks(self) -> None:
        """Say what chats read of a model's bank, and refuse to train blocks alone, which chats do not fetch."""
        banks: dict[str, Any] = self.config.memories().banks if isinstance(self.config, MemoryConfig) else {}
        if not banks:
            return
        reads_generic = any(layout.blocks.without_ids == "generic" for layout in banks.values())
        if not reads_generic and not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                f"nothing trains: trainable is {self.arguments.trainable!r}, which is the bank's blocks alone, and chats fetch none "
                "of them; expected trainable: all, adapters, or a model upscaled with without_ids = generic."
            )
        if self.arguments.process_index == 0:
            read = "read the generic memory alone" if reads_generic else "fetch no blocks from the model's bank"
            print(
                f"chats have no paths in a tree of topics: they, and held-out text, {read}, in training and where the model is "
                "measured"
            )


def has_loss(labels: list[int], lengths: Sequence[int] = ()) -> bool:
    """Return whether a sequence of texts of some lengths, or of one, has a token with a loss; nothing predicts a text's first."""
    learned = np.asarray(labels) != IGNORED_LABEL
    learned[np.cumsum([0, *lengths[:-1]])[: len(learned)]] = False
    return bool(learned.any())


def _stop_behind_answers(model: Any, tokenizer: "PreTrainedTokenizerBase", answer: Sequence[int]) -> None:
    """Let generation stop at the special token that ends answers, of which some are given uncut; say so if text ends them."""
    # Some templates also mark the line break behind the token that ends an answer.
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
