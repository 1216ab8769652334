"""What a backbone family needs to host memory: mixins for its config, its model and its language model."""

import copy
import os
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from midus_config.memory_entries import Memories, inserted_options, read_memories
from midus_config.model_sizes import ModelSizes
from midus_hf.memory.kept_values import kept_values
from midus_hf.memory.registry import MemoryModule
from midus_hf.models.dead_memories import warn_of_dead_memories
from midus_hf.models.export import auto_map, write_code
from midus_hf.models.peft_targets import register_targets


class MemoryConfig:
    """Mixin for the config of a family that hosts memory.

    A family declares the field `memory: list | None`: entries `{"type", "layers", ...}`, validated here and kept as
    plain dictionaries, so that they travel through `config.json` unchanged.

    Raises:
        ValueError: If an entry has an unknown type or key, or names layers that are absent, repeated or taken, or does not fit the
            model; if `layer_types` does not have one entry per layer.
    """

    memory: list | None
    # A memory reads whole heads, which the families' tensor-parallel plans would split over devices.
    base_model_tp_plan = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.memories()
        self.memory = copy.deepcopy(self.memory or [])
        layer_types = getattr(self, "layer_types", None)
        if layer_types is not None and len(layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(layer_types)} entries; expected one for each of the {self.num_hidden_layers} "
                "layers, memory blocks included."
            )

    def to_dict(self) -> dict[str, Any]:
        """As `PreTrainedConfig.to_dict`; `auto_map` names the code saved beside the config, wherever it came from."""
        return {**super().to_dict(), "auto_map": auto_map(type(self).__name__.removesuffix("Config"))}

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> Any:
        """Save the config, and beside it the code that its `auto_map` names.

        A model saves its config as well, so the code is there for `trust_remote_code=True` however it was saved.
        """
        write_code(save_directory, self)
        return super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `save_pretrained` writes the code, and `auto_map` is always set."""

    def memories(self) -> Memories:
        """The memories of the model, from the `memory` list as it is now.

        Raises:
            ValueError: If the list is not one that `read_memories` takes.
        """
        return read_memories(self.memory, ModelSizes.of(self))


class HostsMemory:
    """Mixin that both a stack and a language model need."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy the code a second time and point `auto_map` past the entry module."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MemoryModule):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class MemoryModel(HostsMemory):
    """Mixin for a family's decoder stack: its layers at the inserted places become memory blocks."""

    memory_block_class: ClassVar[type[nn.Module]]
    warned_of_dead_memories: bool = False

    def __init__(self, config):
        super().__init__(config)
        register_targets(config.model_type)
        for layer, entry in config.memories().inserted.items():
            self.layers[layer] = self.memory_block_class(config, layer, inserted_options(entry))
        self._no_split_modules = {*self._no_split_modules, self.memory_block_class.__name__}
        self.post_init()

    def train(self, mode: bool = True):
        """As `nn.Module.train`; warns, once a model, of memories that cannot learn however long they train."""
        super().train(mode)
        if mode and not self.warned_of_dead_memories:
            inserted = {layer: self.layers[layer] for layer in self.config.memories().inserted}
            self.warned_of_dead_memories = warn_of_dead_memories(self, inserted)
        return self


class MemoryForCausalLM(HostsMemory):
    """Mixin for a family's language model: the family's own head and forward over a stack that hosts memory."""

    model_class: ClassVar[type[PreTrainedModel]]

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's `generate`; values are expanded once for the call."""
        with kept_values(self):
            return super().generate(*args, **kwargs)
