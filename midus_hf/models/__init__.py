"""Models that host memory. Importing this package registers their families with the Auto classes, other packages' families too.

Classes of more families are made when a checkpoint names their type.
"""

import warnings
from contextlib import suppress
from typing import Any

import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from midus_hf.config.backbone import MEMORY_PREFIX
from midus_hf.config.plugins import load_offered
from midus_hf.models import sites as sites
from midus_hf.models.families import FAMILIES, LARGER_FAMILIES
from midus_hf.version import NEWEST_TRIED_TRANSFORMERS, __version__

__all__ = ["FAMILIES"]

if Version(transformers.__version__).release[:2] > Version(NEWEST_TRIED_TRANSFORMERS).release:
    warnings.warn(
        f"midus_hf {__version__} was tried with transformers up to {NEWEST_TRIED_TRANSFORMERS}, and {transformers.__version__} is "
        "installed: check results against the base, or install a version that was tried.",
        stacklevel=2,
    )


class _OnDemand(dict):
    """Configs that were registered with the Auto classes; configs of more families join when a checkpoint names their type."""

    def __contains__(self, model_type: object) -> bool:
        return super().__contains__(model_type) or self._can_join(model_type)

    def __getitem__(self, model_type: str) -> Any:
        self._can_join(model_type)
        return super().__getitem__(model_type)

    def _can_join(self, model_type: object) -> bool:
        """Return whether a type, say `midus_cohere`, is one of a family that hosts memory; make the classes of the family first."""
        if not isinstance(model_type, str) or not model_type.startswith(MEMORY_PREFIX):
            return False
        from midus_hf.models.inference.modules import host_type
        from midus_hf.models.inference.tiny import UnknownArchitecture

        native = model_type.removeprefix(MEMORY_PREFIX)
        if native not in FAMILIES and native not in LARGER_FAMILIES and native in CONFIG_MAPPING:
            with suppress(UnknownArchitecture):
                host_type(native)
        return native in FAMILIES or native in LARGER_FAMILIES


# transformers looks a type's config up in this table, which has no public name (seen in 5.17 to 5.23). If the table is gone, a family
# joins only by `host_type`.
if isinstance(getattr(CONFIG_MAPPING, "_extra_content", None), dict):
    CONFIG_MAPPING._extra_content = _OnDemand(CONFIG_MAPPING._extra_content)

load_offered("midus_hf.families", refuse=False)  # a broken family must not keep the others from loading
