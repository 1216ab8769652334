"""Models that host memory. Importing this package registers their families, one per file in `families/`, and those that
other packages offer, with the Auto classes.
"""

import importlib
import pkgutil

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from midus_hf.config.plugins import load_offered
from midus_hf.models import families
from midus_hf.models.families import FAMILIES

for _module in pkgutil.iter_modules(families.__path__):
    importlib.import_module(f"{families.__name__}.{_module.name}")

load_offered("midus_hf.families", refuse=False)  # one that is broken must not take the others along

for _causal_lm in FAMILIES.values():
    _config = _causal_lm.config_class
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _causal_lm.model_class, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)

__all__ = ["FAMILIES"]
