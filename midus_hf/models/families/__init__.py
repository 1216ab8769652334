"""Families whose layers host memory, and their registration with the Auto classes of Transformers.

A module of this package has the classes of one family: thin subclasses of the family's own. `template.py` makes it from the row of
the type, for the main types when `midus_hf.models` is imported, and for others when a config names them.
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
)

from midus_hf.models.listing import show_in_transformers

#: Ends of the names of task heads' classes, as of the Auto classes that load them.
HEAD_KINDS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")

#: Language models that host memory, by the `model_type` of their family.
FAMILIES: dict[str, type[PreTrainedModel]] = {}

#: Composite models whose language model hosts memory, by the `model_type` of their family.
COMPOSITE_FAMILIES: dict[str, type[PreTrainedModel]] = {}


def register_family(causal_lm_class: Any) -> Any:
    """Register a language model with the Auto classes, and by its family's `model_type`.

    `transformers serve` finds the language model too, in the module of transformers by its name. If several types share a class of
    transformers, such as `LlamaForCausalLM`, the class for any config stands under the name.
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
