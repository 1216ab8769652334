"""A few optimizer steps on a tiny model."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny import prompt


def train_steps(model: torch.nn.Module, steps: int, groups: Sequence[dict[str, Any]] | None = None) -> None:
    """Train on one prompt with AdamW, what requires a gradient or the parameters of `groups`, and return to eval mode.

    Two steps at least where B matrices of LoRA start at zero and hold back the A matrices for one; more where keys wait
    for values to leave zero as well.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(groups or trained, lr=1e-2)
    model.train()
    for _ in range(steps):
        model(input_ids=prompt(), labels=prompt(), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
