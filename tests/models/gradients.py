"""Gradients of whole models, with those of the blocks that their texts fetched, and how they are compared."""

from typing import Any

import torch


def enable_checkpointing(model: Any, use_reentrant: bool) -> None:
    """Let layers be computed twice."""
    # transformers 5.23 renamed the method; 5.17 has the old name alone.
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
        bank.forget_gradients()
    return results


def gradients_of(model: Any) -> dict[Any, torch.Tensor]:
    """Return a copy of each gradient that there is: of parameters by name, of blocks by memory, level and index."""
    of_parameters = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return of_parameters | gradients_of_blocks(model)


def loss_and_gradients(model: Any, tokens: torch.Tensor, forward: Any = None, **arguments: Any) -> tuple[Any, dict]:
    """Return the loss of one pass and its gradients; `forward` computes what the model does.

    Args:
        model: Whose earlier gradients are dropped.
        tokens: `[B, T]`.
        forward: Default: the model.
        arguments: Arguments of the pass; `labels` are the tokens unless they say otherwise.
    """
    model.zero_grad()
    loss = (model if forward is None else forward)(
        input_ids=tokens, use_cache=False, **{"labels": tokens, **arguments}
    ).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def check_close(results: dict, expected: dict, relative: float) -> None:
    """Compare gradients by their norms; of weights of norms, which have theirs in float32, to a millionth at best."""
    assert results.keys() == expected.keys()
    far = {
        name: ((results[name] - value).norm() / value.norm().clamp(min=1e-12)).item()
        for name, value in expected.items()
    }
    allowed = {name: max(relative, 1e-6) if "norm" in name else relative for name in far}
    assert not [(name, distance) for name, distance in far.items() if not distance <= allowed[name]]
