"""The implementation of attention that a person asks for: whether a model can be made with it here."""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from midus_hf.saved_models import refusing

_ERRORS = (OSError, ValueError, ImportError)
"""What transformers raises of models that cannot be made."""


def check_attention(attn_implementation: str | None, model_config: PreTrainedConfig) -> None:
    """See that a model can be made with an implementation of attention; it is made without memory for its weights.

    A model that cannot be made at all passes: what is wrong with it is told where it is loaded.

    Args:
        attn_implementation: As in `from_pretrained`; None leaves the choice to transformers.
        model_config: Of the model.

    Raises:
        ValueError: If it is not installed, unknown, or none of the model's.
    """
    if attn_implementation is None:
        return
    try:
        _make(model_config, None)
    except _ERRORS:
        return
    words = (
        f"attn_implementation is {attn_implementation!r}; expected one that is installed and that a {model_config.model_type} "
        "model has, such as sdpa or eager"
    )
    with refusing(words, *_ERRORS):
        _make(model_config, attn_implementation)


def _make(model_config: PreTrainedConfig, attn_implementation: str | None) -> None:
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config), attn_implementation=attn_implementation, trust_remote_code=False
        )
