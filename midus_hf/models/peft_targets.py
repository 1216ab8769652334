"""PEFT's default target modules for our model types, taken from each model type's family."""

import sys

_TABLES = "peft.utils.constants"
_MODEL_TYPE_PREFIX = "midus_"


def register_targets(model_type: str) -> None:
    """Add a model type to every table of PEFT that has an entry for its family, if PEFT has been imported.

    PEFT looks default targets up by `model_type`. This function does not import PEFT: if PEFT is imported after the model is made,
    pass `target_modules`. Existing entries for the model type are not changed.

    Args:
        model_type: The model type, such as `"midus_llama"`.
    """
    family_type = model_type.removeprefix(_MODEL_TYPE_PREFIX)
    for name, table in vars(sys.modules.get(_TABLES, object)).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_TARGET_MODULES_MAPPING"):
            if family_type in table:
                table.setdefault(model_type, table[family_type])
