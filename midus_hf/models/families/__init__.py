"""Families whose layers host memory, and their registration with Auto classes and other tables.

A module of this package has the classes of one family, which `template.py` makes from the row of the type: for the main types when
`midus_hf.models` is imported, for others when a config names them.
"""

import sys
from typing import Any

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedModel,
    conversion_mapping,
)

_PEFT_CONVERSIONS = "peft.utils.transformers_weight_conversion"
#: Ends of the names of task heads' classes, as of the Auto classes that load them.
HEAD_KINDS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
#: Language models that host memory, by the `model_type` of their family.
FAMILIES: dict[str, type[PreTrainedModel]] = {}
#: Composite models whose language model hosts memory, by the `model_type` of their family.
COMPOSITE_FAMILIES: dict[str, type[PreTrainedModel]] = {}


def share_conversions(causal_lm_class: Any) -> None:
    """Let a hosting language model's checkpoints be read and written as those of its family.

    Transformers, which stores experts of many types one by one and holds them as one tensor, finds conversions by `model_type` and
    class name. PEFT finds the experts of adapters from before Transformers 5 by it too.
    """
    config_class = causal_lm_class.config_class
    native_type = config_class.__bases__[-1].model_type
    native_class = causal_lm_class.__bases__[-1]
    for native, own in ((native_type, config_class.model_type), (native_class.__name__, causal_lm_class.__name__)):
        conversions = conversion_mapping.get_checkpoint_conversion_mapping(native)
        if conversions:
            conversion_mapping.register_checkpoint_conversion_mapping(own, conversions, overwrite=True)
    for module in (conversion_mapping, sys.modules.get(_PEFT_CONVERSIONS)):  # PEFT copies the table of transformers
        patterns = getattr(module, "_MODEL_TO_CONVERSION_PATTERN", None)
        if patterns is not None and conversion_mapping.get_checkpoint_conversion_mapping(native_type):
            patterns[config_class.model_type] = patterns.get(native_type, native_type)


class _Shown:
    """Attribute of only the module `transformers`, among all modules that load their contents on demand."""

    def __init__(self, name: str, model_class: type):
        self._name = name
        self._model_class = model_class

    def __get__(self, module: Any, owner: type) -> type:
        if getattr(module, "__name__", None) != "transformers":
            raise AttributeError(f"{getattr(module, '__name__', owner.__name__)!r} has no attribute {self._name!r}")
        return self._model_class


def show_in_transformers(name: str, model_class: type) -> None:
    """Show a class as an attribute of transformers, where `transformers serve` looks for it."""
    # On the class: transformers runs its __init__ again when it loads processors, and a server may hold the first module.
    setattr(type(transformers), name, _Shown(name, model_class))


def register_family(causal_lm_class: Any) -> Any:
    """Register a language model with the Auto classes, and by its family's `model_type`.

    `transformers serve` finds it too, in the module of transformers by its name. For a class that several types share, such as
    `LlamaForCausalLM`, the class for any config has the name.
    """
    config_class: Any = causal_lm_class.config_class
    FAMILIES[config_class.__bases__[-1].model_type] = causal_lm_class
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, causal_lm_class.model_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, causal_lm_class, exist_ok=True)
    module = sys.modules[config_class.__module__]
    for kind in config_class.head_kinds:  # heads stand above the language model in the module
        head = getattr(module, config_class.class_names()[f"AutoModel{kind}"])
        getattr(transformers, f"AutoModel{kind}").register(config_class, head, exist_ok=True)
    name = causal_lm_class.__name__
    is_shared = sum(each.__name__ == name for each in FAMILIES.values()) > 1
    show_in_transformers(name, AutoModelForCausalLM if is_shared else causal_lm_class)
    return causal_lm_class


def register_composite_family(composite_class: Any) -> Any:
    """Register a composite model with the Auto classes, and by its family's `model_type`."""
    config_class: Any = composite_class.config_class
    COMPOSITE_FAMILIES[config_class.__bases__[-1].model_type] = composite_class
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for auto_class in (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForCausalLM):
        auto_class.register(config_class, composite_class, exist_ok=True)
    show_in_transformers(composite_class.__name__, composite_class)
    return composite_class
