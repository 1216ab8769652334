"""Load what a run names: the model, its config, its tokenizer. What cannot be loaded is a wrong request."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from midus_hf import saved_models
from midus_hf.files.run_files import ACCOMPANYING
from midus_hf.saved_models import refusing
from midus_hf.training.optim.freezing import resolve_trainable
from midus_hf.training.run_options import Trainable


def load_config(model: str, trainable: Trainable) -> PreTrainedConfig:
    """The config of the model, which must have the layers that are to train.

    Args:
        model: Folder or Hub id.
        trainable: As in `RunOptions`.

    Raises:
        ValueError: If there is no such model, or it does not say what trains, or has no such layers.
    """
    with refusing(_not_a_model(model), OSError, ValueError):
        model_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    resolve_trainable(model_config, trainable)
    return model_config


def check_sequence_length(key: str, sequence_length: int, model_config: PreTrainedConfig) -> None:
    """See that the model has positions for as many tokens.

    As many are its config's `max_position_embeddings`, or, where its rope scaling stretches a shorter context and says
    which, that context times the factor: configs that were stretched may or may not have the first raised as well.

    Args:
        key: Name of the option that a message names, such as `"sequence_length"`.
        sequence_length: Tokens per sequence.
        model_config: As from `load_config`.

    Raises:
        ValueError: If it has not.
    """
    text_config = model_config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is None:
        return
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one set for all layers, or one for each kind of them
        if isinstance(parameters, dict) and parameters.get("original_max_position_embeddings"):
            stretched = parameters["original_max_position_embeddings"] * (parameters.get("factor") or 1)
            limit = max(limit, int(stretched))
    if sequence_length > limit:
        raise ValueError(
            f"{key} is {sequence_length}, but the model has positions for {limit} tokens. Lower "
            f"{key}, or first raise max_position_embeddings in the model's config.json, with the rope scaling "
            "that it then needs."
        )


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer saved with the model.

    Args:
        model: Folder or Hub id.

    Raises:
        ValueError: If there is none.
    """
    with refusing(f"model_name_or_path is {model!r}, which has no tokenizer", OSError, ValueError):
        return saved_models.load_tokenizer(model)


def load_model(model: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """The model, in the dtype of its checkpoint; only safetensors are read.

    Args:
        model: Folder or Hub id.
        attn_implementation: As in `from_pretrained`. Default: transformers' choice.

    Raises:
        ValueError: If the weights cannot be read, or lack a tensor.
    """
    with refusing(_not_a_model(model), OSError, ValueError, ImportError, SafetensorError):
        loaded, missing = saved_models.load_model(model, attn_implementation=attn_implementation, use_safetensors=True)
    saved_models.check_whole(model, missing)
    return loaded


def load_accompanying_files(model: str) -> dict[str, bytes]:
    """The contents, by name, of the files beside the model that `ACCOMPANYING` matches.

    Args:
        model: Folder or Hub id.
    """
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, allow_patterns=list(ACCOMPANYING)))
        except (HfHubHTTPError, OSError):
            return {}
    paths = sorted(path for pattern in ACCOMPANYING for path in folder.glob(pattern) if path.is_file())
    return {path.name: path.read_bytes() for path in paths}


def _not_a_model(model: str) -> str:
    return f"model_name_or_path is {model!r}; expected the folder or Hub id of a language model"
