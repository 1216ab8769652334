"""Null controls of an arm's memory: the arms that stand beside it."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from midus_hf.compare.arms import Arm
from midus_hf.compare.rates import Rate
from midus_hf.config.backbone import read_backbone
from midus_hf.config.controls import controls_of
from midus_hf.config.memory_entries import read_memories

SHUFFLED = "shuffled-addresses"
"""The one control that is measured on the trained arm itself."""

Controls = Mapping[str, Mapping[str, Any]]
"""By name, what a control changes: `options` of the memory, or roles that are `trainable`; neither for shuffled addresses."""


def available_controls(config: Mapping[str, Any]) -> Controls:
    """The controls of the memory that an upscaling brought; none if it brought no memory.

    Args:
        config: Of the upscaled model, as `config.json` has it.
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


def wanted(arm: Arm, available: Controls) -> list[str]:
    """The names of the controls that an arm is to have and its memory has.

    Args:
        arm: Of a comparison.
        available: From `available_controls`.
    """
    asked: Sequence[str] = list(available) if arm.controls is True else arm.controls or []
    # Where more than what is new trains, a control that trains less than that would lack more than its addresses.
    trains_more = arm.train.get("trainable", "auto") not in ("auto", "new")
    return [name for name in asked if name in available and not (trains_more and available[name]["trainable"])]


def control_arms(arm: Arm, available: Controls, rate: Rate) -> list[Arm]:
    """The arms that are trained as null controls of an arm.

    Args:
        arm: With a memory.
        available: From `available_controls`.
        rate: At which they are trained.
    """
    return [_control(arm, name, available[name], rate) for name in wanted(arm, available) if name != SHUFFLED]


def _control(arm: Arm, name: str, change: Mapping[str, Any], rate: Rate) -> Arm:
    assert arm.upscale is not None, "an arm without an upscaling has no memory"
    keys: dict[str, Any] = copy.deepcopy(dict(arm.upscale))
    if change["options"]:
        keys["options"] = {**(keys.get("options") or {}), **change["options"]}
    train = {**arm.train, "trainable": change["trainable"]} if change["trainable"] else arm.train
    return dataclasses.replace(
        arm,
        name=f"{arm.name}+{name}",
        upscale=keys,
        train=train,
        rates=[rate],
        controls=False,
        control=name,
        control_of=arm.name,
    )
