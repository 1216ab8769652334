"""What a checkpoint computes, with the package or without: a process that cannot import this is given the text."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def loaded(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", trust_remote_code=True).eval()


def logits_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def computed(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return logits, greedy tokens, those of beams, a loss, and the names of the parameters that it has gradients for."""
    greedy = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    logits = logits_of(model, inputs)
    tokens = model.generate(**inputs, **greedy)
    beams = model.generate(**inputs, **greedy, num_beams=3)  # selects, repeats and reorders what a cache keeps
    loss = model.train()(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    loss.backward()
    model.eval()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits, "tokens": tokens, "beams": beams, "loss": loss.detach(), "reached": reached}
