"""Models that host memory. Importing this package registers their families with the Auto classes, other packages' families too."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from midus_hf.config.plugins import load_offered
from midus_hf.models.families import FAMILIES

load_offered("midus_hf.families", refuse=False)  # a broken family must not keep the others from loading

for _causal_lm in FAMILIES.values():
    _config = _causal_lm.config_class
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _causal_lm.model_class, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)

__all__ = ["FAMILIES"]
