"""Logits that generation computes with what it keeps, and those of a pass that keeps nothing."""

import torch
from tiny import prompt
from transformers import PreTrainedModel

SETTINGS = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
# `generate` gives logits in float32.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def generated(model: PreTrainedModel) -> torch.Tensor:
    """Logits `[B, 3, V]` that `generate` gives."""
    return torch.stack(model.generate(input_ids=prompt(7), **SETTINGS).logits, dim=1).double()


def passed(model: PreTrainedModel) -> torch.Tensor:
    """Logits `[B, V]` of the first token that is generated, by a pass with gradients, which keeps nothing."""
    return model(input_ids=prompt(7), use_cache=False).logits[:, -1].detach()
