"""Contexts in which a model computes without some of the parts that were added to its base."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.models.view import Part
from midus_hf.models.watched_models import held_hooks, hosted_memories


@contextlib.contextmanager
def switched_off(model: Any, parts: Iterable[Part]) -> Iterator[None]:
    """Run a model without some of its parts within the context.

    A layer passes the residual stream on unchanged. A memory is skipped, like a fetching memory for which nothing was fetched.
    Heads that read the depth read only the sequence. What a layer writes for other layers is kept: slots of the depth, and the
    output of a memory that skips layers. Parameters do not change; modules have additional hooks within the context, and
    all compiled models, not only this one, run uncompiled.

    Args:
        model: A model as in `ModelView`.
        parts: Parts to switch off, of `ModelView.parts`.

    Raises:
        RequestError: If the model lacks a part, or parameters of heads that read the depth are offloaded.
    """
    blocks, readers = decoder_of(model).layers, hosted_memories(model, "attend")
    parts = list(parts)
    for part in parts:
        for layer in part.layers:
            if layer >= len(blocks) or (part.memory and part.memory not in getattr(blocks[layer], "sites", {})):
                raise RequestError(
                    f"part is {part.name!r}, and the model has no {part.memory or 'decoder'} layer {layer}; expected a part of this "
                    "model, as ModelView.parts lists them."
                )
    with contextlib.ExitStack() as passed_by, held_hooks() as hold:
        for part in parts:
            for layer in part.layers:
                if part.kind in ("memory", "bank"):
                    passed_by.enter_context(without_memories([blocks[layer]], [part.memory]))
                elif part.kind == "depth":
                    (module,) = (one.module for one in readers if (one.layer, one.name) == (layer, part.memory))
                    hold(module.register_forward_hook(_sequence_alone, with_kwargs=True))
                else:
                    hold(blocks[layer].register_forward_hook(_residual_alone, with_kwargs=True))
        yield


def _residual_alone(layer: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return a layer's input in place of its output. Other outputs, for later layers, are unchanged."""
    residual = arguments[0] if arguments else kwargs["hidden_states"]
    return (residual, *output[1:]) if isinstance(output, tuple) else residual


def _sequence_alone(memory: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return the output of heads that read only the sequence. The output of a call that writes a slot is unchanged."""
    return kwargs["sequence"].alone() if "sequence" in kwargs else output
