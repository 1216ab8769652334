"""Null controls of a variant: variants with the same memory, but without its addressing."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from midus_hf.compare.rates import Rate
from midus_hf.compare.variants import Variant
from midus_hf.config.backbone import read_backbone
from midus_hf.config.controls import controls_of
from midus_hf.config.memory_entries import read_memories

# The null control that is not trained: it is measured on the trained model of the variant itself.
SHUFFLED = "shuffled-addresses"

# Changes by name of the null control: `options` of the memory, or roles that are `trainable`; both empty for shuffled
# addresses.
Controls = Mapping[str, Mapping[str, Any]]


def available_controls(config: Mapping[str, Any]) -> Controls:
    """Return the null controls of the memory that an upscaling added; none if the upscaling added no memory.

    Of several added memories, the first counts.

    Args:
        config: Contents of the upscaled model's `config.json`.
    """
    record = config.get("upscale", {})
    memories = read_memories(config.get("memory", []), read_backbone(config).sizes)
    new = set(record.get("new_layers") or ())
    brought = [
        entry
        for entry in memories.entries
        if entry.name in (record.get("new_memories") or ()) or (not entry.is_attached and new.issuperset(entry.layers))
    ]
    if not brought:
        return {}
    entry = brought[0]
    return {
        name: {"options": dict(change.options), "trainable": list(change.trainable)}
        for name, change in controls_of(entry.options, memories.sizes, entry.layers).items()
    }


def wanted(variant: Variant, available: Controls) -> list[str]:
    """Return the names of the null controls that a variant asks for, its memory has and its training allows.

    Args:
        variant: A variant of a comparison.
        available: Null controls that `available_controls` returned.
    """
    names: Sequence[str] = list(available) if variant.controls is True else variant.controls or []
    # A null control that trains only certain roles would, beside a variant that trains the base as well, lack more than addressing.
    trains_more = variant.train.get("trainable", "auto") not in ("auto", "new")
    return [name for name in names if name in available and not (trains_more and available[name]["trainable"])]


def control_variants(variant: Variant, available: Controls, rate: Rate) -> list[Variant]:
    """Return the variants to train as null controls of a variant.

    Args:
        variant: A variant that adds a memory.
        available: Null controls that `available_controls` returned.
        rate: Rate at which the null controls are trained.
    """
    return [_control(variant, name, available[name], rate) for name in wanted(variant, available) if name != SHUFFLED]


def _control(variant: Variant, name: str, change: Mapping[str, Any], rate: Rate) -> Variant:
    """Return the null control `name` of a variant, which differs from the variant by `change` alone."""
    assert variant.upscale is not None, "a variant without an upscaling has no memory"
    keys: dict[str, Any] = copy.deepcopy(dict(variant.upscale))
    if change["options"]:
        keys["options"] = {**(keys.get("options") or {}), **change["options"]}
    train = {**variant.train, "trainable": change["trainable"]} if change["trainable"] else variant.train
    return dataclasses.replace(
        variant,
        name=f"{variant.name}+{name}",
        upscale=keys,
        train=train,
        rates=[rate],
        controls=False,
        control=name,
        control_of=variant.name,
    )
