"""Load what a run's options name: the model, its config and its tokenizer; a failure is an error of the options."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from midus_hf import saved_models
from midus_hf.files.checkpoint_files import ACCOMPANYING
from midus_hf.saved_models import refusing
from midus_hf.training.optim.freezing import resolve_trainable
from midus_hf.training.run_options import Trainable


def load_config(model: str, trainable: Trainable) -> PreTrainedConfig:
    """Load the config of a model, and check that the model has the layers that are to train.

    Args:
        model: Folder or Hub id of the model.
        trainable: What trains, as in `RunOptions`.

    Raises:
        ValueError: If the model does not exist, does not say what trains, or lacks the layers that are to train.
    """
    with refusing(_not_a_model(model), OSError, ValueError):
        model_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    resolve_trainable(model_config, trainable)
    return model_config


def check_sequence_length(key: str, sequence_length: int, model_config: PreTrainedConfig) -> None:
    """Check that the model has positions for sequences of this length.

    The limit is the config's `max_position_embeddings`. If the rope scaling stretches a shorter original context, and
    this context times the factor is larger, that product is the limit: some configs with rope scaling do not have a
    raised `max_position_embeddings`.

    Args:
        key: Name of the option in messages, such as `"sequence_length"`.
        sequence_length: Tokens per sequence.
        model_config: Config of the model, from `load_config`.

    Raises:
        ValueError: If the model has too few positions.
    """
    text_config = model_config.get_text_config()
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
            f"{key} is {sequence_length}, but the model has positions for {limit} tokens. Lower "
            f"{key}, or first raise max_position_embeddings in the model's config.json, with the rope scaling "
            "that it then needs."
        )


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is saved with a model.

    Args:
        model: Folder or Hub id of the model.

    Raises:
        ValueError: If the model has no tokenizer.
    """
    with refusing(f"model_name_or_path is {model!r}, which has no tokenizer", OSError, ValueError):
        return saved_models.load_tokenizer(model)


def load_model(model: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """Load a model in the dtype of its checkpoint; only safetensors are read.

    Args:
        model: Folder or Hub id of the model.
        attn_implementation: Implementation of attention, as in `from_pretrained`. Default: transformers' choice.

    Raises:
        ValueError: If the weights cannot be read, or lack a tensor.
    """
    with refusing(_not_a_model(model), OSError, ValueError, ImportError, SafetensorError):
        loaded, missing = saved_models.load_model(model, attn_implementation=attn_implementation, use_safetensors=True)
    saved_models.check_whole(model, missing)
    return loaded


def load_accompanying_files(model: str) -> dict[str, bytes]:
    """Return the contents, by name, of files beside the model that match `ACCOMPANYING`; `{}` if the download fails.

    Args:
        model: Folder or Hub id of the model.
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
