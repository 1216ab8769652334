"""One run, from its arguments to the trained model: what is checked, loaded, trained and saved, in this order."""

import contextlib
import dataclasses
import math
import resource
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import HfHubHTTPError
from transformers import set_seed
from transformers.integrations import integration_utils

from midus_hf.config.wording import first_line, print_note
from midus_hf.data.corpus import read_corpus
from midus_hf.data.packing import PackedTexts, checked_paths, collate, leaf_sequences, packed_sequences
from midus_hf.files.checkpoint_files import CONFIG_FILE
from midus_hf.files.full_disk import NotWritten, telling_room
from midus_hf.library_bars import data_bars_on_terminals, without_library_bars
from midus_hf.memories.hierarchical.blocks import BankLayout
from midus_hf.model_names import answer_of_hub
from midus_hf.models.host import MemoryConfig
from midus_hf.saved_models import as_value_error
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.blocks import growth_of, use_tree
from midus_hf.training.callbacks import GracefulStop, RunInterrupted, StepSummary
from midus_hf.training.checkpoints import way_on
from midus_hf.training.loading import check_sequence_length, load_config, load_model, tokenizer_of
from midus_hf.training.optim.freezing import cast_for_training, resolve_trainable, set_trainable, whole_numel
from midus_hf.training.output import open_output, record_arguments
from midus_hf.training.parallel import check_checkpoint, shares_parameters
from midus_hf.training.protection import Protection
from midus_hf.training.saving import PartialSaveError, save_model, upload_model
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
    """Rows that are trained on, sequences of held-out texts by name, a phrase on what is read, and the paths' tree, if any."""

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
    """A run that is ready to start: its output is open and locked, texts and model are read, and the Trainer is made."""

    # Key of the arguments with the length of sequences.
    length_key = "sequence_length"

    def __init__(self, arguments: Any):
        self.arguments = arguments
        self.config = load_config(arguments)
        self.length: int = getattr(arguments, self.length_key)
        check_sequence_length(self.length_key, self.length, self.config)
        self.tokenizer = tokenizer_of(arguments)
        if arguments.adapters is None:
            resolve_trainable(self.config, arguments.trainable)
        self._opened = contextlib.ExitStack()
        self.checkpoint = open_output(arguments, self._opened)
        try:
            with data_bars_on_terminals():
                self._prepare()
        except BaseException:
            self._opened.close()
            raise

    def _prepare(self) -> None:
        """Read texts and model, make the Trainer, and try what the end will do."""
        arguments, is_main = self.arguments, self.arguments.process_index == 0
        for name in arguments.report_to or ():
            if not getattr(integration_utils, f"is_{name}_available", lambda: True)():
                raise ValueError(
                    f"report_to is {name}, whose package is not installed; install it, or set report_to to none."
                )
        with arguments.main_process_first(desc="reading texts"):
            self.texts = self.read_data()
        set_seed(arguments.seed)
        self.model: Any
        self.model, self.files = load_model(arguments, self.config)
        self.uses_cache = self.model.config.use_cache
        if arguments.adapters is None:
            report = str(set_trainable(self.model, arguments.trainable, arguments.frozen))
        else:
            from midus_hf.training.adapters import add_adapters

            self.model, report = add_adapters(self.model, arguments.adapters)
        self.dtypes = cast_for_training(self.model, arguments.bf16)
        if is_main:
            print(report)
            if arguments.lacks_bf16:
                print("this device does not compute bfloat16: the run computes in float32; set bf16 to say which")
            if self.checkpoint is not None:
                print(f"going on from {self.checkpoint}")
        column, self.protection = getattr(arguments, "text_column", "text"), None
        if arguments.protect:
            with arguments.main_process_first(desc="reading protected texts"):
                self.protection = Protection(self.model, self.tokenizer, arguments.protect, column)
            if self.checkpoint is not None:
                self.protection.check_checkpoint(self.model, self.checkpoint)
            if is_main:
                print(self.protection)
        made = "push_to_hub is true, and the Trainer makes a repository"
        of_hub = (HfHubHTTPError, OSError) if arguments.push_to_hub else ()
        with (
            as_value_error("the Trainer cannot be made", ImportError),
            as_value_error(made, *of_hub, reason=_why_not_made),
        ):
            self.trainer = self.make_trainer()
            self.trainer.get_optimizer_cls_and_kwargs(arguments)  # imports its package, which may be absent
        if self.checkpoint is not None:
            check_checkpoint(self.trainer, self.checkpoint)
        if self.protection is not None and shares_parameters(self.trainer):
            raise ValueError(
                "protect compares whole models, and the processes share parameters; expected processes that hold whole models. "
                "Start the run with configs/accelerate/ddp.yaml."
            )
        num_sequences = len(self.trainer.train_dataset)
        least_steps = arguments.least_steps
        epochs = math.ceil(least_steps / math.ceil(num_sequences / arguments.sequences_per_step))
        if epochs > arguments.num_train_epochs:  # nobody gave them, and they are too few for the least number of steps
            arguments.num_train_epochs = epochs
            if is_main:
                record_arguments(arguments)
        else:
            least_steps = 0
        self.stop = GracefulStop(self.trainer.largest)
        self.trainer.add_callback(self.stop)
        self.trainer.add_callback(StepSummary(self.texts.reads, num_sequences, least_steps))

    def read_data(self) -> RunTexts:
        """Return the corpus and held-out texts as sequences."""
        banks: dict[str, BankLayout] = self.config.memories().banks if isinstance(self.config, MemoryConfig) else {}
        if self.arguments.tree is not None:
            from midus_hf.topics.tree import folder_of_tree

            roots = growth_of(folder_of_tree(Path(self.arguments.tree).expanduser()))["roots"]
            banks = {name: layout.with_roots(roots) for name, layout in banks.items()}
        named = {"split": self.arguments.corpus_split, "name": self.arguments.corpus_name}
        rows = read_corpus(self.arguments.corpus, text_column=self.arguments.text_column, **named)
        packed, tree = self._sequences("corpus", rows, banks)
        held_out = self.read_held_out(lambda key, rows: self._sequences(key, rows, banks)[0])
        return RunTexts(packed.sequences, held_out, f"corpus: {packed.phrase(self.length)}", tree)

    def read_held_out(self, pack: Any) -> dict[str, Any]:
        """Return the sequences of held-out texts by name, as a function packs them, and say what of them is not measured."""
        held_out = {}
        for name, path in self.arguments.eval_texts.items():
            key = f"eval_text {name}".rstrip()
            column = getattr(self.arguments, "text_column", "text")
            packed = pack(key, read_corpus(path, key=key, text_column=column))
            if packed.dropped:
                print_note(f"{key}: {packed.phrase(self.length)}")
            held_out[name] = packed.sequences
        return held_out

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
            return packed_sequences(rows, self.tokenizer, self.length, key=key, **options), None
        written = checked_paths(rows, banks, column, key)
        options |= {"paths": written.paths, "depth": max(max(layout.levels) for layout in banks.values())}
        return leaf_sequences(rows, self.tokenizer, self.length, **options), written.tree

    def make_trainer(self) -> Any:
        arguments, texts = self.arguments, self.texts
        if arguments.tree is not None or texts.tree is not None:
            use_tree(self.model, arguments.tree, texts.tree)
        return MemoryTrainer(
            self.model,
            arguments,
            train_dataset=texts.train,
            eval_dataset=texts.held_out.get("", texts.held_out) or None,
            data_collator=partial(collate, sequence_length=self.length, fill=self.tokenizer.eos_token_id),
        )

    def execute(self) -> TrainResult:
        """Train, save the model, and return the result; raise `PartialSaveError` if not all of it could be saved or uploaded."""
        arguments, trainer, output = self.arguments, self.trainer, Path(self.arguments.output_dir)
        try:
            with self.stop, without_library_bars(), telling_room(output):
                trainer.train_from(self.checkpoint)
                state = trainer.state
                if self.stop.signal_number:
                    saved = output / f"checkpoint-{state.global_step}"
                    way = f"--resume_from_checkpoint true goes on from {saved}"
                    if arguments.save_only_model:
                        way = f"{saved} has what trained alone, by save_only_model, and no run can go on from it"
                    raise RunInterrupted(
                        f"interrupted after step {state.global_step:,}; {way}", self.stop.signal_number
                    )
                trained = sum(whole_numel(each) for each in trainer.model.parameters() if each.requires_grad)
                trained += sum(bank.layout.bank for bank in ([] if trainer.blocks is None else trainer.blocks.banks))
                trainer.log({"trained_parameters": trained, "peak_memory_bytes": peak_memory_bytes()})
                failures = save_model(self)
                if self.protection is not None and arguments.process_index == 0:
                    self.stop.release()  # the model is saved, so that a signal may end this at once
                    # Without the autocast of accelerate, so that texts are computed in the dtype of the saved model.
                    plain = trainer.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
                    self.protection.certify(plain, output)
                if failures:
                    raise PartialSaveError(
                        f"the trained model is in {output}, but without {' and '.join(failures)}; copy what is missing from "
                        f"{arguments.model_name_or_path or arguments.tokenizer_name}."
                    )
                if arguments.push_to_hub and arguments.process_index == 0:
                    upload_model(trainer, arguments)
        except NotWritten as error:
            kept = f"the trained model is in {output}, but " if (output / CONFIG_FILE).is_file() else ""
            raise PartialSaveError(f"{kept}{error.facts}. Make room there, and {way_on(output)}.") from error
        finally:
            self._opened.close()
        losses = [event["loss"] for event in state.log_history if "loss" in event]
        tokens, loss = int(state.num_input_tokens_seen), losses[-1] if losses else None
        return TrainResult(str(output), state.global_step, tokens, loss, state.log_history)

    def measure(self) -> dict[str, float]:
        """Measure the held-out texts without training, and return the loss of each, in nats per token, by its name."""
        with self._opened, without_library_bars():
            metrics = self.trainer.evaluate()
        return {name: metrics[f"eval_{name}_loss"] for name in self.arguments.eval_texts}


def _why_not_made(error: Exception) -> str:
    reason = answer_of_hub(error) or f"the Hub cannot be asked ({first_line(error)})"
    return f"{reason}. Or leave push_to_hub out, and upload the folder later."


def peak_memory_bytes() -> int:
    """Return what PyTorch has allocated on a GPU at most; without a GPU, the largest resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
