"""PEFT adapters on a model that trains: where they are put, and what trains beside them. This needs PEFT."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.models.fetching import Banks
from midus_hf.models.parts import decoder_of
from midus_hf.training.optim.freezing import new_layers
from midus_hf.training.optim.lora import names_of_new_modules
from midus_hf.training.optim.parameter_groups import banks_that_train
from midus_hf.training.run.adapter_options import AdapterChoice, read_adapters, refusal_of_unmerged

_WHERE = {"base": "the base", "new": "the new layers alone", "all": "all layers"}


def add_adapters(model: PreTrainedModel, options: Mapping[str, Any]) -> PeftModel:
    """Put adapters on a model, and return the model wrapped by PEFT.

    Args:
        model: A model from `from_pretrained`.
        options: Value of `RunOptions.adapters`.

    Raises:
        ValueError: If the model cannot have the adapters, or they could not be merged into its weights.
    """
    choice = read_adapters(options)
    changes: dict[str, Any] = {}
    if choice.layers == "base":
        new_modules = names_of_new_modules(model)
        if new_modules and "modules_to_save" not in choice.takes:
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
    """Return a sentence about what trains.

    Args:
        model: A model with adapters.
        options: Value of `RunOptions.adapters`.
    """
    choice = read_adapters(options)
    training, total = model.get_nb_trainable_parameters()
    trained_whole = getattr(model.peft_config["default"], "modules_to_save", None)
    and_whole = ", and what is new in the model whole" if trained_whole and choice.layers == "base" else ""
    blocks = sum(layout.bank for banks in banks_that_train(model) for layout in banks.layouts.values())
    fetched = f"; and the blocks of the bank, {blocks:,} parameters, as texts fetch them" if blocks else ""
    return (
        f"Training adapters of method {choice.method} on {_WHERE[choice.layers]}{and_whole}: {training:,} of {total:,} parameters "
        f"({training / total:.2%}){fetched}"
    )


def merge_adapters(model: PeftModel) -> PreTrainedModel:
    """Merge adapters into the weights, and put modules that trained whole in place; return the model without PEFT.

    Args:
        model: A model with adapters, which must not be used afterwards.
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
        untrained, trained = (
            _merged_copy(layers[name], as_if_trained=False),
            _merged_copy(layers[name], as_if_trained=True),
        )
    except (NotImplementedError, ValueError) as error:
        raise refusal_of_unmerged(choice.method, str(error).rstrip(".")) from error
    if _is_zero(layers[name]) and (_is_zero(trained) or not untrained.get_base_layer().weight.isfinite().all()):
        raise ValueError(
            f"adapters.method is {choice.method!r}, which with these options cannot train {name.removeprefix('base_model.model.')}, "
            "whose weights are zero at first; expected one that adds to weights, such as osf or lora without use_dora, or other "
            "adapters.layers."
        )


def _merged_copy(layer: Any, as_if_trained: bool) -> Any:
    """Return a copy of a layer with its adapter merged, with the adapter's weights or with random ones.

    Args:
        layer: A layer with an adapter.
        as_if_trained: Whether the adapter has random weights, as if it had trained.
    """
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
