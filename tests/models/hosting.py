"""Hosts of memories with the weights of a tiny base, built in memory: no checkpoint, no upscaler."""

from typing import Any

import torch
from tiny import logits
from transformers import PreTrainedModel

from midus_hf.memories.hosting.parts import CACHE
from midus_hf.models import FAMILIES


def host_config(config: Any, memory: list[dict[str, Any]] | None, **changes: Any) -> Any:
    """Return the config of the family's host with these entries, and with a base's other fields."""
    fields = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    return FAMILIES[config.model_type].config_class(**{**fields, **changes}, memory=memory)


def host_of(native: PreTrainedModel, *entries: dict[str, Any], seed: int = 0) -> Any:
    """Return the family's host of memories with a base's weights, in eval mode, banks not open."""
    config = host_config(native.config, list(entries))
    torch.manual_seed(seed)
    model = FAMILIES[native.config.model_type](config).to(native.dtype)
    missing = model.load_state_dict(native.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(".memor" in name for name in missing.missing_keys)
    return model.eval()


@torch.no_grad()
def in_steps(model: Any, tokens: torch.Tensor, steps: list[int], cache: Any, **arguments: Any) -> torch.Tensor:
    """Return the logits of tokens that go through a cache in steps of so many."""
    parts = tokens.split(steps, dim=1)
    return torch.cat([model(part, **{CACHE: cache}, use_cache=True, **arguments).logits for part in parts], dim=1)


def by_full_passes(model: Any, tokens: torch.Tensor, new_tokens: int, **arguments: Any) -> torch.Tensor:
    """Return greedy tokens after these, each by a pass over all tokens before it."""
    for _ in range(new_tokens):
        last = logits(model, tokens, **arguments)[:, -1]
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], dim=1)
    return tokens
