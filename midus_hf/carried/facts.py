"""Facts about a checkpoint's memories that are known while its code is written: what the host layers need for them."""

from dataclasses import fields
from typing import Any

import torch

from midus_hf.carried.sources import Name
from midus_hf.carried.specialise import Facts
from midus_hf.config.memory_entries import Memories
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
        self.of_models = self._of_needs()

    def __call__(self, name: Name) -> Facts:
        """Return the facts that are known within a definition."""
        facts = {"INSTALLED": False, "TYPE_CHECKING": False}
        if name.module.startswith(_MODELS):
            facts |= self.of_models
        for known, need in _FALSE_WITHIN.get(name.module, {}).items():
            if not self.needs[need]:
                facts[known] = False
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
