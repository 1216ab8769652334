"""Refusal of adapters of the base by models that host memory, since upscaling renumbers the layers."""

import importlib
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def base_layer_numbers(config: Any) -> dict[int, int]:
    """Return the number in the upscaled model of each layer of the base; `{}` for a model that was not upscaled.

    A layer that occurs twice in the upscaled model gets the number of its first occurrence.

    Args:
        config: Config of a model. Its `upscale` holds the plan by which the model was made.
    """
    record = getattr(config.get_text_config(), "upscale", None)
    plan = record.get("plan", []) if isinstance(record, Mapping) else []
    numbers: dict[int, int] = {}
    for number, layer in enumerate(plan):
        if "base" in layer:
            numbers.setdefault(layer["base"], number)
    return numbers


def refuse_adapter_of_base(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_of_torch: Any, **_more: Any
) -> None:
    """Refuse an adapter that was made for the base of an upscaled model, before the adapter's weights are loaded.

    This is a pre-hook of `load_state_dict`, by which PEFT loads adapters. At that time, PEFT has put modules of the adapter on every
    layer that its targets match. If all weights have layer numbers of the base, but later layers have modules of the adapter
    too, the adapter was made for the base.

    Args:
        module: An upscaled model.
        state_dict: The tensors to load.
        prefix: Prefix of the module's names in `state_dict`.

    Raises:
        ValueError: If the adapter numbers layers as in the base, and this model numbers them otherwise.
    """
    if not base_layer_numbers(module.config):
        return
    for adapter, names in adapter_tensors(module).items():
        loaded = {name for name in names if prefix + name in state_dict}
        configs = getattr(module, "peft_config", {})
        check_adapter_layers(module.config, adapter, loaded, names - loaded, configs.get(adapter))


def check_adapter_layers(
    config: Any, adapter: str, loaded: Iterable[str], missing: Iterable[str], adapter_config: Any = None
) -> None:
    """Check that an adapter was not made for the base of an upscaled model; warn if that is not certain.

    Args:
        config: Config of the upscaled model.
        adapter: The adapter's name.
        loaded: Names of the tensors that the adapter brings.
        missing: Names of the tensors that the adapter's targets require in this model, but that the adapter does not bring.
        adapter_config: PEFT's config of the adapter, with the model that the adapter was trained on. Default: not known.

    Raises:
        ValueError: If the adapter was made for the base.
    """
    numbers = base_layer_numbers(config)
    has, lacks = _layers(loaded), _layers(missing)
    moved = [layer for layer in has if numbers.get(layer, layer) != layer]
    if not moved or has[-1] >= len(numbers):
        return
    first, num_layers = moved[0], config.get_text_config().num_hidden_layers
    moving = f"layer {first} of the base is layer {numbers[first]} here"
    if any(layer > has[-1] for layer in lacks):
        raise ValueError(
            f"adapter {adapter!r} has weights for layers {has[0]} to {has[-1]} and none for {', '.join(map(str, lacks))}, which its "
            f"targets also match: it was made for the base of {len(numbers)} layers, and {moving}. On this model of "
            f"{num_layers} layers it would change the wrong ones. Expected an adapter that was trained on this model. "
            "Or let 'upscale adapter' write this one for this model."
        )
    trained_on = getattr(adapter_config, "base_model_name_or_path", None)
    if trained_on and trained_on != config._name_or_path:
        warnings.warn(
            f"adapter {adapter!r} was trained on {trained_on!r} and changes layers {has[0]} to {has[-1]}. If that is the base of "
            f"this model, these are the wrong layers: {moving}.",
            stacklevel=2,
        )


def adapter_tensors(module: nn.Module) -> dict[str, set[str]]:
    """Return for each adapter the names of the tensors that PEFT has put on submodules of a module.

    Args:
        module: A model, with or without adapters.
    """
    tensors: dict[str, set[str]] = {}
    for module_name, within in module.named_modules():
        for attribute in getattr(within, "adapter_layer_names", ()):
            adapters = getattr(within, attribute, None)
            for name, _ in adapters.named_parameters() if isinstance(adapters, nn.Module) else ():
                # A ModuleDict has "default.weight", a ParameterDict "default".
                tensors.setdefault(name.split(".")[0], set()).add(f"{module_name}.{attribute}.{name}")
    return tensors


def _layers(names: Iterable[str]) -> list[int]:
    matches = map(_LAYER.search, names)
    return sorted({int(match[1]) for match in matches if match})


class TakesAdapters:
    """Mixin for a model that refuses to load adapters made for the model's base."""

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as transformers does. Remove the adapter again if it was made for the base of this model.

        Raises:
            ValueError: If the adapter numbers layers as in the base, and this model numbers them otherwise.
        """
        model: Any = self
        before = set(getattr(model, "peft_config", {}))
        loading_info = super().load_adapter(*args, **kwargs)
        for adapter in set(model.peft_config) - before:
            names = adapter_tensors(model).get(adapter, set())
            missing = names & set(loading_info.missing_keys)
            try:
                check_adapter_layers(model.config, adapter, names - missing, missing, model.peft_config[adapter])
            except ValueError:
                _delete_adapter(model, adapter)
                raise
        return loading_info


def _delete_adapter(model: Any, adapter: str) -> None:
    """Remove an adapter from a model, as `delete_adapter` of Transformers does, which refuses releases of PEFT that load adapters."""
    # An import statement would make Transformers ask for PEFT wherever the code of a checkpoint is loaded.
    functional = importlib.import_module("peft.functional")
    functional.delete_adapter(
        model, adapter_name=adapter, prefix=f"{model.peft_config[adapter].peft_type.value.lower()}_"
    )
    del model.peft_config[adapter]
    if not model.peft_config:
        del model.peft_config
        model._hf_peft_config_loaded = False
