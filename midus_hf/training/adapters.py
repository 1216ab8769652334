"""Adapters of PEFT: a run's adapters, which are merged at its end, and a `LoraConfig` for scripts. This needs PEFT."""

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners import tuners_utils
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from transformers import PreTrainedModel

from midus_hf.config.options import read_options
from midus_hf.config.wording import near_matches
from midus_hf.models.fetching import Banks
from midus_hf.training.optim.freezing import has_adapters, new_modules, task_head

# Methods that adapt other modules than linear layers, or only some linear layers, so that PEFT chooses the modules.
_TARGETS_OF_PEFT = ("ia3", "ln_tuning", "trainable_tokens")

# PEFT's type of a task, by the end of the name of the model's class.
_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def lora_config(model: PreTrainedModel, *, r: int = 16, lora_alpha: int = 32, **options: Any) -> LoraConfig:
    """Return a `LoraConfig` for an upscaled model: adapters on the base, new layers and memories trained whole.

    An adapter on a new layer could not replace training it whole: while a memory's values are zero, nothing else in the
    layer has a gradient, and values are no linear layer that could have an adapter. So PEFT copies every new layer,
    trains the copy, saves the copy with the adapters, and puts it in the layer's place when adapters are merged.

    Args:
        model: A model from `from_pretrained`, not yet wrapped by PEFT.
        r: Rank of the adapters. Default: 16.
        lora_alpha: Scale of the adapters multiplied by `r`: adapters are scaled by `lora_alpha / r`. Default: 32.
        options: Other arguments of `LoraConfig`. By default, `target_modules` are all linear layers of the base, and
            `task_type` is that of the model's class, by which PEFT knows the head of a classifier, and trains the head
            whole; `modules_to_save` are added to the new layers.

    Raises:
        ValueError: If the config of the model records no new layers or memories, or the model is wrapped already.
    """
    if has_adapters(model):
        raise ValueError("the model is wrapped by PEFT already; expected the model that from_pretrained returns.")
    new = new_modules(model)
    if not new:
        raise ValueError(
            f"the config of this {model.config.model_type} model records no new layers in upscale.new_layers, which "
            "would train whole; upscale the model first, or make a peft.LoraConfig."
        )
    kind = type(model).__name__
    task = next((task for name, task in _TASKS.items() if kind.endswith(name)), "CAUSAL_LM")
    options = {"target_modules": "all-linear", "task_type": task, **options}
    head = [name for name, module in model.named_children() if module in task_head(model)]
    if head and options["target_modules"] == "all-linear":
        options.setdefault("exclude_modules", head)
    options["modules_to_save"] = [*new, *(options.get("modules_to_save") or [])]
    return LoraConfig(r=r, lora_alpha=lora_alpha, **options)


def read_adapters(options: Mapping[str, Any]) -> tuple[PeftConfig, bool]:
    """Return the PEFT config of the key `adapters`, and whether what is new in the model trains whole beside the adapters.

    Raises:
        ValueError: If PEFT has no method of this name, or `layers` or a key of the method's config is unknown or wrong.
    """
    method, layers = options.get("method", "lora"), options.get("layers", "base")
    if layers not in ("base", "all"):
        raise ValueError(
            f"adapters.layers is {layers!r}; expected base or all. PEFT's layers_to_transform lists layers by their indices."
        )
    kinds = {kind.value.lower(): kind for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    if method not in list(kinds):
        raise ValueError(
            f"adapters.method is {method!r}, which PEFT {peft.__version__} does not have. "
            f"{near_matches(str(method), sorted(kinds))}"
        )
    if method == "adalora":
        raise ValueError(
            "adapters.method is 'adalora', whose ranks are allotted by a call after every step, which the Trainer does not make; "
            "expected another, such as lora."
        )
    config_class: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kinds[method]]
    if not issubclass(PEFT_TYPE_TO_TUNER_MAPPING[kinds[method]], BaseTuner) or not hasattr(
        config_class, "target_modules"
    ):
        raise _unmerged(method, "it changes no weights")
    arguments = {key: value for key, value in options.items() if key not in ("method", "layers")}
    if method == "lora":
        arguments = {"r": 16, "lora_alpha": 32, **arguments}
    if method not in _TARGETS_OF_PEFT:
        arguments.setdefault("target_modules", "all-linear")
    config = read_options(config_class, arguments, "config", prefix="adapters.")
    config.task_type = "CAUSAL_LM"
    return config, layers == "base"


def add_adapters(model: PreTrainedModel, options: Mapping[str, Any]) -> tuple[PeftModel, str]:
    """Put adapters by the key `adapters` on a model from `from_pretrained`; return it wrapped, and a sentence on what trains.

    Raises:
        ValueError: If PEFT refuses the adapters, or could not merge them into the weights at the end of the run.
    """
    config, trains_new = read_adapters(options)
    method = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    new = list(new_modules(model)) if trains_new else []
    if new:
        if not hasattr(config, "modules_to_save"):
            raise ValueError(
                f"adapters.method is {method!r}, beside which PEFT trains no layer whole, but the new parts of this "
                f"{model.config.model_type} model must train whole; expected another method, or adapters.layers: all."
            )
        config.modules_to_save = [*new, *(config.modules_to_save or [])]
    try:
        adapted = cast(PeftModel, get_peft_model(model, config))
        # PEFT refuses modules whose weights kernels of Mamba read by themselves, by the names of types, which ours are not.
        native = SimpleNamespace(config=SimpleNamespace(model_type=model.config.model_type.removeprefix("midus_")))
        for name, module in adapted.named_modules():
            if isinstance(module, BaseTunerLayer):
                tuners_utils._check_lora_target_modules_mamba(config, cast(Any, native), name.rpartition(".")[2])
    except (ValueError, TypeError) as error:
        raise ValueError(f"adapters of method {method!r} cannot be put on this model: {error}") from error
    _check_merging(adapted, method)
    banks: Banks | None = getattr(model, "banks", None)
    if banks is not None:
        banks.trainable = trains_new
    for name, parameter in adapted.named_parameters():
        # For some methods PEFT creates adapters in the dtype of the weights. They train in float32, as only merged weights are saved.
        if parameter.requires_grad and ".modules_to_save." not in name:
            parameter.data = parameter.data.float()
    training, total = adapted.get_nb_trainable_parameters()
    blocks = sum(layout.bank for layout in banks.layouts.values()) if banks is not None and banks.trainable else 0
    return adapted, (
        f"Training adapters of method {method} on {'the base, and what is new in the model whole' if new else 'all layers'}: "
        f"{training:,} of {total:,} parameters ({training / total:.2%})"
        f"{f'; and the blocks of the bank, {blocks:,} parameters, as texts fetch them' if blocks else ''}"
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


def _check_merging(model: PeftModel, method: str) -> None:
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
        raise _unmerged(method, str(error).rstrip(".")) from error
    if _is_zero(layers[name]) and (_is_zero(trained) or not untrained.get_base_layer().weight.isfinite().all()):
        raise ValueError(
            f"adapters.method is {method!r}, which with these options cannot train {name.removeprefix('base_model.model.')}, "
            "whose weights are zero at first; expected one that adds to weights, such as osf or lora without use_dora, or other "
            "layers."
        )


def _unmerged(method: str, reason: str) -> ValueError:
    """Return the error for a method whose result cannot be merged into the weights, with the reason if PEFT gives one."""
    return ValueError(
        f"adapters.method is {method!r}, whose result cannot be merged into the weights, as the result of a run is"
        f"{f' ({reason})' if reason else ''}; expected one that changes weights, such as lora or osf."
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
