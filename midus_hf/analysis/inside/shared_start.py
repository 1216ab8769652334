"""Passes of a model over the same rows that differ only from some layer on: the layers before that layer compute once."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from midus_hf.analysis.watched_models import decoder_of, held_hooks


def can_share(model: nn.Module) -> bool:
    """Return whether layers read nothing of earlier layers but the residual stream, so that passes can share earlier layers.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.
    """
    return not any(getattr(block, "takes", ()) or getattr(block, "gives", ()) for block in _layers(model))


@contextlib.contextmanager
def kept_outputs(model: nn.Module, layers: Iterable[int]) -> Iterator[dict[int, Any]]:
    """Keep the outputs of some layers in the pass that runs while the context is open, by index of the layer.

    Compiled models run uncompiled while the context is open.

    Args:
        model: A model as in `can_share`.
        layers: Indices of the layers whose outputs are kept.
    """
    blocks = _layers(model)
    kept: dict[int, Any] = {}

    def keeper(layer: int) -> Any:
        def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            kept[layer] = output

        return keep

    with held_hooks() as hold:
        for layer in layers:
            hold(blocks[layer].register_forward_hook(keeper(layer)))
        yield kept


@contextlib.contextmanager
def starting_at(model: nn.Module, layer: int, kept: Mapping[int, Any]) -> Iterator[None]:
    """Start passes at a layer while the context is open: earlier layers return the kept output of another pass.

    Args:
        model: A model for which `can_share` is true.
        layer: Index of the first layer that computes; 0 if all layers compute.
        kept: Outputs that `kept_outputs` kept in a pass over the same rows, with the output of layer `layer - 1`.
    """
    if layer == 0:
        yield
        return
    output = kept[layer - 1]

    def return_kept(*arguments: Any, **by_name: Any) -> Any:
        return output

    skipped = _layers(model)[:layer]
    before = [block.__dict__.get("forward") for block in skipped]
    try:
        for block in skipped:
            block.forward = return_kept
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for block, forward in zip(skipped, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _layers(model: nn.Module) -> list[Any]:
    return list(decoder_of(model).layers)
