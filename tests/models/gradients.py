"""Gradients of whole models and of fetched blocks, compared, and a few steps by them."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny import prompt


def enable_checkpointing(model: Any, use_reentrant: bool) -> None:
    # transformers 5.23 renamed the method; 5.17 has only the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def gradients_of_blocks(model: Any) -> dict[Any, torch.Tensor]:
    """Return and forget the gradients of blocks, by memory, level and index."""
    results = {}
    for name, layout in (model.banks.layouts if model.banks else {}).items():
        bank = model.banks.bank(name)
        if not bank.trains:
            continue
        for level in layout.levels:
            for index in range(-1, layout.blocks.nodes(level)):
                gradient = bank.block(level, index).grad
                if gradient is not None:
                    results[name, level, index] = gradient.clone()
        for leaf in bank.leaves():
            leaf.grad = None
    return results


def gradients_of(model: Any) -> dict[Any, torch.Tensor]:
    """Return a copy of each gradient: of parameters by name, of blocks by memory, level and index."""
    of_parameters = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return of_parameters | gradients_of_blocks(model)


def loss_and_gradients(model: Any, tokens: torch.Tensor, forward: Any = None, **arguments: Any) -> tuple[Any, dict]:
    """Return the loss of one pass and only its gradients; by default labels are the tokens."""
    model.zero_grad()
    arguments = {"input_ids": tokens, "use_cache": False, "labels": tokens, **arguments}
    loss = (model if forward is None else forward)(**arguments).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def check_close(results: dict, expected: dict, relative: float) -> None:
    """Compare gradients by their norms; of weights of norms to a millionth at best."""
    assert results.keys() == expected.keys()
    norms = {name: value.norm().clamp(min=1e-12) for name, value in expected.items()}
    far = {name: ((results[name] - expected[name]).norm() / norm).item() for name, norm in norms.items()}
    allowed = {name: max(relative, 1e-6) if "norm" in name else relative for name in far}
    assert not [(name, distance) for name, distance in far.items() if not distance <= allowed[name]]


def train_steps(model: Any, steps: int, groups: Sequence[dict[str, Any]] | None = None) -> None:
    """Train on one prompt what requires a gradient, or `groups`; some wait a step for others."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(groups or trained, lr=1e-2)
    model.train()
    for _ in range(steps):
        model(input_ids=prompt(), labels=prompt(), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
