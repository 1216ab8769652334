"""One run, from its arguments to the trained model: what is checked, loaded, trained and saved, in this order."""

import contextlib
import dataclasses
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import HfHubHTTPError
from transformers import set_seed

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.wording import first_line
from midus_hf.files.checkpoint_files import CERTIFICATE
from midus_hf.library_bars import data_bars_on_terminals, without_library_bars
from midus_hf.model_names import answer_of_hub
from midus_hf.models.host import MemoryConfig
from midus_hf.saved_models import refusing
from midus_hf.topics.corpus import read_corpus, say
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.blocks import growth_of, use_tree
from midus_hf.training.callbacks import RunInterrupted, SaysSteps, StopInOrder
from midus_hf.training.data.leaves import checked_paths, leaf_sequences
from midus_hf.training.data.packing import PackedTexts, collate, packed_sequences
from midus_hf.training.loading import check_sequence_length, load_config, load_model, tokenizer_of
from midus_hf.training.optim.freezing import hold_for_training, resolve_trainable, set_trainable, whole_numel
from midus_hf.training.output import by_main_process, open_output, record_arguments, sequences_per_step
from midus_hf.training.parallel import check_checkpoint, shares_parameters
from midus_hf.training.protection import Protection
from midus_hf.training.saving import SavedInPart, save_model, try_saving, upload_model
from midus_hf.training.trainer import MemoryTrainer


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Args:
        output: Folder of the trained model.
        steps: Number of optimizer steps, including steps before a resumption.
        tokens: Number of tokens that all processes trained on, including tokens before a resumption.
        loss: Mean loss of the last log event; None if there was none.
        log: Events of the Trainer's log (`log_history`), also those before a resumption. The last has the numbers of trained
            parameters and of bytes that were allocated at most.
    """

    output: str
    steps: int
    tokens: int
    loss: float | None
    log: list[dict[str, Any]]


class RunTexts(NamedTuple):
    """Texts of a run, read as its Trainer takes them.

    Args:
        train: Rows that are trained on.
        held_out: Sequences of held-out texts, by name.
        reads: What the run reads, for a line.
        tree: Fingerprint of the tree that paths of texts belong to; None if they name none. Default: None.
    """

    train: Any
    held_out: dict[str, Any]
    reads: str
    tree: str | None = None


def train(arguments: TrainArguments) -> TrainResult:
    """Pretrain a model on text, from its weights or from the beginning.

    The function prints what trains, and writes to `arguments.output_dir` the trained model and its tokenizer,
    checkpoints, the Trainer's log (`trainer_state.json`) and the arguments (`train_config.yaml`).

    Raises:
        ValueError: If the arguments are wrong; nothing but caches of `datasets` has been written then.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
        RunInterrupted: If a signal ended training early, after a checkpoint was saved.
    """
    return TrainingRun(arguments).execute()


class TrainingRun:
    """A run that is ready to start: its output is open and locked, texts and model are read, and the Trainer is made.

    Args:
        arguments: Arguments of the run.

    Raises:
        ValueError: If the arguments are wrong; nothing but caches of `datasets` has been written then.
    """

    # Key of the arguments with the length of sequences.
    length_key = "sequence_length"

    def __init__(self, arguments: Any):
        self.arguments = arguments
        self.config = load_config(arguments)
        check_sequence_length(self.length_key, getattr(arguments, self.length_key), self.config)
        self.tokenizer = tokenizer_of(arguments)
        if arguments.adapters is None:
            try:
                resolve_trainable(self.config, arguments.trainable)
            except ValueError:
                self.read_texts()  # a mistake in the texts is told first: the command was perhaps given a wrong file
                raise
        self._opened = contextlib.ExitStack()
        self.checkpoint = open_output(arguments, self._opened)
        try:
            with data_bars_on_terminals():
                with arguments.main_process_first(desc="reading texts"):
                    self.texts = self.read_data()
                set_seed(arguments.seed)
                self.model, self.files = load_model(arguments, self.config)
                self.uses_cache = self.model.config.use_cache
                self.model, self.dtypes = freeze(self.model, arguments)
                if self.checkpoint is not None and arguments.process_index == 0:
                    print(f"going on from {self.checkpoint}")
                self.protection = protect(self) if arguments.protect else None
                errors = (HfHubHTTPError, OSError) if arguments.push_to_hub else ()
                with refusing(
                    "push_to_hub is true, and the Trainer makes a repository", *errors, reason=_why_not_made
                ):
                    self.trainer = self.make_trainer()
            if self.checkpoint is not None:
                check_checkpoint(self.trainer, self.checkpoint)
            by_main_process(arguments, partial(try_saving, self))
            if self.protection is not None and shares_parameters(self.trainer):
                raise ValueError(
                    "protect compares whole models, and the processes share parameters; expected processes that hold whole models. "
                    "Start the run with configs/accelerate/ddp.yaml."
                )
        except BaseException:
            self._opened.close()
            raise
        num_sequences = len(self.trainer.train_dataset)
        least_steps = arguments.least_steps if choose_epochs(arguments, num_sequences) else 0
        self.stop = StopInOrder(self.trainer.largest)
        self.trainer.add_callback(self.stop)
        self.trainer.add_callback(SaysSteps(self.texts.reads, num_sequences, least_steps))

    def read_texts(self) -> Any:
        """Return the rows of the texts that are trained on, or raise a `ValueError`."""
        arguments = self.arguments
        named = {"split": arguments.corpus_split, "name": arguments.corpus_name}
        return read_corpus(arguments.corpus, text_column=arguments.text_column, **named)

    def read_data(self) -> RunTexts:
        """Return the corpus and held-out texts as sequences.

        Raises:
            ValueError: If a text cannot be read, or does not fit the model.
        """
        arguments = self.arguments
        banks: dict[str, BankLayout] = self.config.memories().banks if isinstance(self.config, MemoryConfig) else {}
        if arguments.tree is not None:
            from midus_hf.topics.tree import folder_of_tree

            roots = growth_of(folder_of_tree(Path(arguments.tree).expanduser()))["roots"]
            banks = {name: layout.with_roots(roots) for name, layout in banks.items()}
        packed, tree = self._sequences("corpus", self.read_texts(), banks)
        held_out = {}
        for name, path in arguments.eval_texts.items():
            key = f"eval_text {name}".rstrip()
            rows = read_corpus(path, key=key, text_column=arguments.text_column)
            held_out[name] = self.held_out_sequences(key, self._sequences(key, rows, banks)[0])
        return RunTexts(packed.sequences, held_out, f"corpus: {packed.phrase(arguments.sequence_length)}", tree)

    def held_out_sequences(self, key: str, packed: PackedTexts) -> Any:
        """Return the sequences of a held-out text, and say what of it is not measured."""
        if packed.dropped:
            say(f"{key}: {packed.phrase(getattr(self.arguments, self.length_key))}")
        return packed.sequences

    def _sequences(self, key: str, rows: Any, banks: Mapping[str, BankLayout]) -> tuple[PackedTexts, str | None]:
        """Return the sequences of a text, and the fingerprint of the tree that its paths belong to, if they name it."""
        arguments, column = self.arguments, self.arguments.path_column
        options: dict[str, Any] = {"documents_apart": arguments.document_mask, "text_column": arguments.text_column}
        options["vocab_size"] = self.config.get_text_config().vocab_size
        if column is None or (key != "corpus" and column not in rows.column_names):
            if key == "corpus" and any(layout.blocks.without_ids == "none" for layout in banks.values()):
                raise ValueError(
                    "the model fetches blocks by the path of a text, and path_column is not given; expected the column that has "
                    "paths. midus cluster assign writes them."
                )
            return packed_sequences(rows, self.tokenizer, arguments.sequence_length, key=key, **options), None
        written = checked_paths(rows, banks, column, key)
        options |= {"paths": written.paths, "depth": max(max(layout.levels) for layout in banks.values())}
        return leaf_sequences(rows, self.tokenizer, arguments.sequence_length, **options), written.tree

    def make_trainer(self) -> Any:
        """Return the Trainer of the run, with its data.

        Raises:
            ValueError: If the model's banks belong to another tree than the texts, or the Trainer refuses the arguments.
        """
        arguments, texts = self.arguments, self.texts
        if arguments.tree is not None or texts.tree is not None:
            use_tree(self.model, arguments.tree, texts.tree)
        return MemoryTrainer(
            self.model,
            arguments,
            train_dataset=texts.train,
            eval_dataset=texts.held_out.get("", texts.held_out) or None,
            data_collator=partial(
                collate, sequence_length=arguments.sequence_length, fill=self.tokenizer.eos_token_id
            ),
        )

    def execute(self) -> TrainResult:
        """Train, save the model, and return the result.

        Raises:
            FloatingPointError: If the loss, a gradient or a trained tensor stops being finite; what is not finite is
                not saved.
            SavedInPart: If the trained model could not be saved or uploaded whole.
            RunInterrupted: If a signal ended training early, after a checkpoint was saved.
        """
        arguments, trainer = self.arguments, self.trainer
        try:
            with self.stop, without_library_bars():
                trainer.train_from(self.checkpoint)
                state, output = trainer.state, Path(arguments.output_dir)
                if self.stop.signal_number:
                    raise RunInterrupted(
                        f"interrupted after step {state.global_step:,}; --resume_from_checkpoint true goes on from "
                        f"{output / f'checkpoint-{state.global_step}'}",
                        self.stop.signal_number,
                    )
                trained = sum(whole_numel(each) for each in trainer.model.parameters() if each.requires_grad)
                trained += sum(bank.layout.bank for bank in ([] if trainer.blocks is None else trainer.blocks.banks))
                trainer.log({"trained_parameters": trained, "peak_memory_bytes": peak_memory_bytes()})
                failures = save_model(self)
                if self.protection is not None and arguments.process_index == 0:
                    self.stop.release()  # the model is saved, so that a signal may end this at once
                    # Without the autocast of accelerate, so that texts are computed in the dtype of the saved model.
                    plain = trainer.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
                    certify(self.protection, plain, output)
                if failures:
                    raise SavedInPart(
                        f"the trained model is in {output}, but without {' and '.join(failures)}; copy what is missing from "
                        f"{arguments.model_name_or_path or arguments.tokenizer_name}."
                    )
                if arguments.push_to_hub and arguments.process_index == 0:
                    upload_model(trainer, arguments)
        finally:
            self._opened.close()
        losses = [event["loss"] for event in state.log_history if "loss" in event]
        tokens, loss = int(state.num_input_tokens_seen), losses[-1] if losses else None
        return TrainResult(str(output), state.global_step, tokens, loss, state.log_history)

    def measure(self) -> dict[str, float]:
        """Measure the held-out texts without training, and return the loss of each, in nats per token, by its name."""
        try:
            with without_library_bars():
                metrics = self.trainer.evaluate()
        finally:
            self._opened.close()
        return {name: metrics[f"eval_{name}_loss"] for name in self.arguments.eval_texts}


def freeze(model: Any, arguments: Any) -> tuple[Any, dict[str, torch.dtype]]:
    """Set what trains in a model, or put adapters on it, and print which; return the model, and its dtypes before training.

    Raises:
        ValueError: If the model lacks what is to train, or cannot have the adapters.
    """
    if arguments.adapters is None:
        report = str(set_trainable(model, arguments.trainable, arguments.frozen))
    else:
        from midus_hf.training.adapters import add_adapters

        model, report = add_adapters(model, arguments.adapters)
    dtypes = hold_for_training(model, arguments.bf16)
    if arguments.process_index == 0:
        print(report)
        if arguments.lacks_bf16:
            print("this device does not compute bfloat16: the run computes in float32; set bf16 to say which")
    return model, dtypes


def choose_epochs(arguments: Any, num_sequences: int) -> bool:
    """Raise the number of epochs, if it may be, to what takes the least number of steps; return whether it was raised."""
    steps = math.ceil(num_sequences / sequences_per_step(arguments))  # of an epoch
    epochs = math.ceil(arguments.least_steps / steps)
    if epochs <= arguments.num_train_epochs:
        return False
    arguments.num_train_epochs = epochs
    if arguments.process_index == 0:
        record_arguments(arguments)
    return True


def protect(run: TrainingRun) -> Protection:
    """Read the protected texts of a run, and take their n-grams out of the tables that train."""
    arguments = run.arguments
    with arguments.main_process_first(desc="reading protected texts"):
        column = getattr(arguments, "text_column", "text")
        read = [read_corpus(each, text_column=column, key="protect")[column] for each in arguments.protect]
        texts = dict(zip(_labels(arguments.protect), map(list, read), strict=True))
    protection = Protection(run.model, run.tokenizer, texts)
    if run.checkpoint is not None:
        protection.check_checkpoint(run.model, run.checkpoint)
    if arguments.process_index == 0:
        print(protection)
    return protection


def certify(protection: Protection, model: Any, output: Path) -> None:
    """Compare the protected texts with and without the memory of a model that is saved, and write the certificate."""
    documents = sum(map(len, protection.texts.values()))
    print(f"the model is saved; comparing {documents:,} protected texts with and without the memory", flush=True)
    protection.certify(model, output)
    print(f"protected: {documents:,} texts have the same logits, bit for bit; {output / CERTIFICATE} says which")


def _labels(sources: Sequence[str]) -> list[str]:
    """Return the last part of each path or id, with a number behind it where several have the same."""
    names = [Path(source).name for source in sources]
    return [
        f"{name} {names[:number].count(name) + 1}" if names.count(name) > 1 else name
        for number, name in enumerate(names)
    ]


def _why_not_made(error: Exception) -> str:
    reason = answer_of_hub(error) or f"the Hub cannot be asked ({first_line(error)})"
    return f"{reason}. Or leave push_to_hub out, and upload the folder later."


def peak_memory_bytes() -> int:
    """Return what PyTorch has allocated on a GPU at most; without a GPU, the largest resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
