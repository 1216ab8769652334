"""Adapters on a model that is fine-tuned, and what is told of them."""

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from midus_hf.sft.options import LoraOptions
from midus_hf.training.freezing import recorded_new_layers, recorded_new_memories
from midus_hf.training.lora import lora_config


def add_adapters(model: PreTrainedModel, options: LoraOptions) -> PeftModel:
    """Put adapters on the linear layers of the base; what is new in an upscaled model trains whole beside them.

    Args:
        model: As `from_pretrained` gives it.
        options: Of the adapters.
    """
    given: dict[str, Any] = {"r": options.r, "lora_alpha": options.alpha, "lora_dropout": options.dropout}
    if recorded_new_layers(model.config) or recorded_new_memories(model.config):
        config = lora_config(model, **given)
    else:
        config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **given)
    adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    return adapted


def describe_adapters(model: PeftModel, options: LoraOptions) -> str:
    """What trains, in a sentence.

    Args:
        model: With adapters.
        options: Of the adapters.
    """
    training, total = model.get_nb_trainable_parameters()
    whole = getattr(model.peft_config["default"], "modules_to_save", None)
    beside = ", and what is new in the model whole" if whole else ""
    return (
        f"Training adapters of rank {options.r} on the base{beside}: {training:,} of {total:,} parameters "
        f"({training / total:.2%})"
    )
