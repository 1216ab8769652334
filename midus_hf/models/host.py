"""What a backbone family needs to host memory: mixins for its config, its model and its language model."""

import copy
import inspect
import os
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from midus_config.memory_entries import Memories, read_memories
from midus_config.model_sizes import ModelSizes
from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.memory.kept_values import kept_values
from midus_hf.memory.tables import MemoryTables
from midus_hf.models.dead_memories import warn_of_dead_memories
from midus_hf.models.export import auto_map, write_code
from midus_hf.models.memory_inputs import MemoryInputs, input_names
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
        if isinstance(module, DeclaredModule):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class MemoryModel(HostsMemory):
    """Mixin for a family's decoder stack: layers that hold memories become host layers, and shared tables live here.

    Where memories are attached, every layer becomes one: all are called with what the pass brings to memories.
    """

    layer_class: ClassVar[type[nn.Module]]
    memory_tables: nn.ModuleDict
    memory_input_names: set[str]
    warned_of_dead_memories: bool = False

    def __init__(self, config):
        super().__init__(config)
        register_targets(config.model_type)
        memories = config.memories()
        for layer in range(config.num_hidden_layers) if memories.attached else memories.inserted:
            self.layers[layer] = self.layer_class(config, layer, memories)
        shared = {name: memories.tables(name) for name in memories.attached}
        self._table_of_layer = {
            name: {layer: str(number) for number, tables in enumerate(of_memory) for layer in tables.layers}
            for name, of_memory in shared.items()
            if of_memory
        }
        if self._table_of_layer:
            self.memory_tables = nn.ModuleDict(
                {
                    name: nn.ModuleDict(
                        {str(number): MemoryTables(tables.tensors) for number, tables in enumerate(of_memory)}
                    )
                    for name, of_memory in shared.items()
                    if of_memory
                }
            )
        self.memory_input_names = input_names(self.layers.modules())
        self._own_arguments = set(inspect.signature(super().forward).parameters)
        self._passes_inputs = bool(memories.attached or self.memory_input_names)
        self._no_split_modules = {*self._no_split_modules, self.layer_class.__name__}
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's forward; what memories ask for may be given as well, by name."""
        if self._passes_inputs:
            given = {name: kwargs[name] for name in self.memory_input_names & kwargs.keys()}
            for name in given.keys() - self._own_arguments:
                del kwargs[name]  # what the family takes as well, it gets as well
            kwargs["memory_inputs"] = MemoryInputs(given, self._shared_tables())
        return super().forward(*args, **kwargs)

    def _shared_tables(self) -> dict[str, dict[int, dict[str, torch.Tensor]]]:
        tables = {}
        for name, number_of_layer in self._table_of_layer.items():
            modules: Any = self.memory_tables[name]
            by_number = {number: module() for number, module in modules.items()}
            tables[name] = {layer: by_number[number] for layer, number in number_of_layer.items()}
        return tables

    def train(self, mode: bool = True):
        """As `nn.Module.train`; warns, once per model, of memories that cannot learn however long they train."""
        super().train(mode)
        if mode and not self.warned_of_dead_memories:
            self.warned_of_dead_memories = warn_of_dead_memories(self, dict(enumerate(self.layers)))
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

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """As the family's, which does not know of what memories ask for."""
        model: Any = self.model
        names: set[str] = model.memory_input_names
        super()._validate_model_kwargs({key: value for key, value in model_kwargs.items() if key not in names})

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's `generate`; values are expanded once for the call."""
        with kept_values(self):
            return super().generate(*args, **kwargs)
