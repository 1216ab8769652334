"""Passes of a model over the same rows that differ from some layer on: the layers before it compute once."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from midus_hf.analysis.watched_models import decoder_of, held_hooks


def can_share(model: nn.Module) -> bool:
    """Whether all that a layer reads of earlier ones is the residual stream; not where layers carry something else to later ones.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has wrapped around one.
    """
    return not any(getattr(block, "takes", ()) or getattr(block, "gives", ()) for block in _layers(model))


@contextlib.contextmanager
def kept_outputs(model: nn.Module, layers: Iterable[int]) -> Iterator[dict[int, Any]]:
    """Keep what some layers give in the pass that runs while the context is open, by layer; what is compiled runs uncompiled.

    Args:
        model: As for `can_share`.
        layers: Their indices.
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
    """While the context is open, passes over the rows of another pass compute from a layer on: those before it give what it got.

    Args:
        model: As for `can_share`; it can.
        layer: The first that computes; 0 for all.
        kept: From `kept_outputs` of the other pass, with the layer in front.
    """
    if layer == 0:
        yield
        return
    output = kept[layer - 1]

    def given(*arguments: Any, **by_name: Any) -> Any:
        return output

    skipped = _layers(model)[:layer]
    before = [block.__dict__.get("forward") for block in skipped]
    try:
        for block in skipped:
            block.forward = given
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
