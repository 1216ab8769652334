"""Models that host memory. Importing this package registers their families with the Auto classes, other packages' families too."""

from midus_hf.config.plugins import load_offered
from midus_hf.models import on_demand  # noqa: F401 - more families join when a checkpoint names their type
from midus_hf.models.families import FAMILIES

load_offered("midus_hf.families", refuse=False)  # a broken family must not keep the others from loading

__all__ = ["FAMILIES"]
