"""What other libraries know classes of models by: tables of names, and attributes of Transformers."""

import inspect
import sys
from typing import Any

import transformers
from transformers import PreTrainedModel, conversion_mapping
from transformers.models.auto import modeling_auto

_PEFT_CONVERSIONS = "peft.utils.transformers_weight_conversion"
_MODEL_TYPE_PREFIX = "midus_"


def list_model(model_class: type[PreTrainedModel]) -> None:
    """List a class in the tables of Transformers that list its family's, or list language models.

    A Trainer that computes the loss itself shifts labels for the classes in one of these tables; pipelines and servers read others.
    """
    own_type = model_class.config_class.model_type
    family_type = own_type.removeprefix(_MODEL_TYPE_PREFIX)
    names = {parent.__name__ for parent in inspect.getmro(model_class)[1:]}
    family_tables = [
        table
        for name, table in vars(modeling_auto).items()
        if name.endswith("_MAPPING_NAMES") and table.get(family_type) in names
    ]
    language_tables = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,) if model_class.can_generate() else ()
    for table in (*language_tables, *family_tables):
        table.setdefault(own_type, model_class.__name__)


def share_conversions(causal_lm_class: Any) -> None:
    """Let a hosting language model's checkpoints be read and written as those of its family.

    Transformers stores the experts of many types one by one and holds them as one tensor; what it converts, it finds by `model_type`
    and by the name of a class. PEFT finds the experts of adapters from before Transformers 5 by it too.
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
        self._name, self._model_class = name, model_class

    def __get__(self, module: Any, owner: type) -> type:
        if getattr(module, "__name__", None) != "transformers":
            raise AttributeError(f"{getattr(module, '__name__', owner.__name__)!r} has no attribute {self._name!r}")
        return self._model_class


def show_in_transformers(name: str, model_class: type) -> None:
    """Show a class as an attribute of transformers, where `transformers serve` looks for it."""
    # On the class: transformers runs its __init__ again when it loads processors, and a server may hold the first module.
    setattr(type(transformers), name, _Shown(name, model_class))
