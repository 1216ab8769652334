"""Loading of a run's config, tokenizer and model, with the files that accompany them."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.config.wording import install_extra
from midus_hf.files.checkpoint_files import ACCOMPANYING, CARD_FILE, CONFIG, refuse_lfs_pointers
from midus_hf.memories.packs.bank_files import has_glossary
from midus_hf.models.host import MemoryConfig
from midus_hf.models.saved_models import check_no_missing_tensors, load_model
from midus_hf.sources.tokenizers import load_tokenizer
from midus_hf.training.arguments import MemoryArguments
from midus_hf.training.optim.freezing import resolve_trainable
from midus_hf.training.saving import new_card


def load_config(arguments: MemoryArguments) -> PreTrainedConfig:
    """Load the config of a run's model, and check what can be checked without weights."""
    source = arguments.model_name_or_path or arguments.config_name
    if source is None:
        raise RequestError("config has no 'model_name_or_path'; set it in the recipe, or by --model.")
    path = Path(source).expanduser()
    with as_request_error(_expected(arguments), OSError, ValueError):
        made_from = path if arguments.config_name is not None and path.exists() else source
        refuse_lfs_pointers(Path(made_from), CONFIG)
        config = AutoConfig.from_pretrained(made_from, trust_remote_code=False)
    if arguments.config_name is not None and hasattr(config, "upscale"):
        del config.upscale  # it describes a base whose weights this model does not have
    check_sequence_length(arguments.length_key, getattr(arguments, arguments.length_key), config)
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
        raise RequestError(
            f"adapters need peft, which is not installed; {install_extra('train')}, or leave adapters out."
        )
    from midus_hf.training.adapters import read_adapters

    assert isinstance(arguments.adapters, dict), "checked by the arguments"
    read_adapters(arguments.adapters)
    if is_deepspeed_zero3_enabled():
        raise RequestError(
            "adapters are merged into weights at the end, which DeepSpeed's ZeRO-3 shards; expected processes that hold whole "
            "models. Start the run with configs/accelerate/ddp.yaml."
        )
    return config


def check_sequence_length(key: str, sequence_length: int, config: PreTrainedConfig) -> None:
    """Raise a `RequestError` about a key such as `sequence_length` if the model has too few positions for it."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and sequence_length > limit:
        raise RequestError(
            f"{key} is {sequence_length}, but the model has positions for {limit} tokens. Lower {key}, or first raise "
            "max_position_embeddings in the model's config.json, with the rope scaling that it then needs."
        )


def load_run_tokenizer(arguments: MemoryArguments) -> PreTrainedTokenizerBase:
    source = arguments.model_name_or_path or arguments.tokenizer_name
    assert source is not None, "a config is named with a tokenizer"
    message = f"tokenizer_name is {source!r}; expected the folder or Hub id of a tokenizer"
    if arguments.model_name_or_path is not None:
        message = f"model_name_or_path is {source!r}, which has no tokenizer that loads"
    with as_request_error(message, OSError, ValueError):
        return load_tokenizer(source)


def load_for_training(arguments: Any, config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, bytes]]:
    """Load or make the model, and return it with the contents, by name, of the files that accompany it.

    A saved model has the dtype of its checkpoint, of which only safetensors are read. A new model draws its weights
    from torch's random generator, and comes with a card that says so.
    """
    attention, source = arguments.attn_implementation, arguments.model_name_or_path
    with loaded_whole(), as_request_error(_expected(arguments), OSError, ValueError, ImportError, SafetensorError):
        if source is None:
            made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=False)
            return made, {CARD_FILE: new_card(arguments, config.model_type)}
        options = {"config": config, "attn_implementation": attention, "use_safetensors": True}
        model, missing = load_model(source, **options)
    check_no_missing_tensors(source, missing)
    return model, _accompanying_files(source)


def _accompanying_files(model: str) -> dict[str, bytes]:
    """Return the contents, by name, of files in the model's folder that match `ACCOMPANYING`; `{}` if the download fails."""
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
    if arguments.model_name_or_path is None:
        return f"config_name is {arguments.config_name!r}; expected the file, folder or Hub id of a language model's config"
    return f"model_name_or_path is {arguments.model_name_or_path!r}; expected the folder or Hub id of a language model"


@contextlib.contextmanager
def loaded_whole() -> Iterator[None]:
    """Load or make whole models in each process within the context; DeepSpeed shards them for training.

    Otherwise, once `TrainingArguments` exist, transformers lets ZeRO-3 shard parameters while a model is loaded. Checks
    before training would then read the dtypes and sizes of empty tensors.
    """
    config_before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config_before
