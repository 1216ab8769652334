"""Preparation of a run: its config, tokenizer, texts, and model with what trains."""

import contextlib
import dataclasses
import importlib.util
import tempfile
import weakref
from collections.abc import Callable, Iterator
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

from midus_hf.config.errors import RequestError, as_request_error, first_line, install_extra, print_note
from midus_hf.files.checkpoint_files import ACCOMPANYING, CARD_FILE, CONFIG, refuse_lfs_pointers
from midus_hf.memories.bank import banks_of
from midus_hf.memories.packs.options import has_glossary
from midus_hf.models.host import MemoryConfig
from midus_hf.models.saved_models import check_no_missing_tensors, load_model
from midus_hf.models.view import ModelView
from midus_hf.sources.downloads import fetching
from midus_hf.sources.tokenizers import load_tokenizer
from midus_hf.training.arguments import MemoryArguments
from midus_hf.training.checkpoints import Digests, digest_model
from midus_hf.training.optim import cast_for_training, resolve_trainable, set_trainable
from midus_hf.training.outcome import measured_texts
from midus_hf.training.output import in_main_process, new_card
from midus_hf.training.protection import Protection
from midus_hf.training.sft.template_day import DAY_KEY, first_day
from midus_hf.training.texts import RunTexts

_CHOSEN_DTYPE = {
    True: "this device computes bfloat16: the run computes in it, with trained parameters in float32; set bf16 to choose",
    False: "this device does not compute bfloat16: the run computes in float32; set bf16 to choose",
}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a run has read and loaded; its arguments, and all of this, have been checked.

    Args:
        arguments: The run's own copy of `MemoryArguments`.
        tokenizer: The tokenizer, which is saved with the model.
        texts: Training and held-out data.
        model: The model, or PEFT's model around it, with `requires_grad` set and trained tensors in float32.
        saved_dtypes: Dtypes of the model's tensors as loaded, by name, in which it is saved.
        uses_cache: `use_cache` of the config as loaded.
        files: Contents of files to save with the model, by name.
        digests: What checkpoints record of the model, the tree and the first day; empty in other than the main process.
        checkpoint: The checkpoint to resume from, if any.
        first_day: The day on which the run began, as YYYY-MM-DD.
        protection: The texts whose logits stay, if any.
    """

    arguments: Any
    tokenizer: PreTrainedTokenizerBase
    texts: RunTexts
    model: Any
    saved_dtypes: dict[str, torch.dtype]
    uses_cache: bool
    files: dict[str, bytes]
    digests: Digests
    checkpoint: Path | None
    first_day: str
    protection: Protection | None


def prepare(
    arguments: Any,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    read: Callable[..., RunTexts],
    trains: bool = True,
) -> Prepared:
    """Read the texts of a run, and load its model; print what trains.

    Args:
        arguments: `MemoryArguments`, which this changes: `num_train_epochs` where `max_steps` decides, and `eval_on_start` where
            nothing is held out.
        config: The model's config.
        tokenizer: The tokenizer.
        checkpoint: The checkpoint to resume from, if any.
        read: Returns training and held-out data, from arguments, config and tokenizer.
        trains: Whether the run trains, so that the model is hashed, and what trains is printed. Default: True.

    Raises:
        RequestError: If texts or model cannot be read, or do not fit one another.
    """
    is_main = arguments.process_index == 0
    if arguments.num_train_epochs is None and arguments.max_steps > 0:
        arguments.num_train_epochs = 1.0  # which the Trainer compares with 0, and else leaves to max_steps
    day = in_main_process(arguments, partial(first_day, checkpoint))
    with arguments.main_process_first(desc="reading texts"):
        texts = read(arguments, config, tokenizer)
    if arguments.eval_share and texts.held_out is None:
        arguments.eval_on_start = False
    set_seed(arguments.seed)
    model, files = load_for_training(arguments, config)
    digests: Digests = {}
    if is_main and trains:
        digests = {**digest_model(model, arguments), **_digest_tree(arguments), DAY_KEY: {"day": day}}
    uses_cache = model.config.use_cache
    if arguments.eval_share and texts.held_out is not None:
        texts = texts._replace(held_out=measured_texts(texts.held_out, model, tokenizer, arguments))
    trained, report = _choose_trained(ModelView(model), arguments)
    saved_dtypes = cast_for_training(trained, bool(arguments.bf16))
    if is_main and trains:
        print(report)
        if arguments.chooses_bf16:
            print(_CHOSEN_DTYPE[arguments.bf16])
        if checkpoint is not None:
            print(f"resuming from {checkpoint}")
    protection = None
    if arguments.protect:
        protection = _protect(trained, tokenizer, arguments, checkpoint)
    return Prepared(
        arguments=arguments,
        tokenizer=tokenizer,
        texts=texts,
        model=trained,
        saved_dtypes=saved_dtypes,
        uses_cache=uses_cache,
        files=files,
        digests=digests,
        checkpoint=checkpoint,
        first_day=day,
        protection=protection,
    )


def _digest_tree(arguments: Any) -> Digests:
    """Return the fingerprint of the run's tree of topics, if it has one."""
    tree = getattr(arguments, "tree", None)
    if tree is None:
        return {}
    from midus_hf.topics.tree import ClusterTree

    return {"tree": {"nodes": ClusterTree.load(tree).fingerprint}}


def _choose_trained(view: ModelView, arguments: Any) -> tuple[Any, str]:
    """Set what trains; return the model, or PEFT's model around it, and what trains in words."""
    if arguments.adapters is None:
        return view.model, str(set_trainable(view, arguments.trainable, arguments.frozen))
    from midus_hf.training.adapters import add_adapters

    assert isinstance(arguments.adapters, dict), "checked by the arguments"
    return add_adapters(view, arguments.adapters)


def _protect(model: Any, tokenizer: Any, arguments: Any, checkpoint: Path | None) -> Protection:
    """Take protected texts out of the model's tables; print what is left to learn with."""
    with arguments.main_process_first(desc="reading protected texts"):
        column = getattr(arguments, "text_column", "text")
        protection = Protection(model, tokenizer, arguments.protect, column)
    if checkpoint is not None:
        protection.check_checkpoint(model, checkpoint)
    if arguments.process_index == 0:
        print(protection)
    return protection


def load_config(arguments: MemoryArguments) -> PreTrainedConfig:
    """Load the config of a run's model, and check what can be checked without weights."""
    source = arguments.model_name_or_path or arguments.config_name
    if source is None:
        raise RequestError("config has no 'model_name_or_path'; set it in the recipe, or by --model.")
    path = Path(source).expanduser()
    with as_request_error(_expected(arguments), OSError, ValueError):
        made_from = path if arguments.config_name is not None and path.exists() else source
        refuse_lfs_pointers(Path(made_from), CONFIG)
        with fetching(source):
            config = AutoConfig.from_pretrained(made_from, trust_remote_code=False)
    if arguments.config_name is not None and hasattr(config, "upscale"):
        del config.upscale  # it describes a base whose weights this model does not have
    key = arguments.length_key
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and (length := getattr(arguments, key)) > limit:
        raise RequestError(
            f"{key} is {length}, but the model has positions for {limit} tokens. Lower {key}, or first raise "
            "max_position_embeddings in the model's config.json, with the rope scaling that it then needs."
        )
    hosts_memory = isinstance(config, MemoryConfig)
    if arguments.config_name is not None and hosts_memory and has_glossary(config.memories()):
        raise RequestError(
            f"config_name is {arguments.config_name!r}, whose model has packs, and a new model has no glossary; expected a config "
            "without packs. Add them to the trained model: upscale --method packs."
        )
    if hosts_memory and getattr(arguments, "use_liger_kernel", False):
        raise RequestError(
            f"use_liger_kernel is true, and Liger has no kernels for {config.model_type}; expected a model without memory. "
            "Leave it out."
        )
    if arguments.adapters is None:
        resolve_trainable(config, arguments.trainable)  # type: ignore[arg-type]
        return config
    if importlib.util.find_spec("peft") is None:
        raise RequestError(f"adapters need peft, not installed; {install_extra('train')}, or leave them out.")
    from midus_hf.training.adapters import read_adapters

    assert isinstance(arguments.adapters, dict), "checked by the arguments"
    read_adapters(arguments.adapters)
    if is_deepspeed_zero3_enabled():
        raise RequestError(
            "adapters are merged into weights at the end, which DeepSpeed's ZeRO-3 shards; expected processes that hold whole "
            "models. Start the run with configs/accelerate/ddp.yaml."
        )
    return config


def load_run_tokenizer(arguments: MemoryArguments) -> PreTrainedTokenizerBase:
    source = arguments.model_name_or_path or arguments.tokenizer_name
    assert source is not None, "a config is named with a tokenizer"
    message = f"tokenizer_name is {source!r}; expected the folder or Hub id of a tokenizer"
    if arguments.model_name_or_path is not None:
        message = f"model_name_or_path is {source!r}, which has no tokenizer that loads"
    with as_request_error(message, OSError, ValueError):
        return load_tokenizer(source)


def load_for_training(arguments: Any, config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, bytes]]:
    """Load the model in its dtype, or make it at random; return it and files to save with it, by name."""
    attention, source = arguments.attn_implementation, arguments.model_name_or_path
    with load_unsharded(), as_request_error(_expected(arguments), OSError, ValueError, ImportError, SafetensorError):
        if source is None:
            made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=False)
            if isinstance(config, MemoryConfig):
                _open_new_banks(made, config, arguments.seed)
            return made, {CARD_FILE: new_card(arguments, config.model_type)}
        options = {"config": config, "attn_implementation": attention, "use_safetensors": True}
        model, missing = load_model(source, **options)
    check_no_missing_tensors(source, missing)
    folder = Path(source)
    if not folder.is_dir():
        try:
            with fetching(source):
                folder = Path(snapshot_download(source, allow_patterns=list(ACCOMPANYING)))
        except (HfHubHTTPError, OSError) as error:
            print_note(
                f"the card and terms of {source} were not fetched, and are not saved with the model: {first_line(error)}"
            )
            return model, {}
    paths = sorted(path for pattern in ACCOMPANYING for path in folder.glob(pattern) if path.is_file())
    return model, {path.name: path.read_bytes() for path in paths}


def _open_new_banks(model: Any, config: MemoryConfig, seed: int) -> None:
    """Create banks for a new model, in a folder that is removed with it."""
    banks = banks_of(config.memories())
    if banks:
        folder = tempfile.TemporaryDirectory(prefix="midus-banks-")
        weakref.finalize(model, folder.cleanup)
        for bank in banks.values():
            bank.create(Path(folder.name), str(model.dtype).removeprefix("torch."), seed)
        for service in model.stack.services.values():
            service.after_loading(folder.name, {})


def _expected(arguments: MemoryArguments) -> str:
    if arguments.model_name_or_path is None:
        return f"config_name is {arguments.config_name!r}; expected the file, folder or Hub id of a language model's config"
    return f"model_name_or_path is {arguments.model_name_or_path!r}; expected the folder or Hub id of a language model"


@contextlib.contextmanager
def load_unsharded() -> Iterator[None]:
    """Load or make whole models in each process in the context, although ZeRO-3 would shard them."""
    config_before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config_before
