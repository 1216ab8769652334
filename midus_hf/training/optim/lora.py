"""LoRA on the base's layers, with new layers that train whole. This needs the package PEFT, which is an extra."""

from typing import Any

from peft import LoraConfig
from transformers import PreTrainedModel

from midus_hf.models.parts import decoder_of
from midus_hf.training.optim.freezing import (
    attached_modules,
    has_adapters,
    new_layers,
    recorded_new_layers,
    recorded_new_memories,
    task_head,
)

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
    new_modules = names_of_new_modules(model)
    if not new_modules:
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
    options["modules_to_save"] = [*new_modules, *(options.get("modules_to_save") or [])]
    return LoraConfig(r=r, lora_alpha=lora_alpha, **options)


def names_of_new_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers and memories added to the base; empty if the config records none."""
    stack = decoder_of(model).layers
    name_of_stack = next(name for name, module in model.named_modules() if module is stack)
    layers = new_layers(model.config) if recorded_new_layers(model.config) else []
    attached = attached_modules(model, recorded_new_memories(model.config))
    return [*(f"{name_of_stack}.{layer}" for layer in layers), *attached]
