"""Models that host memory. Importing this package registers their families, and those that others offer, with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from midus_hf.config.plugins import load_offered
from midus_hf.models.families import FAMILIES

load_offered("midus_hf.families", refuse=False)  # one that is broken must not take the others along

for _causal_lm in FAMILIES.values():
    _config = _causal_lm.config_class
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _causal_lm.model_class, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)

__all__ = ["FAMILIES"]
