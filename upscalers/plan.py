"""Layer plans, placements of new layers, and the config that follows from a plan."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from midus_hf.config.errors import RequestError, one_of
from midus_hf.memories.bank import banks_of
from midus_hf.memories.registry import ATTACHED, NO_MEMORIES, TABLES, Memories, MemoryEntry
from upscalers.architecture.layer_tensors import (
    LAYER_INDEX_KEYS,
    LEADING_LAYERS_KEYS,
    NOT_PER_LAYER_KEYS,
    PER_LAYER_KEYS,
    PER_LAYER_MAPPING_KEYS,
    Config,
    Layout,
    check_list,
)
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint

_LAYER_TENSOR = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class Base:
    """A layer taken over from base layer `index`."""

    index: int


@dataclass(frozen=True)
class New:
    """A layer between base layers `previous` and `next` (None at ends), from `sources`, attention's first."""

    previous: int | None
    next: int | None
    sources: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        neighbours = [f"base {index}" for index in (self.previous, self.next) if index is not None]
        return f"{'between' if len(neighbours) == 2 else 'beside'} {' and '.join(neighbours)}"


@dataclass(frozen=True)
class Plan:
    """The origin of every layer of the upscaled model; `new_memories` names memories attached to layers."""

    layers: tuple[Base | New, ...]
    num_base_layers: int
    new_memories: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def kept_indices(self) -> dict[int, int]:
        """Index of each base layer in the upscaled model; of repeated ones, of the first copy."""
        kept: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Base):
                kept.setdefault(layer.index, index)
        return kept

    @cached_property
    def new_indices(self) -> list[int]:
        """Indices of layers that the base lacks: inserted layers, and repeats of base layers."""
        kept = set(self.kept_indices.values())
        return [index for index in range(self.num_layers) if index not in kept]

    @property
    def renumbers(self) -> bool:
        """Whether some base layer has another index in the result, so that the base's adapters do not fit."""
        return any(layer != number for layer, number in self.kept_indices.items())

    def owns(self, name: str) -> bool:
        """Return whether a tensor, by full name, belongs to a new layer or memory, which `strip` removes."""
        match = _LAYER_TENSOR.match(name)
        if match and int(match["layer"]) in self.new_indices:
            return True
        within, memory, *_ = (match["rest"] if match else name.removeprefix("model.")).split(".") + [""]
        return within == (ATTACHED if match else TABLES) and memory in self.new_memories

    @property
    def sources(self) -> list[int]:
        return [layer.index if isinstance(layer, Base) else layer.sources[0] for layer in self.layers]

    def describe(self, index: int, memories: Memories = NO_MEMORIES) -> str:
        """Return where a layer of the upscaled model comes from and which of its memories are new, as text."""
        layer = self.layers[index]
        if isinstance(layer, New):
            origin = f"new, {layer.place}, made from {' and '.join(map(str, sorted(layer.sources)))}"
        else:
            origin = f"base {layer.index}{'' if self.kept_indices[layer.index] == index else ', repeated'}"
        new = [entry for entry in memories.attached_to(index) if entry.name in self.new_memories]
        return "".join((origin, *(f", with {entry.name} ({entry.site})" for entry in new)))

    def to_list(self) -> list[dict[str, Any]]:
        """Return `{"base": i}` for base layers and `{"previous": i, "next": j, "sources": [...]}` for others."""
        return [
            {"base": layer.index}
            if isinstance(layer, Base)
            else {"previous": layer.previous, "next": layer.next, "sources": list(layer.sources)}
            for layer in self.layers
        ]

    @classmethod
    def from_list(
        cls, layers: Iterable[Mapping[str, Any]], num_base_layers: int, new_memories: Iterable[str] = ()
    ) -> "Plan":
        read: list[Base | New] = []
        for layer in layers:
            values: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in layer.items()
            }
            read.append(Base(layer["base"]) if "base" in layer else New(**values))
        return cls(tuple(read), num_base_layers, tuple(new_memories))


def insertion_plan(num_base_layers: int, new_indices: Sequence[int]) -> Plan:
    """Return the plan with new layers at ascending indices of the upscaled model."""
    total = num_base_layers + len(new_indices)
    listed = ",".join(map(str, new_indices))
    if list(new_indices) != sorted({*new_indices} & {*range(total)}):
        raise RequestError(
            f"placement is {listed}; expected ascending indices without repetition from 0 to {total - 1}, counted in the upscaled "
            f"model of {num_base_layers} + {len(new_indices)} layers."
        )
    inserted = set(new_indices)
    layers: list[Base | New] = []
    taken = 0
    for index in range(total):
        if index not in inserted:
            layers.append(Base(taken))
            taken += 1
            continue
        layers.append(New(taken - 1 if taken else None, taken if taken < num_base_layers else None))
    return Plan(tuple(layers), num_base_layers)


def spell_placement(placement: str | int | Sequence[int] | None) -> str | None:
    """Return a placement as its name, or its indices joined by commas."""
    if isinstance(placement, str | None):
        return placement
    return ",".join(map(str, [placement] if isinstance(placement, int) else placement))


def place(placement: str, num_layers: int, num_new_layers: int | None) -> list[int]:
    """Return indices of new layers in the upscaled model, by a policy's name or indices joined by commas."""
    if placement.replace(",", "").replace("-", "").replace(" ", "").isdigit():
        try:
            indices = [int(part) for part in placement.split(",")]
        except ValueError:
            raise RequestError(
                f"placement is {placement!r}; expected indices joined by commas, such as 1,4,7."
            ) from None
        if num_new_layers is not None and num_new_layers != len(indices):
            raise RequestError(
                f"num-new-layers is {num_new_layers}, but placement lists {len(indices)} indices. Give one of the two."
            )
        return indices
    if placement not in PLACEMENTS:
        raise RequestError(f"placement {placement!r} is unknown. {one_of([*PLACEMENTS, 'indices such as 3,7,11'])}")
    policy = PLACEMENTS[placement]
    if num_new_layers is not None:
        if num_new_layers < 1:
            raise RequestError(f"num-new-layers is {num_new_layers}; expected at least 1.")
        return policy(num_layers, num_new_layers)
    if num_layers < 2:
        raise RequestError("the base has 1 layer, and half of it is none; expected a number. Pass --num-new-layers.")
    for number in range(num_layers // 2, 1, -1):
        with contextlib.suppress(RequestError):
            return policy(num_layers, number)
    return policy(num_layers, 1)  # which always fits


def _one_per_group(name: str, offset: int, num_layers: int, num_new_layers: int) -> list[int]:
    """Place a new layer in each of K equal groups: after the group, or before its last layer (offset -1)."""
    if num_layers % num_new_layers:
        divisors = [count for count in range(1, num_layers + 1) if num_layers % count == 0]
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement {name} needs a divisor of the {num_layers} base layers: "
            f"{', '.join(map(str, divisors))}. Choose one of them, another placement, or list the indices."
        )
    stride = num_layers // num_new_layers
    return [group * (stride + 1) + stride + offset for group in range(num_new_layers)]


def _next_to_base(name: str, place: str, num_layers: int, num_new_layers: int) -> list[int]:
    """Place a new layer in each of the last K gaps between base layers, or before each of the first K."""
    is_top = name == "top-heavy"
    if num_new_layers > num_layers - is_top:
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement {name} fits at most {num_layers - is_top}, one {place} the "
            f"{num_layers} base layers."
        )
    first = num_layers - num_new_layers if is_top else 0
    return [first + 2 * index for index in range(num_new_layers)]


# `(L, K) -> K ascending indices`; they raise `RequestError` if they cannot place that many layers.
PLACEMENTS: dict[str, Callable[[int, int], list[int]]] = {
    "distributed": partial(_one_per_group, "distributed", -1),  # MIDUS, equation 10
    "llama-pro": partial(_one_per_group, "llama-pro", 0),  # LLaMA-Pro; MIDUS, equation 9
    "top-heavy": partial(_next_to_base, "top-heavy", "in each gap between"),  # OpT-DeUS, LESA
    "bottom-heavy": partial(_next_to_base, "bottom-heavy", "before each of"),
}


def follow_plan(base: BaseCheckpoint, plan: Plan) -> Config:
    """Return the base's config with `num_hidden_layers` and all per-layer values of the plan's layers."""
    config = copy.deepcopy(base.config)
    config |= copy.deepcopy(base.layout.per_layer_values)
    followed = config
    if plan.sources != list(range(base.num_layers)):
        followed = {key: _follow(plan, key, value, key) for key, value in config.items()}
    for values, entry in zip(followed.get("memory") or [], base.layout.memories.entries, strict=True):
        values |= _followed_layers(base, plan, entry)
    followed["num_hidden_layers"] = plan.num_layers
    return followed


def pattern_concern(base: BaseCheckpoint, new: Layout, config: Config) -> str | None:
    """Return a warning if runtimes that derive attention types from the index would misread the result."""
    if config["model_type"] != base.family.model_type or base.layout.layer_types != base.layout.implied_types:
        return None
    listed = new.layer_types or ()
    implied = new.implied_types or ()
    num_moved = sum(one != other for one, other in zip(listed, implied, strict=True))
    if not num_moved:
        return None
    return (
        f"{num_moved} of {len(listed)} layers have another attention type than {base.family.model_type} implies by their "
        "index. transformers reads layer_types and is right; runtimes that use the index, such as llama.cpp, compute a different "
        "function. Write the types into their file (see docs/export.md)."
    )


def _followed_layers(base: BaseCheckpoint, plan: Plan, entry: MemoryEntry) -> dict[str, list[int]]:
    """Return where a base memory's layers are in the result; refuse to repeat layers tied together."""
    taken = [
        (index, layer.index)
        for index, layer in enumerate(plan.layers)
        if isinstance(layer, Base) and layer.index in entry.layers
    ]
    if [layer for _, layer in taken] != list(entry.layers) and entry.is_attached:
        memories = base.layout.memories
        if entry.into or memories.tables(entry.name) or entry.options.attends or entry.name in banks_of(memories):
            raise RequestError(
                f"memory {entry.name!r} ties layers {', '.join(map(str, entry.layers))} together, and the plan repeats "
                "some of them; expected each once. Choose a method that inserts layers."
            )
    for layer in entry.into:
        if sum(isinstance(planned, Base) and planned.index == layer for planned in plan.layers) != 1:
            raise RequestError(
                f"memory {entry.name!r} adds after layer {layer}, which the plan repeats; expected it once. Choose a "
                "method that inserts layers."
            )
    into = dict(zip(entry.layers, entry.into, strict=False))
    followed = {"layers": [index for index, _ in taken]}
    return {**followed, "into": [plan.kept_indices[into[layer]] for _, layer in taken]} if into else followed


def _follow(plan: Plan, key: str, value: Any, path: str) -> Any:
    """Return a value of a config for the layers of a plan; `path` leads to it from the top of the config."""
    sources, num_layers = plan.sources, plan.num_base_layers
    if key in NOT_PER_LAYER_KEYS:
        return value
    if key in PER_LAYER_MAPPING_KEYS and isinstance(value, dict):
        own = {int(index): values for index, values in value.items()}  # "05" where there are ten layers or more
        return {str(index): own[source] for index, source in enumerate(sources) if source in own}
    if key in LEADING_LAYERS_KEYS and type(value) is int:
        number = value + LEADING_LAYERS_KEYS[key]
        leading = [source < number for source in sources]
        # Other numbers do not describe layers; layers that differ from the plan are refused later.
        leads_the_plan = leading == sorted(leading, reverse=True)
        return sum(leading) - LEADING_LAYERS_KEYS[key] if leads_the_plan else value
    if isinstance(value, dict):
        if key != "text_config" and "model_type" in value:  # config of another model, such as an audio encoder
            return value
        if value and all(str(index).isdecimal() and int(index) < num_layers for index in value):
            raise _undeclared_error(path, f"a mapping by numbers below that of the layers ({num_layers})")
        return {inner: _follow(plan, inner, each, f"{path}.{inner}") for inner, each in value.items()}
    if not isinstance(value, list):
        return value
    check_list(key, value, num_layers, path)
    if key in PER_LAYER_KEYS:
        return [value[source] for source in sources]
    if key in LAYER_INDEX_KEYS:
        return [index for index, source in enumerate(sources) if source in value]
    if len(value) == num_layers:
        raise _undeclared_error(path, f"a list as long as the model has layers ({num_layers})")
    return [_follow(plan, "", entry, f"{path}[{number}]") for number, entry in enumerate(value)]


def _undeclared_error(path: str, description: str) -> RequestError:
    return RequestError(
        f"config.json has {path}, {description}; expected one whose meaning is known. Declare it in "
        "upscalers/architecture/layer_tensors.py."
    )
