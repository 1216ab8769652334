"""Options of a run's adapters (a PEFT method, keys of its config, and the layers to adapt). This needs PEFT."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast, get_args

import peft
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from transformers import PreTrainedConfig

from midus_hf.config.options import read_options
from midus_hf.config.wording import near_matches
from midus_hf.training.optim.freezing import recorded_new_layers
from midus_hf.training.run_options import AdapterLayers

# Keys of `RunOptions.adapters` that are no arguments of the method's config.
_OURS = ("method", "layers")

# Fields of PEFT configs that record what adapters were saved for, which a run may not set.
_RECORDS = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
)

_DEFAULTS: dict[str, dict[str, Any]] = {"lora": {"r": 16, "lora_alpha": 32}}

# Methods that adapt other modules than linear layers, or only some linear layers, so that PEFT chooses the modules.
_TARGETS_OF_PEFT = ("ia3", "ln_tuning", "trainable_tokens")

# Methods for which the Trainer would have to do more than take steps, with the reason.
_STEPPED = {"adalora": "whose ranks are allotted by a call after every step, which the Trainer does not make"}

_UNMERGED = "whose result cannot be merged into the weights, as the result of a run is"


@dataclasses.dataclass(frozen=True)
class AdapterChoice:
    """The adapters of a run.

    Args:
        method: PEFT's name of the method, in lower case.
        layers: Layers that have adapters, as in `adapters` of `RunOptions`.
        config_class: Class of the method's config.
        arguments: Arguments of this config: the user's, and this project's defaults.
    """

    method: str
    layers: AdapterLayers
    config_class: type[PeftConfig]
    arguments: dict[str, Any]

    def config(self, **changes: Any) -> PeftConfig:
        """Return the method's config.

        Args:
            changes: Arguments that are added or replaced.
        """
        return self.config_class(**{**self.arguments, **changes})

    @property
    def takes(self) -> set[str]:
        """Keys of the method's config."""
        return {field.name for field in dataclasses.fields(self.config_class)}


def read_adapters(options: Mapping[str, Any]) -> AdapterChoice:
    """Read the adapter options of a run.

    Args:
        options: Value of `RunOptions.adapters`.

    Raises:
        ValueError: If PEFT has no method of this name, `layers` or a key of the method's config is unknown, the result
            of the method cannot be merged into the weights, or the method needs calls that the Trainer does not make.
    """
    method, layers = options.get("method", "lora"), options.get("layers", "base")
    if layers not in get_args(AdapterLayers):
        raise ValueError(f"adapters.layers is {layers!r}; expected one of: {', '.join(get_args(AdapterLayers))}.")
    kinds = {kind.value.lower(): kind for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    if method not in list(kinds):
        raise ValueError(
            f"adapters.method is {method!r}, which PEFT {peft.__version__} does not have. "
            f"{near_matches(str(method), sorted(kinds))}"
        )
    config_class, tuner = PEFT_TYPE_TO_CONFIG_MAPPING[kinds[method]], PEFT_TYPE_TO_TUNER_MAPPING[kinds[method]]
    known_keys = [field.name for field in dataclasses.fields(config_class) if field.name not in _RECORDS]
    if not issubclass(tuner, BaseTuner) or "target_modules" not in known_keys:
        raise refusal_of_unmerged(method, "it adds to what layers read or compute, and changes no weights")
    if method in _STEPPED:
        raise ValueError(f"adapters.method is {method!r}, {_STEPPED[method]}; expected another, such as lora.")
    arguments = {key: value for key, value in options.items() if key not in _OURS}
    for key in arguments:
        if key not in known_keys:
            raise ValueError(
                f"adapters of method {method!r} have no option {key!r}. {near_matches(str(key), known_keys)}"
            )
    arguments = {**_DEFAULTS.get(method, {}), **arguments}
    if method not in _TARGETS_OF_PEFT:
        arguments.setdefault("target_modules", "all-linear")
    checked_config = read_options(cast(Any, config_class), arguments, "config", prefix="adapters.")
    # The config turns names into a set, whose order differs between processes, so the original list is kept.
    arguments = {
        key: value if key == "target_modules" else getattr(checked_config, key) for key, value in arguments.items()
    }
    return AdapterChoice(method, cast(AdapterLayers, layers), config_class, {**arguments, "task_type": "CAUSAL_LM"})


def check_adapters(options: Mapping[str, Any], model_config: PreTrainedConfig) -> None:
    """Check from a model's config whether the model can have the adapters that the options name.

    Args:
        options: Value of `RunOptions.adapters`.
        model_config: Config of the model.

    Raises:
        ValueError: If the model cannot have the adapters.
    """
    choice = read_adapters(options)
    if choice.layers != "new":
        return
    if not recorded_new_layers(model_config):
        raise ValueError(
            f"adapters.layers is 'new', but the config of this {model_config.model_type} model records no new layers in "
            "upscale.new_layers; upscale the model first, or set adapters.layers: base."
        )
    if "target_modules" not in choice.arguments:
        raise ValueError(
            f"adapters.layers is 'new' and adapters.method {choice.method!r}, for which PEFT chooses modules itself; give "
            "adapters.target_modules too."
        )


def refusal_of_unmerged(method: str, reason: str = "") -> ValueError:
    """Return the error for a method whose result cannot be merged into the weights.

    Args:
        method: PEFT's name of the method.
        reason: Why merging is impossible. Default: `""`, no reason is given.
    """
    reason_in_brackets = f" ({reason})" if reason else ""
    return ValueError(
        f"adapters.method is {method!r}, {_UNMERGED}{reason_in_brackets}; expected one that changes weights, such as lora or osf."
    )
