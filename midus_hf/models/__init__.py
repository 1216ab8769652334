"""Models that host memory. Importing this package registers the main families with the Auto classes."""

import warnings

import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from midus_hf.anatomy.types import MAIN_TYPES, MEMORY_PREFIX, is_listed
from midus_hf.config.plugins import load_plugins
from midus_hf.models.families import COMPOSITE_FAMILIES, FAMILIES
from midus_hf.models.families.template import host_type
from midus_hf.version import NEWEST_TRIED_TRANSFORMERS, __version__

__all__ = ["FAMILIES"]

if Version(transformers.__version__).release[:2] > Version(NEWEST_TRIED_TRANSFORMERS).release:
    warnings.warn(
        f"midus_hf {__version__} was tried with transformers up to {NEWEST_TRIED_TRANSFORMERS}, and {transformers.__version__} is "
        "installed: check results against the base, or install a version that was tried.",
        stacklevel=2,
    )


def host_named_type(model_type: str) -> None:
    """Register the classes of a type such as `midus_cohere`, if it was proven and transformers has it."""
    native = model_type.removeprefix(MEMORY_PREFIX)
    if native not in FAMILIES and native not in COMPOSITE_FAMILIES and native in CONFIG_MAPPING and is_listed(native):
        host_type(native)


for _model_type in MAIN_TYPES:  # their modules register the classes
    try:
        host_type(_model_type)
    except Exception as error:  # an import of transformers by the user comes here too
        warnings.warn(
            f"checkpoints of midus_{_model_type} cannot be loaded with transformers {transformers.__version__} "
            f"({type(error).__name__}: {error}); install a version that midus_hf was tried with.",
            stacklevel=1,
        )

load_plugins("midus_hf.families", refuse=False)  # a broken family must not keep the others from loading
