"""What a run may be told of adapters: a method of PEFT, the keys of its config, and the layers that have them. Needs PEFT."""

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

_OURS = ("method", "layers")

_RECORDS = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
)
"""Fields of configs that tell what adapters were saved for."""

_DEFAULTS: dict[str, dict[str, Any]] = {"lora": {"r": 16, "lora_alpha": 32}}

_TARGETS_OF_PEFT = ("ia3", "ln_tuning", "trainable_tokens")
"""Methods that are for other modules than linear layers, or for some of them."""

_STEPPED = {"adalora": "whose ranks are allotted by a call after every step, which the Trainer does not make"}
"""Methods that need more of a Trainer than steps."""

_UNMERGED = "whose result cannot be merged into the weights, as what comes out of a run is"


@dataclasses.dataclass(frozen=True)
class AdapterChoice:
    """The adapters of a run.

    Args:
        method: What PEFT calls it, in small letters.
        layers: Which layers have them: see `RunOptions`.
        config_class: Of the method.
        given: What its config is given, with defaults of ours.
    """

    method: str
    layers: AdapterLayers
    config_class: type[PeftConfig]
    given: dict[str, Any]

    def config(self, **changes: Any) -> PeftConfig:
        """The method's config.

        Args:
            changes: Keys that are added or replaced.
        """
        return self.config_class(**{**self.given, **changes})

    @property
    def takes(self) -> set[str]:
        """The keys of the method's config."""
        return {field.name for field in dataclasses.fields(self.config_class)}


def read_adapters(options: Mapping[str, Any]) -> AdapterChoice:
    """Read what a run is told of adapters.

    Args:
        options: As `RunOptions.adapters`.

    Raises:
        ValueError: If PEFT has no such method, the method no such key, or what it trains cannot be merged into the weights.
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
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in _RECORDS]
    if not issubclass(tuner, BaseTuner) or "target_modules" not in known:
        raise refusal_of_unmerged(method, "it adds to what layers read or compute, and changes none")
    if method in _STEPPED:
        raise ValueError(f"adapters.method is {method!r}, {_STEPPED[method]}; expected another, such as lora.")
    given = {key: value for key, value in options.items() if key not in _OURS}
    for key in given:
        if key not in known:
            raise ValueError(f"adapters of method {method!r} have no option {key!r}. {near_matches(str(key), known)}")
    given = {**_DEFAULTS.get(method, {}), **given}
    if method not in _TARGETS_OF_PEFT:
        given.setdefault("target_modules", "all-linear")
    read = read_options(cast(Any, config_class), given, "config", prefix="adapters.")
    # Of names the config makes a set, whose order is another in every process.
    given = {key: value if key == "target_modules" else getattr(read, key) for key, value in given.items()}
    return AdapterChoice(method, cast(AdapterLayers, layers), config_class, {**given, "task_type": "CAUSAL_LM"})


def check_adapters(options: Mapping[str, Any], model_config: PreTrainedConfig) -> None:
    """See that a model can have the adapters that a run is told of, as far as its config says.

    Args:
        options: As `RunOptions.adapters`.
        model_config: Of the model.

    Raises:
        ValueError: If it cannot.
    """
    choice = read_adapters(options)
    if choice.layers != "new":
        return
    if not recorded_new_layers(model_config):
        raise ValueError(
            f"adapters.layers is 'new', but the config of this {model_config.model_type} model records no new layers in "
            "upscale.new_layers; upscale the model first, or set adapters.layers: base."
        )
    if "target_modules" not in choice.given:
        raise ValueError(
            f"adapters.layers is 'new' and adapters.method {choice.method!r}, for which PEFT chooses modules itself; give "
            "adapters.target_modules too."
        )


def refusal_of_unmerged(method: str, reason: str = "") -> ValueError:
    """What is raised of a method whose result cannot be merged.

    Args:
        method: As `AdapterChoice` has it.
        reason: Why it cannot. Default: not told.
    """
    told = f" ({reason})" if reason else ""
    return ValueError(
        f"adapters.method is {method!r}, {_UNMERGED}{told}; expected one that changes weights, such as lora or osf."
    )
