"""One run, from its arguments to the trained model: what is checked, loaded, trained and saved, in this order."""

import contextlib
import dataclasses
import importlib.util
import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled

from midus_hf.banks.bank_description import grown_layouts
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.wording import first_line, install_extra
from midus_hf.files.checkpoint_files import ACCOMPANYING, CARD_FILE, CERTIFICATE, CONFIG, refuse_lfs_pointers
from midus_hf.library_bars import data_bars_on_terminals, without_library_bars
from midus_hf.model_names import answer_of_hub
from midus_hf.models.host import MemoryConfig
from midus_hf.saved_models import check_whole, load_model, load_tokenizer, refusing
from midus_hf.topics.corpus import read_corpus, say
from midus_hf.training.arguments import MemoryArguments, TrainArguments
from midus_hf.training.blocks import use_tree
from midus_hf.training.callbacks import RunInterrupted, SaysSteps, StopInOrder
from midus_hf.training.data.leaves import checked_paths, leaf_sequences
from midus_hf.training.data.packing import IGNORED_LABEL, Packed, packed_sequences
from midus_hf.training.optim.freezing import (
    has_adapters,
    hold_for_training,
    resolve_trainable,
    restore_dtypes,
    set_trainable,
    whole_numel,
)
from midus_hf.training.output import (
    by_main_process,
    close_output,
    new_card,
    open_output,
    readable_card,
    record_arguments,
    sequences_per_step,
)
from midus_hf.training.parallel import check_checkpoint, shares_parameters
from midus_hf.training.protection import Protected
from midus_hf.training.saving import SavedInPart, save_model, source_of, try_saving, upload_model
from midus_hf.training.trainer import MemoryTrainer, TrainsMemory


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


def collate(rows: list[dict[str, Any]], sequence_length: int, fill: int) -> dict[str, torch.Tensor]:
    """Return the columns of rows as tensors `[B, T]`, int64; tokens are their own labels where rows have none.

    A shorter row is filled up behind its end: with the token `fill`, on which no loss is computed, and to which no other token
    attends. Only batches with such a row have an attention mask, unless positions keep texts apart.
    """
    missing = [sequence_length - len(row["input_ids"]) for row in rows]
    if any(missing):
        rows = [_filled_up(row, count, fill) for row, count in zip(rows, missing, strict=True)]
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return batch if "labels" in batch else {**batch, "labels": batch["input_ids"].clone()}


def _filled_up(row: dict[str, Any], count: int, fill: int) -> dict[str, Any]:
    tokens = row["input_ids"]
    labels = [*row.get("labels", tokens), *[IGNORED_LABEL] * count]
    filled = {**row, "input_ids": [*tokens, *[fill] * count], "labels": labels}
    if "position_ids" in row:  # what fills up is a text of its own
        return {**filled, "position_ids": [*row["position_ids"], *range(count)]}
    return {**filled, "attention_mask": [1] * len(tokens) + [0] * count}


def load_config(arguments: MemoryArguments) -> PreTrainedConfig:
    """Load the config of a run's model, and check what can be checked without weights.

    Raises:
        ValueError: If the config cannot be read, or lacks what a key needs.
    """
    source = arguments.model_name_or_path or arguments.config_name
    if source is None:
        raise ValueError("model_name_or_path is None; expected the folder or Hub id of the model to train.")
    path = Path(source).expanduser()
    with refusing(_expected(arguments), OSError, ValueError):
        made_from = path if arguments.config_name is not None and path.exists() else source
        refuse_lfs_pointers(Path(made_from), CONFIG)
        config = AutoConfig.from_pretrained(made_from, trust_remote_code=False)
    if arguments.config_name is not None and hasattr(config, "upscale"):
        del config.upscale  # it describes a base whose weights this model does not have
    hosts_memory = isinstance(config, MemoryConfig)
    if hosts_memory and getattr(arguments, "use_liger_kernel", False):
        raise ValueError(
            f"use_liger_kernel is true, and Liger has no kernels for {config.model_type}; expected a model without memory. "
            "Leave it out."
        )
    if arguments.adapters is None:
        return config
    if importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"adapters need peft, which is not installed; {install_extra('train')}, or leave adapters out."
        )
    from midus_hf.training.adapters import read_adapters

    assert isinstance(arguments.adapters, dict), "checked by the arguments"
    read_adapters(arguments.adapters)
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "adapters are merged into weights at the end, which DeepSpeed's ZeRO-3 cuts; expected processes that hold whole "
            "models. Start the run with configs/accelerate/ddp.yaml."
        )
    return config


def held_out_sequences(key: str, packed: Packed, sequence_length: int) -> Any:
    """Return the sequences of a held-out text, and say what of it is not measured."""
    if packed.dropped:
        say(f"{key}: {packed.phrase(sequence_length)}")
    return packed.sequences


def check_sequence_length(key: str, sequence_length: int, config: PreTrainedConfig) -> None:
    """Check that the model has positions for sequences of this length.

    Args:
        key: Name of the key in messages, such as `"sequence_length"`.

    Raises:
        ValueError: If the model has too few positions.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and sequence_length > limit:
        raise ValueError(
            f"{key} is {sequence_length}, but the model has positions for {limit} tokens. Lower {key}, or first raise "
            "max_position_embeddings in the model's config.json, with the rope scaling that it then needs."
        )


def tokenizer_of(arguments: MemoryArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is saved with the model, or that the arguments name, or raise `ValueError`."""
    source = arguments.model_name_or_path or arguments.tokenizer_name
    assert source is not None, "a config is named with a tokenizer"
    message = (
        f"tokenizer_name is {source!r}; expected the folder or Hub id of a tokenizer"
        if arguments.model_name_or_path is None
        else f"model_name_or_path is {source!r}, which has no tokenizer that loads"
    )
    with refusing(message, OSError, ValueError):
        return load_tokenizer(source)


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
        self.checkpoint, self._lock = open_output(arguments)
        self._protected: Protected | None = None
        try:
            with data_bars_on_terminals():
                with arguments.main_process_first(desc="reading texts"):
                    self.read_data()
                self.model: Any = self._prepare_model()
                if arguments.protect:
                    self._protect()
                errors = (HfHubHTTPError, OSError) if arguments.push_to_hub else ()
                with refusing(
                    "push_to_hub is true, and the Trainer makes a repository", *errors, reason=_why_not_made
                ):
                    self.trainer: Any = self.make_trainer()
            if self.checkpoint is not None:
                check_checkpoint(self.trainer, self.checkpoint)
            by_main_process(arguments, partial(try_saving, self))
            if arguments.protect and shares_parameters(self.trainer):
                raise ValueError(
                    "protect compares whole models, and the processes share parameters; expected processes that hold whole models. "
                    "Start the run with configs/accelerate/ddp.yaml."
                )
        except BaseException:
            close_output(arguments, self._lock)
            raise
        self._stop = StopInOrder(self.trainer.largest)
        self.trainer.add_callback(self._stop)
        trained: Any = self.trainer.train_dataset
        least_steps = arguments.least_steps if self._choose_epochs(len(trained)) else 0
        self.trainer.add_callback(SaysSteps(self.reads, len(trained), least_steps))

    def read_texts(self) -> Any:
        """Return the rows of the texts that are trained on.

        Raises:
            ValueError: If they cannot be read.
        """
        arguments = self.arguments
        named = {"split": arguments.corpus_split, "name": arguments.corpus_name}
        return read_corpus(arguments.corpus, text_column=arguments.text_column, **named)

    def read_data(self) -> None:
        """Read the corpus, and held-out texts by name, as sequences; `self.dataset` and `self.held_out` get them.

        Raises:
            ValueError: If a text cannot be read, or does not fit the model.
        """
        arguments = self.arguments
        memories = self.config.memories() if isinstance(self.config, MemoryConfig) else None
        banks: dict[str, BankLayout] = {} if memories is None else memories.banks
        if arguments.tree is not None:
            from midus_hf.topics.tree_files import folder_of_tree

            banks = grown_layouts(banks, folder_of_tree(Path(arguments.tree).expanduser()))
        packed, self._tree = self._sequences("corpus", banks)
        self.dataset, self.reads = packed.sequences, f"corpus: {packed.phrase(arguments.sequence_length)}"
        self.held_out = {
            name: held_out_sequences(key, self._sequences(key, banks, path)[0], arguments.sequence_length)
            for name, path in arguments.eval_texts.items()
            for key in [f"eval_text {name}".rstrip()]
        }

    def _sequences(self, key: str, banks: Mapping[str, BankLayout], source: str = "") -> tuple[Packed, str | None]:
        """Return the sequences of a text, and the fingerprint of the tree that its paths belong to, if they name it."""
        arguments, tokenizer = self.arguments, self.tokenizer
        is_corpus, column = key == "corpus", arguments.path_column
        rows = self.read_texts() if is_corpus else read_corpus(source, key=key, text_column=arguments.text_column)
        options: dict[str, Any] = {"documents_apart": arguments.document_mask, "text_column": arguments.text_column}
        options["vocab_size"] = self.config.get_text_config().vocab_size
        if column is None or (not is_corpus and column not in rows.column_names):
            if is_corpus and any(layout.blocks.without_ids == "none" for layout in banks.values()):
                raise ValueError(
                    "the model fetches blocks by the path of a text, and path_column is not given; expected the column that has "
                    "paths. midus cluster assign writes them."
                )
            return packed_sequences(rows, tokenizer, arguments.sequence_length, key=key, **options), None
        written = checked_paths(rows, banks, column, key)
        options |= {"paths": written.paths, "depth": max(max(layout.levels) for layout in banks.values())}
        return leaf_sequences(rows, tokenizer, arguments.sequence_length, **options), written.tree

    def _prepare_model(self) -> Any:
        """Load or make the model, set what trains, or put adapters on it, and return it.

        Raises:
            ValueError: If the model cannot be loaded, lacks what is to train, or cannot have the adapters.
        """
        arguments = self.arguments
        set_seed(arguments.seed)
        with _loaded_whole():
            model, self.files = _load_model(arguments, self.config)
        self._use_cache = model.config.use_cache
        if arguments.adapters is None:
            report = str(set_trainable(model, arguments.trainable, arguments.frozen))
        else:
            from midus_hf.training.adapters import add_adapters

            model, report = add_adapters(model, arguments.adapters)  # type: ignore[assignment]
        self.dtypes = hold_for_training(model, arguments.bf16)
        if arguments.process_index == 0:
            print(report)
            if arguments.lacks_bf16:
                print("this device does not compute bfloat16: the run computes in float32; set bf16 to say which")
            if self.checkpoint is not None:
                print(f"going on from {self.checkpoint}")
        return model

    def make_trainer(self) -> TrainsMemory:
        """Return the Trainer of the run, with its data.

        Raises:
            ValueError: If the model's banks belong to another tree than the texts, or the Trainer refuses the arguments.
        """
        if self.arguments.tree is not None or self._tree is not None:
            use_tree(self.model, self.arguments.tree, self._tree)
        return MemoryTrainer(
            self.model,
            self.arguments,
            train_dataset=self.dataset,
            eval_dataset=self.held_out.get("", self.held_out) or None,
            data_collator=partial(
                collate, sequence_length=self.arguments.sequence_length, fill=self.tokenizer.eos_token_id
            ),
        )

    def _choose_epochs(self, num_sequences: int) -> bool:
        """Raise the number of epochs, if it may be, to what takes the least number of steps; return whether it was raised."""
        arguments = self.arguments
        steps = math.ceil(num_sequences / sequences_per_step(arguments))  # of an epoch
        epochs = math.ceil(arguments.least_steps / steps)
        if epochs <= arguments.num_train_epochs:
            return False
        arguments.num_train_epochs = epochs
        if arguments.process_index == 0:
            record_arguments(arguments)
        return True

    def _protect(self) -> None:
        """Read the protected texts, and take their n-grams out of the tables that train."""
        arguments = self.arguments
        with arguments.main_process_first(desc="reading protected texts"):
            column = getattr(arguments, "text_column", "text")
            read = [read_corpus(each, text_column=column, key="protect")[column] for each in arguments.protect]
            texts = dict(zip(_labels(arguments.protect), map(list, read), strict=True))
        self._protected = Protected(self.model, self.tokenizer, texts)
        if self.checkpoint is not None:
            self._protected.check_checkpoint(self.model, self.checkpoint)
        if arguments.process_index == 0:
            print(self._protected)

    def _certify(self, protected: Protected, trainer: TrainsMemory, output: Path) -> None:
        """Write the certificate of the protected texts. The model is saved already, so that a signal may end this at once."""
        self._stop.release()
        documents = sum(map(len, protected.texts.values()))
        print(f"the model is saved; comparing {documents:,} protected texts with and without the memory", flush=True)
        # Without the autocast of accelerate, so that texts are computed in the dtype of the saved model.
        protected.certify(trainer.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False), output)
        print(f"protected: {documents:,} texts have the same logits, bit for bit; {output / CERTIFICATE} says which")

    def execute(self) -> TrainResult:
        """Train, save the model, and return the result.

        Raises:
            FloatingPointError: If the loss, a gradient or a trained tensor stops being finite; what is not finite is
                not saved.
            SavedInPart: If the trained model could not be saved or uploaded whole.
            RunInterrupted: If a signal ended training early, after a checkpoint was saved.
        """
        try:
            with self._stop, without_library_bars():
                self.trainer.train_from(self.checkpoint)
                if self._stop.signal_number:
                    step, folder = self.trainer.state.global_step, Path(self.arguments.output_dir)
                    raise RunInterrupted(
                        f"interrupted after step {step:,}; resume_from_checkpoint=true goes on from "
                        f"{folder / f'checkpoint-{step}'}",
                        self._stop.signal_number,
                    )
                state: Any = self.trainer.state
                trained = sum(whole_numel(each) for each in self.trainer.model.parameters() if each.requires_grad)
                blocks = [] if self.trainer.blocks is None else self.trainer.blocks.banks
                trained += sum(bank.layout.bank for bank in blocks)
                self.trainer.log({"trained_parameters": trained, "peak_memory_bytes": peak_memory_bytes()})
                losses = [event["loss"] for event in state.log_history if "loss" in event]
                result = TrainResult(
                    str(self.arguments.output_dir),
                    state.global_step,
                    int(state.num_input_tokens_seen),
                    losses[-1] if losses else None,
                    state.log_history,
                )
                self._save(self.trainer, result)
            return result
        finally:
            close_output(self.arguments, self._lock)

    def measure(self) -> dict[str, float]:
        """Measure the held-out texts without training, and return the loss of each, in nats per token, by its name."""
        try:
            with without_library_bars():
                metrics = self.trainer.evaluate()
        finally:
            close_output(self.arguments, self._lock)
        return {name: metrics[f"eval_{name}_loss"] for name in self.arguments.eval_texts}

    def _save(self, trainer: TrainsMemory, result: TrainResult) -> None:
        """Save model and tokenizer whole, with the dtypes, cache setting and further files that the model came with."""
        arguments, model = self.arguments, self.model
        trainer.check_finite()
        if shares_parameters(trainer):
            trainer.saved_dtypes = self.dtypes
        else:
            restore_dtypes(model, self.dtypes)
        if has_adapters(model):
            trainer.model = model = model.merge_and_unload()
        model.config.use_cache = self._use_cache
        failures = save_model(self, model)
        if self._protected is not None and arguments.process_index == 0:
            self._certify(self._protected, trainer, Path(arguments.output_dir))
        if failures:
            raise SavedInPart(
                f"the trained model is in {arguments.output_dir}, but without {' and '.join(failures)}; copy what is missing from "
                f"{arguments.model_name_or_path or arguments.tokenizer_name}."
            )
        if arguments.push_to_hub and arguments.process_index == 0:
            upload_model(trainer, arguments)


def _why_not_made(error: Exception) -> str:
    reason = answer_of_hub(error) or f"the Hub cannot be asked ({first_line(error)})"
    return f"{reason}. Or leave push_to_hub out, and upload the folder later."


def peak_memory_bytes() -> int:
    """Return what PyTorch has allocated on a GPU at most; without a GPU, the largest resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _labels(sources: Sequence[str]) -> list[str]:
    """Return the last part of each path or id, with a number behind it where several have the same."""
    names = [Path(source).name for source in sources]
    return [
        f"{name} {names[:number].count(name) + 1}" if names.count(name) > 1 else name
        for number, name in enumerate(names)
    ]


def _load_model(arguments: Any, config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, bytes]]:
    """Load or make the model, and return it with the contents, by name, of the files that accompany it.

    A saved model has the dtype of its checkpoint, of which only safetensors are read. A new model draws its weights
    from torch's random generator, and comes with a card that says so.
    """
    attention, source = arguments.attn_implementation, arguments.model_name_or_path
    with refusing(_expected(arguments), OSError, ValueError, ImportError, SafetensorError):
        if source is None:
            made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=False)
            return made, {CARD_FILE: new_card(arguments, config.model_type)}
        options = {"config": config, "attn_implementation": attention, "use_safetensors": True}
        model, missing = load_model(source, **options)
    check_whole(source, missing)
    return model, _accompanying_files(source)


def _accompanying_files(model: str) -> dict[str, bytes]:
    """Return the contents, by name, of files beside the model that match `ACCOMPANYING`; `{}` if the download fails."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, allow_patterns=list(ACCOMPANYING)))
        except (HfHubHTTPError, OSError):
            return {}
    paths = sorted(path for pattern in ACCOMPANYING for path in folder.glob(pattern) if path.is_file())
    files = {path.name: path.read_bytes() for path in paths}
    return files if CARD_FILE not in files else {**files, CARD_FILE: readable_card(files[CARD_FILE])}


def _expected(arguments: MemoryArguments) -> str:
    """Return the beginning of messages about a model that cannot be loaded or made."""
    what = "language model" if arguments.model_name_or_path is not None else "language model's config"
    where = "folder or Hub id" if arguments.model_name_or_path is not None else "file, folder or Hub id"
    return f"{source_of(arguments)}; expected the {where} of a {what}"


@contextlib.contextmanager
def _loaded_whole() -> Iterator[None]:
    """Load or make models whole in each process inside the context; DeepSpeed cuts them for training.

    Otherwise, once `TrainingArguments` exist, transformers lets ZeRO-3 cut parameters while a model is loaded. Checks
    before training would then read the dtypes and sizes of empty tensors.
    """
    config_before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config_before
