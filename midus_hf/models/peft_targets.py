"""PEFT's default target modules for our model types: those of the family that each is made from."""

import sys

_TABLES = "peft.utils.constants"
_MODEL_TYPE_PREFIX = "midus_"


def register_targets(model_type: str) -> None:
    """Enter a model type into every table of PEFT that knows its family, if PEFT has been imported.

    PEFT looks default targets up by `model_type`. It is not imported for that: where it comes later than the model, name
    `target_modules`. What a table says of the model type already stays.

    Args:
        model_type: Such as `"midus_llama"`.
    """
    family_type = model_type.removeprefix(_MODEL_TYPE_PREFIX)
    for name, table in vars(sys.modules.get(_TABLES, object)).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_TARGET_MODULES_MAPPING"):
            if family_type in table:
                table.setdefault(model_type, table[family_type])
