"""Load what a run names: the model, its config, its tokenizer. What cannot be loaded is a wrong request."""

from pathlib import Path
from typing import Any, Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from midus_hf.training.freezing import new_layers

PROVENANCE_NAME = "upscale.json"


def load_config(model: str, trainable: Literal["new", "all"]) -> PreTrainedConfig:
    """The config of the model, which must record new layers if only those train.

    Args:
        model: Folder or Hub id.
        trainable: `"new"` or `"all"`.

    Raises:
        ValueError: If there is no such model, or it has no new layers to train.
    """
    try:
        model_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(_not_a_model(model, error)) from error
    if trainable == "new":
        new_layers(model_config)
    return model_config


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer saved with the model.

    Args:
        model: Folder or Hub id.

    Raises:
        ValueError: If there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"model is {model!r}, which has no tokenizer: {_first_line(error)}") from error


def load_model(model: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """The model, in the dtype of its checkpoint; only safetensors are read.

    Args:
        model: Folder or Hub id.
        attn_implementation: As in `from_pretrained`. Default: transformers' choice.

    Raises:
        ValueError: If the weights cannot be read, or lack a tensor.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            dtype="auto",
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ValueError(_not_a_model(model, error)) from error
    loaded_model, loading = loaded
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ValueError(
            f"model is {model!r}, whose weights lack {len(missing)} tensors, such as {missing[0]!r}; "
            "expected all of them. Make the checkpoint again."
        )
    return loaded_model


def _not_a_model(model: str, error: Exception) -> str:
    return f"model is {model!r}; expected the folder or Hub id of a language model: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def provenance_files(model: str) -> list[Path]:
    """The record that `upscale` left beside the model, if there is one.

    Args:
        model: Folder or Hub id.
    """
    if Path(model).is_dir():
        path = Path(model, PROVENANCE_NAME)
        return [path] if path.is_file() else []
    try:
        return [Path(hf_hub_download(model, PROVENANCE_NAME))]
    except (EntryNotFoundError, HfHubHTTPError, OSError):
        return []
