"""Origin of a run's model: a saved model, or a config whose weights are drawn at random."""

from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from midus_hf import saved_models
from midus_hf.saved_models import refusing
from midus_hf.training.optim.freezing import resolve_trainable
from midus_hf.training.output.model_card import new_card
from midus_hf.training.run.loading import load_accompanying_files, load_config, load_model, load_tokenizer
from midus_hf.training.run_options import RunOptions, Trainable


def config_of_run(config: RunOptions, trainable: Trainable) -> PreTrainedConfig:
    """Load the config of a run's model, and check that the model has the layers that are to train.

    Args:
        config: Options of the run, which name the model or its config.
        trainable: What trains, as in `RunOptions`.

    Raises:
        ValueError: If the config cannot be read, does not say what trains, or lacks the layers that are to train.
    """
    if config.model_name_or_path is not None:
        return load_config(config.model_name_or_path, trainable)
    assert config.config_name is not None
    path = Path(config.config_name).expanduser()
    if path.suffix == ".json" and not path.exists():
        raise ValueError(f"config_name is {config.config_name!r}, which does not exist; give another file.")
    with refusing(_not_a_config(config), OSError, ValueError):
        source = path if path.exists() else config.config_name
        model_config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    if hasattr(model_config, "upscale"):
        del model_config.upscale  # it describes a base whose weights this model does not have
    resolve_trainable(model_config, trainable)
    return model_config


def tokenizer_of_run(config: RunOptions) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is saved with the model or, for a model made from a config, the tokenizer of the options.

    Raises:
        ValueError: If the tokenizer cannot be loaded.
    """
    if config.model_name_or_path is not None:
        return load_tokenizer(config.model_name_or_path)
    assert config.tokenizer_name is not None
    with refusing(
        f"tokenizer_name is {config.tokenizer_name!r}; expected the folder or Hub id of a tokenizer",
        OSError,
        ValueError,
    ):
        return saved_models.load_tokenizer(config.tokenizer_name)


def model_of_run(config: RunOptions, model_config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, bytes]]:
    """Load or make the model, and return it with the contents, by name, of the files that accompany it.

    A new model draws its weights from torch's random generator, and comes with a card that says so.

    Args:
        config: Options of the run, which name the model or its config.
        model_config: Config of the model, from `config_of_run`.

    Raises:
        ValueError: If the weights of a saved model cannot be read, or no model can be made from the config.
    """
    if config.model_name_or_path is not None:
        return load_model(config.model_name_or_path, config.attn_implementation), load_accompanying_files(
            config.model_name_or_path
        )
    with refusing(_not_a_config(config), ValueError, ImportError):
        model = AutoModelForCausalLM.from_config(
            model_config, attn_implementation=config.attn_implementation, trust_remote_code=False
        )
    return model, {"README.md": new_card(config)}


def _not_a_config(config: RunOptions) -> str:
    return f"config_name is {config.config_name!r}; expected the file, folder or Hub id of a language model's config"
