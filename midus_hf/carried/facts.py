"""Facts about a checkpoint's memories that are known while its code is written: their needs, and the options they agree on."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import torch

from midus_hf.carried.sources import Name
from midus_hf.carried.specialise import Facts
from midus_hf.config.memory_entries import Memories, MemoryEntry
from midus_hf.config.memory_types import InsertedOptions, MemoryOptions
from midus_hf.memory.needs import Needs, needs_of
from midus_hf.memory.registry import MemoryModule, build_memory

_PROPERTIES = ("carries", "added", "inputs")


class CheckpointFacts:
    """Values of expressions that are known within each definition, by the source of the expression.

    Args:
        config: The checkpoint's config.
    """

    def __init__(self, config: Any):
        memories: Memories = config.memories()
        self.entries = memories.entries
        with torch.device("meta"):
            self.modules: tuple[MemoryModule, ...] = tuple(
                build_memory(entry.options, memories.sizes, 0, len(entry.layers)) for entry in memories.entries
            )
        needs = needs_of(zip(self.entries, self.modules, strict=True), memories.sizes)
        names = [field.name for field in fields(Needs)]
        self.needs = {name: getattr(needs, name) for name in (*names, *_PROPERTIES)}
        self.of_models = self._of_needs() | self._of_blocks() | self._of_depth(config)

    def __call__(self, name: Name) -> Facts:
        """Return the facts that are known within a definition."""
        facts = {"INSTALLED": False, "TYPE_CHECKING": False} | dict(self._of_options(name))
        if name.module.startswith(_MODELS):
            facts |= self.of_models
        for known, need in _FALSE_WITHIN.get(name.module, {}).items():
            if not self.needs[need]:
                facts[known] = False
        if self.of_models.get("depth.wants_raw_key", True):
            facts.pop("adapters", None)  # an adapter may record the output of the key projection
        if name.module == _DEPTH_OP:
            facts |= self._of_joining()
        return facts

    def _of_needs(self) -> dict[str, Any]:
        facts = {
            f"{model}needs.{name}": value
            for name, value in self.needs.items()
            for model in ("self.stack.", "stack.", "self.")
        }
        facts |= {known: False for known, need in _FALSE_WITHOUT.items() if not self.needs[need]}
        if not self.needs["depth"]:
            facts |= {"self.depth": None, "depth": None, "entry.options.attends": False}
        if not self.needs["banks"]:
            facts["'fetched' not in memory_class.context"] = True
        return facts

    def _of_blocks(self) -> dict[str, Any]:
        """Return the facts about the layers that were inserted for memories."""
        inserted = [entry.options for entry in self.entries if isinstance(entry.options, InsertedOptions)]
        keep = {options.keeps_output_projection for options in inserted}
        facts: dict[str, Any] = {}
        if not any(options.adds_block_input for options in inserted):
            facts["self.adds_block_input"] = False
        if True not in keep:
            facts["self.normalises_output"] = False
        if len(keep) == 1:
            facts["options.keeps_output_projection"] = keep.pop()
        return facts

    def _of_depth(self, config: Any) -> dict[str, Any]:
        """Return the facts about the heads that later layers read, from the options and the family's rotary embeddings."""
        agreed = self.agreed([entry for entry in self.entries if entry.options.attends])
        reuses = agreed.get("attention_slots", "reused") == "reused"
        wants_raw_key = reuses and agreed.get("rope", "released") == "released"
        facts: dict[str, Any] = {}
        if not reuses:
            facts |= dict.fromkeys(("depth.wants_heads", "self._reuses", "self.wants_heads"), False)
        if not wants_raw_key:
            facts |= dict.fromkeys(("depth.wants_raw_key", "self.wants_raw_key"), False)
        kinds, parameters = getattr(config, "layer_types", None), getattr(config, "rope_parameters", None) or {}
        same_angles = kinds is None or not all(kind in parameters for kind in kinds)
        if not _some_do_not_rotate(config):
            facts |= {"self.some_do_not_rotate": False, "some_do_not_rotate": False}
            facts |= {"attention.rotates": True, "memory_call is None": False}
        if same_angles and not _some_do_not_rotate(config):
            facts |= dict.fromkeys(("self._heads.without_rotation", "heads.without_rotation"), False)
        return facts

    def _of_joining(self) -> dict[str, Any]:
        agreed = self.agreed([entry for entry in self.entries if entry.options.attends])
        if "joining" not in agreed:
            return {}
        return {"added": agreed["joining"] == "added", "gate is None": agreed["joining"] == "joint"}

    def agreed(self, entries: list[MemoryEntry]) -> dict[str, Any]:
        """Return the options that all of these entries have with the same value."""
        described = [asdict(entry.options) for entry in entries]
        return {
            key: value
            for key, value in (described[0] if described else {}).items()
            if all(key in other and other[key] == value for other in described)
        }

    def written_for(self) -> dict[str, dict[str, Any]]:
        """Return, for each type of memory, the options that its entries agree on, and their sites under `"site"`."""
        types = dict.fromkeys(entry.type for entry in self.entries)
        of_types = {each: [entry for entry in self.entries if entry.type == each] for each in types}
        return {
            each: {**self.agreed(entries), "site": sorted({entry.site for entry in entries})}
            for each, entries in of_types.items()
        }

    def _of_options(self, name: Name) -> Iterator[tuple[str, Any]]:
        target: Any = getattr(importlib.import_module(name.module), name.name, None)
        if isinstance(target, type):
            own = [
                entry
                for entry, module in zip(self.entries, self.modules, strict=True)
                if isinstance(module, target) or isinstance(entry.options, target)
            ]
            prefixes: tuple[str, ...] = ("self",) if issubclass(target, MemoryOptions) else ("self.options", "options")
            if not issubclass(target, MemoryOptions | MemoryModule):
                own, prefixes = [entry for entry in self.entries if entry.options.attends], _OF_DEPTH
            for key, value in self.agreed(own).items():
                yield from ((f"{prefix}.{key}", value) for prefix in prefixes)
        elif callable(target):
            for key, value in self.agreed([entry for entry in self.entries if _takes(target, entry.options)]).items():
                yield f"options.{key}", value


def _some_do_not_rotate(config: Any) -> bool:
    """Return whether some layers of the config's family do not rotate queries and keys, as its host layers say."""
    of_family = vars(sys.modules[type(config).__module__]).values()
    return any(getattr(each, "some_do_not_rotate", False) for each in of_family)


# For an expression, the need without which the expression is false in the code of models.
_FALSE_WITHOUT = {
    "memories.inserted": "inserted",
    "memories.attached": "attached",
    "memories.carry": "carries",
    "self.carries": "carries",
    "self.skips_from": "skips",
    "self.takes_inputs": "inputs",
    "self.adapts": "adapters",
    "self.reads_heads": "heads",
    "self.hosts('skip')": "skips",
    "self.hosts('inside-attention')": "inside_attention",
    "self.hosts('inside-ffn')": "inside_ffn",
    "self.hosts('beside-ffn')": "beside_ffn",
    "self.hosts('behind-attention')": "behind_attention",
    "self.hosts('behind-layer')": "behind_layer",
    "'tokens' in memory_class.context": "places",
    "'state' in memory_class.context and (name, layer) in self._states": "states",
    "'fetched' in memory_class.context": "banks",
    "'report' in memory_class.context": "reports",
    "layer in self._tables.get(name, {})": "tables",
    "entry.into": "skips",
}

# For a module, expressions that are false in this module alone, each with the need without which it is false.
_FALSE_WITHIN = {
    "midus_hf.models.adapted": {"adapters": "adapters", "readers": "heads", "memory_call.readers": "heads"},
    "midus_hf.config.memory_entries": {"site == 'skip'": "skips"},
}

_MODELS = "midus_hf.models."

_DEPTH_OP = "midus_hf.ops.depth.reference"

# Names by which classes other than memories refer to the options of a memory that attends to the depth.
_OF_DEPTH = ("self.options", "self._heads.options", "heads.options")


def _takes(function: Any, options: MemoryOptions) -> bool:
    """Return whether a function has an argument `options` that is annotated with a class of these options."""
    annotation = getattr(function, "__annotations__", {}).get("options")
    return inspect.isclass(annotation) and issubclass(annotation, MemoryOptions) and isinstance(options, annotation)
