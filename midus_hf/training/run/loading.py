"""Load what a run's options name: the model, its config and its tokenizer; a failure is an error of the options.

The model is a saved one, or is made from a config, with weights drawn at random.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from midus_hf import saved_models
from midus_hf.files.checkpoint_files import ACCOMPANYING
from midus_hf.saved_models import refusing
from midus_hf.training.optim.freezing import resolve_trainable
from midus_hf.training.output.output_folder import new_card
from midus_hf.training.run_options import RunOptions, Trainable


def config_of_run(config: RunOptions, trainable: Trainable) -> PreTrainedConfig:
    """Load the config of a run's model, and check that the model has the layers that are to train.

    Raises:
        ValueError: If the config cannot be read, does not say what trains, or lacks the layers that are to train.
    """
    source = config.model_name_or_path or config.config_name
    assert source is not None, "the options name one of both"
    path = Path(source).expanduser()
    if config.config_name is not None and path.suffix == ".json" and not path.exists():
        raise ValueError(f"config_name is {source!r}, which does not exist; give another file.")
    with refusing(_expected(config), OSError, ValueError):
        made_from = path if config.config_name is not None and path.exists() else source
        model_config = AutoConfig.from_pretrained(made_from, trust_remote_code=False)
    if config.config_name is not None and hasattr(model_config, "upscale"):
        del model_config.upscale  # it describes a base whose weights this model does not have
    resolve_trainable(model_config, trainable)
    return model_config


def check_sequence_length(key: str, sequence_length: int, model_config: PreTrainedConfig) -> None:
    """Check that the model has positions for sequences of this length.

    The limit is the config's `max_position_embeddings`. If the rope scaling stretches a shorter original context, and
    this context times the factor is larger, that product is the limit: some configs with rope scaling do not have a
    raised `max_position_embeddings`.

    Args:
        key: Name of the option in messages, such as `"sequence_length"`.

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


def tokenizer_of_run(config: RunOptions) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is saved with the model or, for a model made from a config, the tokenizer of the options.

    Raises:
        ValueError: If the tokenizer cannot be loaded.
    """
    source = config.model_name_or_path or config.tokenizer_name
    assert source is not None, "a config is named with a tokenizer"
    message = (
        f"tokenizer_name is {source!r}; expected the folder or Hub id of a tokenizer"
        if config.model_name_or_path is None
        else f"model_name_or_path is {source!r}, which has no tokenizer"
    )
    with refusing(message, OSError, ValueError):
        return saved_models.load_tokenizer(source)


def model_of_run(config: RunOptions, model_config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, bytes]]:
    """Load or make the model, and return it with the contents, by name, of the files that accompany it.

    A saved model has the dtype of its checkpoint, of which only safetensors are read. A new model draws its weights
    from torch's random generator, and comes with a card that says so.

    Args:
        model_config: Config of the model, from `config_of_run`.

    Raises:
        ValueError: If the weights of a saved model cannot be read or lack a tensor, or no model can be made from the
            config.
    """
    attention, source = config.attn_implementation, config.model_name_or_path
    if source is None:
        with refusing(_expected(config), ValueError, ImportError):
            model = AutoModelForCausalLM.from_config(
                model_config, attn_implementation=attention, trust_remote_code=False
            )
        return model, {"README.md": new_card(config)}
    with refusing(_expected(config), OSError, ValueError, ImportError, SafetensorError):
        model, missing = saved_models.load_model(source, attn_implementation=attention, use_safetensors=True)
    saved_models.check_whole(source, missing)
    return model, load_accompanying_files(source)


def load_accompanying_files(model: str) -> dict[str, bytes]:
    """Return the contents, by name, of files beside the model that match `ACCOMPANYING`; `{}` if the download fails."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, allow_patterns=list(ACCOMPANYING)))
        except (HfHubHTTPError, OSError):
            return {}
    paths = sorted(path for pattern in ACCOMPANYING for path in folder.glob(pattern) if path.is_file())
    return {path.name: path.read_bytes() for path in paths}


def _expected(config: RunOptions) -> str:
    """Return the beginning of messages about a model that cannot be loaded or made."""
    if config.model_name_or_path is not None:
        return (
            f"model_name_or_path is {config.model_name_or_path!r}; expected the folder or Hub id of a language model"
        )
    return f"config_name is {config.config_name!r}; expected the file, folder or Hub id of a language model's config"
