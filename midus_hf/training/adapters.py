"""LoRA with PEFT: the adapters of a run, and a `LoraConfig` for scripts. Requires PEFT."""

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import tuners_utils
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.config.options import read_options
from midus_hf.models.view import ModelView, has_adapters

# PEFT's type of a task, by the end of the name of the model's class.
_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def lora_config(model: PreTrainedModel, *, r: int = 16, lora_alpha: int = 32, **options: Any) -> LoraConfig:
    """Return a `LoraConfig`: adapters on an upscaled model's base; new layers and memories train in full.

    While a memory's values are zero, nothing else in its layer has a gradient, and values take no adapter. So PEFT copies every new
    layer, trains and saves the copy, and replaces the layer by it when adapters are merged.

    Args:
        model: A model from `from_pretrained`, not yet wrapped by PEFT.
        r: Rank of the adapters. Default: 16.
        lora_alpha: Adapters are scaled by `lora_alpha / r`. Default: 32.
        options: Other arguments of `LoraConfig`. By default, `target_modules` are all linear layers of the base, and `task_type`
            follows from the model's class (PEFT trains the head of a classifier in full); `modules_to_save` are added to the new
            layers.

    Raises:
        RequestError: If the model's config records no new layers or memories, or the model is wrapped already.
    """
    view = ModelView(model)
    if has_adapters(model):
        raise RequestError("the model is wrapped by PEFT already; expected the model that from_pretrained returns.")
    new = view.new_modules
    if not new:
        raise RequestError(
            f"the config of this {model.config.model_type} model records no new layers in upscale.new_layers, which "
            "would be trained in full; upscale the model first, or make a peft.LoraConfig."
        )
    kind = type(model).__name__
    task = next((task for name, task in _TASKS.items() if kind.endswith(name)), "CAUSAL_LM")
    options = {"target_modules": "all-linear", "task_type": task, **options}
    head = [name for name, module in model.named_children() if module in view.task_head]
    if head and options["target_modules"] == "all-linear":
        options.setdefault("exclude_modules", head)
    config = LoraConfig(r=r, lora_alpha=lora_alpha, **options)
    config.modules_to_save = [*new, *(config.modules_to_save or [])]
    return config


def read_adapters(options: Mapping[str, Any]) -> tuple[LoraConfig, bool]:
    """Return the `LoraConfig` of the key `adapters`, and whether new parts also train in full."""
    layers = options.get("layers", "base")
    if layers not in ("base", "all"):
        raise RequestError(f"adapters.layers is {layers!r}; expected base or all. Set layers_to_transform for some.")
    keys = {key: value for key, value in options.items() if key != "layers"}
    keys = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **keys}
    with as_request_error("PEFT refuses the keys of adapters", ValueError):
        return read_options(LoraConfig, keys, "config", prefix="adapters."), layers == "base"


def add_adapters(view: ModelView, options: Mapping[str, Any]) -> tuple[PeftModel, str]:
    """Wrap a model with the adapters of the key `adapters`; also return a sentence on what trains."""
    config, trains_new = read_adapters(options)
    model = view.model
    new = list(view.new_modules) if trains_new else []
    config.modules_to_save = [*new, *(config.modules_to_save or [])] or None
    try:
        adapted = cast(PeftModel, get_peft_model(model, config))
        # PEFT refuses modules whose weights are read directly by Mamba kernels, by a list of model types that lacks ours.
        native = SimpleNamespace(config=SimpleNamespace(model_type=model.config.model_type.removeprefix("midus_")))
        for name, module in adapted.named_modules():
            if isinstance(module, BaseTunerLayer):
                tuners_utils._check_lora_target_modules_mamba(config, cast(Any, native), name.rpartition(".")[2])
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestError(f"adapters cannot be put on this model: {error}") from error
    for name, module in adapted.named_modules():
        if isinstance(module, BaseTunerLayer):
            try:  # on a copy: aLoRA cannot be merged, nor DoRA on rows of zeros, as in new layers
                copy.deepcopy(module).merge(safe_merge=True)
            except (ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
                raise RequestError(
                    f"adapters of {name.removeprefix('base_model.model.')} could not be merged at the end: {error} Change the "
                    "keys of adapters, or leave the module out of target_modules or layers_to_transform."
                ) from error
    banks = view.banks
    if banks is not None:
        banks.trainable = trains_new and view.adds_bank
    training, total = adapted.get_nb_trainable_parameters()
    if not training:
        raise RequestError(f"nothing is trained with adapters {dict(options)}; expected some. Remove inference_mode.")
    blocks = sum(layout.bank for layout in banks.layouts.values()) if banks is not None and banks.trainable else 0
    return adapted, (
        f"Training adapters on {'the base, and all new parameters' if new else 'all layers'}: "
        f"{training:,} of {total:,} parameters ({training / total:.2%})"
        f"{f'; and the blocks of the bank, {blocks:,} parameters, as texts fetch them' if blocks else ''}"
    )
