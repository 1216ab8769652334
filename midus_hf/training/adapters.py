"""PEFT adapters of a run: their options, where they are put on a model, and what trains beside them. This needs PEFT."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, cast, get_args

import peft
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from midus_hf.config.options import read_options
from midus_hf.config.wording import near_matches
from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.models.fetching import Banks
from midus_hf.models.parts import decoder_of
from midus_hf.training.arguments import AdapterLayers
from midus_hf.training.optim.freezing import new_layers, recorded_new_layers
from midus_hf.training.optim.lora import names_of_new_modules
from midus_hf.training.optim.parameter_groups import banks_that_train

# Keys of the key `adapters` that are no arguments of the method's config.
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


@dataclasses.dataclass(frozen=True)
class AdapterChoice:
    """The adapters of a run.

    Args:
        method: PEFT's name of the method, in lower case.
        arguments: Arguments of this config: the user's, and this project's defaults.
    """

    method: str
    layers: AdapterLayers
    config_class: type[PeftConfig]
    arguments: dict[str, Any]

    def config(self, **changes: Any) -> PeftConfig:
        """Return the method's config, with `changes` added to the arguments."""
        return self.config_class(**{**self.arguments, **changes})


def read_adapters(options: Mapping[str, Any]) -> AdapterChoice:
    """Read the value of the key `adapters`.

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
        raise _refusal_of_unmerged(method, "it adds to what layers read or compute, and changes no weights")
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
    """Check from a model's config whether the model can have the adapters of the key `adapters`, or raise `ValueError`."""
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


def _refusal_of_unmerged(method: str, reason: str) -> ValueError:
    """Return the error for a method whose result cannot be merged into the weights, with the reason if PEFT gives one."""
    reason_in_brackets = f" ({reason})" if reason else ""
    return ValueError(
        f"adapters.method is {method!r}, whose result cannot be merged into the weights, as the result of a run is"
        f"{reason_in_brackets}; expected one that changes weights, such as lora or osf."
    )


def add_adapters(model: PreTrainedModel, options: Mapping[str, Any]) -> PeftModel:
    """Put adapters by the key `adapters` on a model from `from_pretrained`, and return the model wrapped by PEFT.

    Raises:
        ValueError: If the model cannot have the adapters, or they could not be merged into its weights.
    """
    choice = read_adapters(options)
    changes: dict[str, Any] = {}
    if choice.layers == "base":
        new_modules = names_of_new_modules(model)
        if new_modules and "modules_to_save" not in [field.name for field in dataclasses.fields(choice.config_class)]:
            raise ValueError(
                f"adapters.method is {choice.method!r}, beside which PEFT trains no layer whole, but the new parts of this "
                f"{model.config.model_type} model must train whole; expected another method, or adapters.layers: all."
            )
        if new_modules:
            changes["modules_to_save"] = [*new_modules, *(choice.arguments.get("modules_to_save") or [])]
    elif choice.layers == "new":
        changes["target_modules"] = _targets_in_new_layers(model, choice)
    try:
        adapted = get_peft_model(model, choice.config(**changes))
    except ValueError as error:
        raise ValueError(f"adapters of method {choice.method!r} cannot be put on this model: {error}") from error
    assert isinstance(adapted, PeftModel)
    banks: Banks | None = getattr(model, "banks", None)
    if banks is not None:
        banks.trainable = choice.layers == "base"
    _check_merging(adapted, choice)
    for name, parameter in adapted.named_parameters():
        # For some methods PEFT creates adapters in the dtype of the weights. They train in float32, as only merged weights are saved.
        if parameter.requires_grad and ".modules_to_save." not in name:
            parameter.data = parameter.data.float()
    return adapted


def describe_adapters(model: PeftModel, options: Mapping[str, Any]) -> str:
    """Return a sentence about what trains in a model with adapters by the key `adapters`."""
    choice = read_adapters(options)
    where = {"base": "the base", "new": "the new layers alone", "all": "all layers"}[choice.layers]
    training, total = model.get_nb_trainable_parameters()
    trained_whole = getattr(model.peft_config["default"], "modules_to_save", None)
    and_whole = ", and what is new in the model whole" if trained_whole and choice.layers == "base" else ""
    blocks = sum(layout.bank for banks in banks_that_train(model) for layout in banks.layouts.values())
    fetched = f"; and the blocks of the bank, {blocks:,} parameters, as texts fetch them" if blocks else ""
    return (
        f"Training adapters of method {choice.method} on {where}{and_whole}: {training:,} of {total:,} parameters "
        f"({training / total:.2%}){fetched}"
    )


def merge_adapters(model: PeftModel) -> PreTrainedModel:
    """Merge adapters into the weights, and put modules that trained whole in place; return the model without PEFT.

    The model with adapters must not be used afterwards.
    """
    base: Any = model.get_base_model()
    for name, module in list(base.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            # For most methods PEFT can unwrap only modules that directly have a weight, and not whole layers.
            trained = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            base.set_submodule(name, trained)
    tuner: Any = model
    return tuner.merge_and_unload()


def _targets_in_new_layers(model: PreTrainedModel, choice: AdapterChoice) -> list[str]:
    """Return the names of the modules in new layers that get adapters."""
    stack = decoder_of(model).layers
    names = {module: name for name, module in model.named_modules()}
    layers = [stack[index] for index in new_layers(model.config)]
    if any(isinstance(module, DeclaredModule) for layer in layers for module in layer.modules()):
        raise ValueError(
            f"adapters.layers is 'new', but the new layers of this {model.config.model_type} model hold memory, whose values "
            "adapters cannot train; set adapters.layers: base, where they train whole."
        )
    targets = choice.arguments["target_modules"]
    inside = [module for layer in layers for module in layer.modules()]
    if targets == "all-linear":
        return [names[module] for module in inside if isinstance(module, nn.Linear)]
    matching_names = [
        names[module]
        for module in inside
        if (
            re.fullmatch(targets, names[module])
            if isinstance(targets, str)
            else any(f".{names[module]}".endswith(f".{target}") for target in targets)
        )
    ]
    if not matching_names:
        raise ValueError(
            f"adapters.target_modules is {targets!r}, which no modules of the new layers {new_layers(model.config)} match; expected "
            "names in them, such as q_proj."
        )
    return matching_names


def _check_merging(model: PeftModel, choice: AdapterChoice) -> None:
    """Check on a copy of one adapted layer, one with zero weights if possible, that PEFT can merge the adapters.

    A layer with zero weights is the hardest case: adapters that multiply the weights cannot train them, and adapters
    that divide by the norm of the weights give NaN.
    """
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    }
    assert layers, "PEFT refuses a model without modules to adapt"
    name = next((name for name, layer in layers.items() if _is_zero(layer)), next(iter(layers)))
    try:
        untrained = _merged_copy(layers[name], as_if_trained=False)
        trained = _merged_copy(layers[name], as_if_trained=True)
    except (NotImplementedError, ValueError) as error:
        raise _refusal_of_unmerged(choice.method, str(error).rstrip(".")) from error
    if _is_zero(layers[name]) and (_is_zero(trained) or not untrained.get_base_layer().weight.isfinite().all()):
        raise ValueError(
            f"adapters.method is {choice.method!r}, which with these options cannot train {name.removeprefix('base_model.model.')}, "
            "whose weights are zero at first; expected one that adds to weights, such as osf or lora without use_dora, or other "
            "adapters.layers."
        )


def _merged_copy(layer: Any, as_if_trained: bool) -> Any:
    """Return a copy of a layer with its adapter merged, perhaps with random weights of the adapter, as if it had trained."""
    merged = copy.deepcopy(layer)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for parameter in merged.parameters():
            if as_if_trained and parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape))
        merged.merge()
    return merged


def _is_zero(layer: Any) -> bool:
    """Return whether the weights that an adapter modifies are all zero."""
    weight = getattr(layer.get_base_layer(), "weight", None)
    return weight is not None and not weight.any()
