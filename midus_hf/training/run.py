"""One run, from its arguments to the trained model: what is checked, loaded, trained and saved, in this order."""

import contextlib
import copy
import dataclasses
import importlib.util
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from huggingface_hub import snapshot_download, upload_folder
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console, RenderableType
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from midus_hf import saved_models
from midus_hf.banks.bank_description import grown_layouts, growth_of
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.wording import install_extra
from midus_hf.files.checkpoint_files import ACCOMPANYING
from midus_hf.library_bars import without_library_bars
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.saved_models import refusing
from midus_hf.training.arguments import MemoryArguments, TrainArguments
from midus_hf.training.callbacks import ProgressTable, RunInterrupted, StopOnSignal, TrainingLog
from midus_hf.training.checkpoints import SaveError, is_write_failure
from midus_hf.training.data.corpus import read_corpus
from midus_hf.training.data.leaves import check_paths, leaf_sequences, tree_of_paths
from midus_hf.training.data.packing import packed_sequences
from midus_hf.training.optim.freezing import has_adapters, resolve_trainable, set_trainable
from midus_hf.training.optim.tensors import hold_for_training, restore_dtypes, whole_numel
from midus_hf.training.output import (
    add_training,
    close_output,
    log_file,
    new_card,
    open_output,
    partial_model,
    publish,
)
from midus_hf.training.tables import check_reads_few_rows
from midus_hf.training.trainer import MemoryTrainer, TrainsMemory

# Label of tokens that transformers' losses leave out.
IGNORED_LABEL = -100


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Args:
        output: Folder of the trained model.
        steps: Number of optimizer steps, including steps before a resumption.
        tokens: Number of tokens that all processes trained on, including tokens before a resumption.
        loss: Mean loss of the last log event; None if there was none.
        seconds: Wall time of the training loop in seconds, without the time before a resumption.
        tokens_per_second: Tokens of all processes per second in this time; None if the loop took no step.
        trained_parameters: Number of parameters that trained.
        peak_memory_bytes: Peak memory of this process: allocated by PyTorch on the GPU, or resident without a GPU.
    """

    output: str
    steps: int
    tokens: int
    loss: float | None
    seconds: float
    tokens_per_second: float | None
    trained_parameters: int
    peak_memory_bytes: int


def train(arguments: TrainArguments) -> TrainResult:
    """Pretrain a model on text, from its weights or from the beginning.

    The function prints what trains, and writes to `arguments.output_dir` the trained model and its tokenizer,
    checkpoints, `log.jsonl` and the arguments (`train_config.yaml`).

    Raises:
        ValueError: If the arguments are wrong; nothing but caches of `datasets` has been written then.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
        RunInterrupted: If a signal ended training early, after a checkpoint was saved.
        SaveError: If a checkpoint or the trained model could not be written.
    """
    return prepare(arguments).execute()


def prepare(arguments: TrainArguments) -> "Run":
    """Check the arguments of a run, open its output, read texts and model, and return the run, ready to start.

    Raises:
        ValueError: If the arguments are wrong; nothing but caches of `datasets` has been written then.
    """
    model_config = load_config(arguments)
    check_sequence_length("sequence_length", arguments.sequence_length, model_config)
    memories = model_config.memories() if isinstance(model_config, MemoryConfig) else None
    if memories is not None and memories.reads_prompts:
        raise ValueError(
            "routing is 'prompt', and plain text has no prompts; expected chats, which midus sft trains on, or a model upscaled with "
            "routing = 'chunk'."
        )
    from midus_hf.topics.tree_files import folder_of_tree

    folder = None if arguments.tree is None else folder_of_tree(Path(arguments.tree).expanduser())
    banks: dict[str, BankLayout] = {} if memories is None else grown_layouts(memories.banks, folder)
    tokenizer = load_tokenizer(arguments)
    with Run(arguments) as run:
        with arguments.main_process_first(desc="reading the corpus"):
            dataset, tree = _sequences("corpus", arguments.corpus, arguments, tokenizer, model_config, banks)
            held_out = {
                name: _sequences(f"eval_text {name}".rstrip(), path, arguments, tokenizer, model_config, banks)[0]
                for name, path in arguments.eval_texts.items()
            }
        run.load_model(model_config, tree_of_run(arguments, tree))
        run.make_trainer(
            MemoryTrainer,
            tokenizer,
            train_dataset=dataset,
            eval_dataset=held_out.get("", held_out) or None,
            data_collator=collate,
        )
    return run


def _sequences(
    key: str,
    corpus: Any,
    arguments: TrainArguments,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    banks: Mapping[str, BankLayout],
) -> tuple[Any, str | None]:
    """Return the sequences of a text, and the fingerprint of the tree that its paths belong to, if they name it."""
    is_corpus, column = key == "corpus", arguments.path_column
    named = {"split": arguments.corpus_split, "name": arguments.corpus_name} if is_corpus else {}
    with refusing(f"{key} is {corpus!r}, which cannot be read", OSError):
        rows = read_corpus(corpus, text_column=arguments.text_column, **named)
    options: dict[str, Any] = {"documents_apart": arguments.document_mask, "text_column": arguments.text_column}
    options["vocab_size"] = model_config.get_text_config().vocab_size
    if column is None or (not is_corpus and column not in rows.column_names):
        if is_corpus and any(layout.blocks.without_ids == "none" for layout in banks.values()):
            raise ValueError(
                "the model fetches blocks by the path of a text, and path_column is not given; expected the column that has paths. "
                "midus cluster assign writes them."
            )
        return packed_sequences(rows, tokenizer, arguments.sequence_length, **options), None
    check_paths(rows, banks, column, key)
    depth = max(max(layout.levels) for layout in banks.values())
    sequences = leaf_sequences(rows, tokenizer, arguments.sequence_length, path_column=column, depth=depth, **options)
    return sequences, tree_of_paths(rows, column)


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the columns of rows as tensors `[B, ...]`, int64; tokens are their own labels where rows have none."""
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return batch if "labels" in batch else {**batch, "labels": batch["input_ids"].clone()}


@dataclasses.dataclass(frozen=True)
class RunTree:
    """The tree to which the paths of a run's texts belong: fingerprint, folder, and shape (levels and branching) there."""

    fingerprint: str | None = None
    folder: Path | None = None
    shape: tuple[int, int] | None = None


def tree_of_run(arguments: TrainArguments, of_corpus: str | None) -> RunTree:
    """Return the tree of a run, from the fingerprint that its corpus names and the folder that its arguments name.

    Raises:
        ValueError: If the two are different trees, or the tree cannot be read.
    """
    if arguments.tree is None:
        return RunTree(of_corpus)
    from midus_hf.topics.tree import ClusterTree
    from midus_hf.topics.tree_files import folder_of_tree

    tree = ClusterTree.load(arguments.tree)
    if of_corpus not in (None, tree.fingerprint):
        raise ValueError(
            f"corpus belongs to the tree with the fingerprint {of_corpus[:16]}..., and tree {arguments.tree!r} has "
            f"{tree.fingerprint[:16]}...; expected one tree. Assign all texts by the same tree."
        )
    return RunTree(tree.fingerprint, folder_of_tree(Path(arguments.tree).expanduser()), (tree.levels, tree.branching))


def use_tree(model: Any, tree: RunTree) -> None:
    """Check that the banks of a model belong to the tree of a run, and save the tree with banks that train.

    Raises:
        ValueError: If a bank was trained with another tree, or the tree has another shape.
    """
    if tree == RunTree():
        return
    remedy = "Assign texts by the tree of the model, or train a model whose bank was not trained yet."
    for module in model.modules():
        if isinstance(module, MemoryModel) and module.own_banks.are_open:
            banks = module.own_banks
            for name, layout in banks.layouts.items():
                shape = (layout.num_levels, layout.blocks.branching)
                if tree.shape is not None and tree.shape != shape:
                    raise ValueError(
                        f"tree {str(tree.folder)!r} has {tree.shape[0]} levels of {tree.shape[1]}, and memory {name!r} fetches "
                        f"blocks by a tree of {shape[0]} levels of {shape[1]}; expected one tree. Build one of this shape."
                    )
            banks.check_tree(tree.fingerprint, "the corpus", remedy, **growth_of(tree.folder))
            banks.train_with_tree(tree.fingerprint, tree.folder)


def load_config(arguments: MemoryArguments) -> PreTrainedConfig:
    """Load the config of a run's model, and check what can be checked without weights.

    Raises:
        ValueError: If the config cannot be read, does not say what trains, or lacks what a key needs.
    """
    source = arguments.model_name_or_path or arguments.config_name
    assert source is not None, "the arguments name a model"
    path = Path(source).expanduser()
    if arguments.config_name is not None and path.suffix == ".json" and not path.exists():
        raise ValueError(f"config_name is {source!r}, which does not exist; give another file.")
    with refusing(_expected(arguments), OSError, ValueError):
        made_from = path if arguments.config_name is not None and path.exists() else source
        config = AutoConfig.from_pretrained(made_from, trust_remote_code=False)
    if arguments.config_name is not None and hasattr(config, "upscale"):
        del config.upscale  # it describes a base whose weights this model does not have
    if arguments.adapters is None:
        resolve_trainable(config, arguments.trainable)
    elif importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"adapters need peft, which is not installed; {install_extra('train')}, or leave adapters out."
        )
    else:
        from midus_hf.training.adapters import check_adapters

        check_adapters(arguments.adapters, config)
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "adapters are merged into weights at the end, which DeepSpeed's ZeRO-3 cuts; expected processes that hold whole "
                "models. Start the run with configs/accelerate/ddp.yaml."
            )
    for name in ("balance_loss", "usage_steps"):
        if getattr(arguments, name) and not getattr(config, "memory", None):
            raise ValueError(
                f"{name} is {getattr(arguments, name)}, but this {config.model_type} model has no memory layers; train one that has, "
                f"or leave {name} out."
            )
    _check_attention(arguments.attn_implementation, config)
    return config


def _check_attention(attention: str | None, config: PreTrainedConfig) -> None:
    """Refuse an implementation of attention that is not installed or that the model does not have, before weights are read.

    A config of no language model passes this check: making the model gives the reason.
    """
    if attention is None or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    message = (
        f"attn_implementation is {attention!r}; expected one that is installed and that a {config.model_type} model has, such as "
        "sdpa or eager"
    )
    with refusing(message, OSError, ValueError, ImportError), torch.device("meta"):
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, trust_remote_code=False)


def check_sequence_length(key: str, sequence_length: int, config: PreTrainedConfig) -> None:
    """Check that the model has positions for sequences of this length.

    The limit is the config's `max_position_embeddings`, or the original context times the factor of rope scaling if that
    is larger: some configs with rope scaling do not have a raised `max_position_embeddings`.

    Args:
        key: Name of the key in messages, such as `"sequence_length"`.

    Raises:
        ValueError: If the model has too few positions.
    """
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is None:
        return
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one set for all layers, or one set per kind of layer
        if isinstance(parameters, dict) and parameters.get("original_max_position_embeddings"):
            stretched = parameters["original_max_position_embeddings"] * (parameters.get("factor") or 1)
            limit = max(limit, int(stretched))
    if sequence_length > limit:
        raise ValueError(
            f"{key} is {sequence_length}, but the model has positions for {limit} tokens. Lower {key}, or first raise "
            "max_position_embeddings in the model's config.json, with the rope scaling that it then needs."
        )


def load_tokenizer(arguments: MemoryArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is saved with the model, or that the arguments name, or raise `ValueError`."""
    source = arguments.model_name_or_path or arguments.tokenizer_name
    assert source is not None, "a config is named with a tokenizer"
    message = (
        f"tokenizer_name is {source!r}; expected the folder or Hub id of a tokenizer"
        if arguments.model_name_or_path is None
        else f"model_name_or_path is {source!r}, which has no tokenizer"
    )
    with refusing(message, OSError, ValueError):
        return saved_models.load_tokenizer(source)


class Run:
    """A run whose output is open and locked; as a context, it closes the output again if its preparation fails.

    Raises:
        ValueError: As `open_output`.
    """

    model: Any
    trainer: Any
    tokenizer: PreTrainedTokenizerBase

    def __init__(self, arguments: Any):
        self.arguments = arguments
        self.checkpoint, self._lock = open_output(arguments)
        self._dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, bytes] = {}
        self._use_cache = True

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            close_output(self.arguments, self._lock)

    def load_model(
        self,
        config: PreTrainedConfig,
        tree: RunTree | None = None,
        choose: Callable[[Any, PreTrainedModel], tuple[Any, RenderableType]] | None = None,
    ) -> Any:
        """Load or make the model, set what trains, and return the model, wrapped by PEFT if it has adapters.

        Args:
            choose: Sets what trains, and returns the model and a description. Default: None, `choose_what_trains`.

        Raises:
            ValueError: If the model cannot be loaded, or lacks what is to train.
        """
        arguments = self.arguments
        set_seed(arguments.seed)
        with _loaded_whole():
            model, self._files = _load_model(arguments, config)
        self._use_cache = model.config.use_cache
        if tree is not None:
            use_tree(model, tree)
        for key in ("sparse_values", "shard_values"):
            if getattr(arguments, key):
                check_reads_few_rows(model, key)
        self.model, report = (choose or choose_what_trains)(arguments, model)
        self._dtypes = hold_for_training(self.model, arguments.bf16)
        if arguments.process_index == 0:
            console = Console()
            console.print(report)
            if arguments.lacks_bf16:
                print("this device does not compute bfloat16: the run computes in float32; set bf16 to say which")
            if self.checkpoint is not None:
                console.print(f"going on from {self.checkpoint}", markup=False, highlight=False, soft_wrap=True)
        return self.model

    def make_trainer(
        self, trainer_class: Callable[..., TrainsMemory], tokenizer: PreTrainedTokenizerBase, **options: Any
    ) -> None:
        """Make the Trainer, with the callbacks of a run.

        Args:
            options: Arguments of the class beside model and arguments.
        """
        self.tokenizer = tokenizer
        trainer = self.trainer = trainer_class(self.model, self.arguments, **options)
        for unwanted in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            trainer.remove_callback(unwanted)
        if self.arguments.early_stopping_patience is not None:
            trainer.add_callback(EarlyStoppingCallback(self.arguments.early_stopping_patience))
        self._stop = StopOnSignal(trainer.largest)
        for callback in (self._stop, TrainingLog(log_file(self.arguments.output_dir)), ProgressTable()):
            trainer.add_callback(callback)

    def execute(self) -> TrainResult:
        """Train, save the model, and return the result.

        Raises:
            FloatingPointError: If the loss, a gradient or a trained tensor stops being finite; what is not finite is
                not saved.
            RunInterrupted: If a signal ended training early, after a checkpoint was saved.
            SaveError: If a checkpoint or the trained model could not be written.
        """
        try:
            with self._stop, without_library_bars():
                output = self.trainer.train(self.checkpoint and str(self.checkpoint))
                if self._stop.signal_number:
                    step, folder = self.trainer.state.global_step, Path(self.arguments.output_dir)
                    raise RunInterrupted(
                        f"interrupted after step {step:,}; resume_from_checkpoint=true goes on from "
                        f"{folder / f'checkpoint-{step}'}",
                        self._stop.signal_number,
                    )
                result = self._result(self.trainer, output.metrics["train_runtime"])
                costs = {
                    "trained_parameters": result.trained_parameters,
                    "peak_memory_bytes": result.peak_memory_bytes,
                }
                self.trainer.log(costs)
                self._save(self.trainer, self.tokenizer, result)
            return result
        finally:
            close_output(self.arguments, self._lock)

    def _result(self, trainer: TrainsMemory, seconds: float) -> TrainResult:
        state: Any = trainer.state
        model: Any = trainer.model
        before = 0
        if self.checkpoint is not None:
            before = _tokens_at(state.log_history, int(self.checkpoint.name.rpartition("-")[2]))
        tokens = int(state.num_input_tokens_seen)
        losses = [event["loss"] for event in state.log_history if "loss" in event]
        return TrainResult(
            output=str(self.arguments.output_dir),
            steps=state.global_step,
            tokens=tokens,
            loss=losses[-1] if losses else None,
            seconds=seconds,
            tokens_per_second=(tokens - before) / seconds if seconds and tokens > before else None,
            trained_parameters=sum(whole_numel(each) for each in model.parameters() if each.requires_grad),
            peak_memory_bytes=_peak_memory_bytes(),
        )

    def _save(self, trainer: TrainsMemory, tokenizer: PreTrainedTokenizerBase, result: TrainResult) -> None:
        """Save model and tokenizer whole, with the dtypes, cache setting and further files that the model came with."""
        arguments, model = self.arguments, self.model
        trainer.check_finite()
        if trainer.shards.shares_parameters:
            trainer.shards.saved_dtypes = self._dtypes
        else:
            restore_dtypes(model, self._dtypes)
        if has_adapters(model):
            from midus_hf.training.adapters import merge_adapters

            trainer.model = model = merge_adapters(model)
        model.config.use_cache = self._use_cache
        output, partial = Path(arguments.output_dir), partial_model(arguments.output_dir)
        pushes, arguments.push_to_hub = arguments.push_to_hub, False
        try:
            if arguments.process_index == 0:
                shutil.rmtree(partial, ignore_errors=True)
            trainer.accelerator.wait_for_everyone()
            trainer.save_model(str(partial))
            if arguments.process_index == 0:
                (partial / "training_args.bin").unlink(missing_ok=True)
                tokenizer.save_pretrained(partial)
                files = dict(self._files)
                if "README.md" in files:
                    files["README.md"] = add_training(
                        files["README.md"], arguments, result.steps, result.tokens, result.loss
                    )
                publish(partial, output, files)
        except Exception as error:
            if not is_write_failure(error):
                raise
            shutil.rmtree(partial, ignore_errors=True)
            raise SaveError(
                f"the trained model could not be written to {output}: {error}. Make room; resume_from_checkpoint=true goes on from "
                "the latest checkpoint."
            ) from error
        if pushes and arguments.process_index == 0:
            repository: Any = trainer.hub_model_id
            upload_folder(
                repo_id=repository,
                folder_path=output,
                token=arguments.hub_token,
                ignore_patterns=["checkpoint-*", ".*"],
            )


def _tokens_at(log: list[dict[str, Any]], step: int) -> int:
    """Return the tokens that a run had seen at a step, from the log in its state; 0 if no event is as early."""
    return max((int(event.get("num_input_tokens_seen", 0)) for event in log if event["step"] <= step), default=0)


def choose_what_trains(arguments: MemoryArguments, model: PreTrainedModel) -> tuple[Any, RenderableType]:
    """Set what trains in the model, or put adapters on it; return the model and a description of what trains.

    Raises:
        ValueError: If the model lacks what is to train, or cannot have the adapters.
    """
    if arguments.adapters is None:
        return model, set_trainable(model, arguments.trainable, arguments.frozen)
    from midus_hf.training.adapters import add_adapters, describe_adapters

    adapted = add_adapters(model, arguments.adapters)
    return adapted, describe_adapters(adapted, arguments.adapters)


def _load_model(arguments: Any, config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, bytes]]:
    """Load or make the model, and return it with the contents, by name, of the files that accompany it.

    A saved model has the dtype of its checkpoint, of which only safetensors are read. A new model draws its weights
    from torch's random generator, and comes with a card that says so.
    """
    attention, source = arguments.attn_implementation, arguments.model_name_or_path
    with refusing(_expected(arguments), OSError, ValueError, ImportError, SafetensorError):
        if source is None:
            made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=False)
            return made, {"README.md": new_card(arguments)}
        model, missing = saved_models.load_model(source, attn_implementation=attention, use_safetensors=True)
    saved_models.check_whole(source, missing)
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
    return {path.name: path.read_bytes() for path in paths}


def _expected(arguments: MemoryArguments) -> str:
    """Return the beginning of messages about a model that cannot be loaded or made."""
    if arguments.model_name_or_path is not None:
        return f"model_name_or_path is {arguments.model_name_or_path!r}; expected the folder or Hub id of a language model"
    return (
        f"config_name is {arguments.config_name!r}; expected the file, folder or Hub id of a language model's config"
    )


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


def _peak_memory_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
