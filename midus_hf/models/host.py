"""What a backbone family needs to host memory: mixins for its config and its stack of layers."""

import copy
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache

from midus_config.memory_entries import Memories, base_digest, read_memories
from midus_config.model_sizes import ModelSizes
from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.memory.fetched import FetchedBatch
from midus_hf.memory.memory_state import MemoryState, check_taking_back, states_in
from midus_hf.memory.registry import MemoryModule
from midus_hf.memory.router_report import RouterReports
from midus_hf.memory.sequence_heads import refuse_untold
from midus_hf.memory.tables import MemoryTables
from midus_hf.memory.token_places import TokenPlaces, token_places
from midus_hf.models.adapted import PROJECTION_NAMES
from midus_hf.models.adapter_layers import adapter_tensors, check_adapter_layers, refuse_adapter_of_base
from midus_hf.models.dead_memories import warn_of_dead_memories
from midus_hf.models.export import auto_map, write_code
from midus_hf.models.fetching import BLOCKS, IDS, Banks, folder_of_checkpoint, upload
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
    keys_to_ignore_at_inference = ["past_key_values", "router_logits", "aux_loss"]
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
        return read_memories(self.memory, ModelSizes.of(self), base_digest(getattr(self, "upscale", None)))


class HostsMemory:
    """Mixin that both a stack and a language model need."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy the code a second time and point `auto_map` past the entry module."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the family's; the banks that lie beside the checkpoint are opened.

        Raises:
            BankError: If one is absent, or that of another model.
        """
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if model.config.memories().banks and pretrained_model_name_or_path is not None:
            folder = folder_of_checkpoint(pretrained_model_name_or_path, kwargs)
            if folder is not None:
                model.open_banks(folder)
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """As the family's; banks that are open are written beside the weights.

        Raises:
            ValueError: If it shall be uploaded as well, and a bank is open: it would be uploaded before the bank is written.
        """
        if kwargs.get("push_to_hub") and self.banks.are_open:
            raise ValueError(
                "save_pretrained is given push_to_hub, and this model has a bank beside its weights; expected push_to_hub(repo_id), "
                "which uploads both."
            )
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.banks.save(save_directory)
        return saved

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's, of transformers; an adapter that was made for the base of this model is taken off again.

        Raises:
            ValueError: If layers of the base have other numbers here than the adapter knows.
        """
        model: Any = self
        before = set(getattr(model, "peft_config", {}))
        told = super().load_adapter(*args, **kwargs)
        for adapter in set(model.peft_config) - before:
            names = adapter_tensors(model).get(adapter, set())
            missing = names & set(told.missing_keys)
            try:
                check_adapter_layers(model.config, adapter, names - missing, missing, model.peft_config[adapter])
            except ValueError:
                model.delete_adapter(adapter)
                raise
        return told

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As the family's; banks that are open are uploaded with the weights, in folders of folders, which transformers does not.

        Args:
            repo_id: Of the repository, which is made if need be.
            kwargs: As the family's takes them.
        """
        if not self.banks.are_open:
            return super().push_to_hub(repo_id, **kwargs)
        return upload(self.save_pretrained, repo_id, **kwargs)

    @property
    def banks(self) -> Banks:
        """The banks that memories of the model fetch blocks from."""
        stack: Any = self
        return (stack if isinstance(stack, MemoryModel) else stack.model).own_banks

    def open_banks(self, folder: str | os.PathLike, **options: Any) -> None:
        """Open the banks that lie beside a checkpoint.

        Args:
            folder: The checkpoint's.
            options: Of `MemoryBank`, such as `tiers`, which are those of each bank.

        Raises:
            BankError: If one is absent, or that of another model.
            ValueError: If an option does not fit.
        """
        self.banks.open(folder, **options)

    def fetch_memory(self, memory_ids: torch.Tensor) -> dict[str, FetchedBatch]:
        """Fetch the blocks of paths ahead of a pass, which takes them as `memory_blocks`: it then asks no bank, and can be compiled.

        Args:
            memory_ids: `[B, p]`, as for `forward`.
        """
        model: Any = self
        return self.banks.fetch(memory_ids, len(memory_ids), model.device, model.dtype)

    def prefetch_memory(self, memory_ids: torch.Tensor) -> None:
        """Let threads read the blocks of paths that are to be fetched soon; returns at once.

        The fetch waits for what is under way, and raises what went wrong with it.

        Args:
            memory_ids: `[B, p]`, as for `forward`.
        """
        self.banks.prefetch(memory_ids)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """As the family's, which is asked when a model is made and when its attention is set.

        Raises:
            ValueError: If a memory attends to what earlier layers wrote, and that attention does not tell what the memory needs.
        """
        model: Any = self
        if any(entry.options.attends for entry in model.config.memories().entries):
            refuse_untold(attn_implementation)
        adjusted: str = super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        return adjusted

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, DeclaredModule):
            module.reset_parameters()
            return
        super()._init_weights(module)
        scale: float | None = getattr(module, "start_scale", None)
        if scale is not None:
            weight: Any = module.weight
            if not getattr(weight, "_is_hf_initialized", False):  # else a checkpoint has filled it
                weight.mul_(scale)


class MemoryModel(HostsMemory):
    """Mixin for a family's decoder stack: layers that hold memories become host layers, and shared tables live here.

    Where memories are attached, every layer becomes one: all are called with what the pass brings to memories.
    """

    layer_class: ClassVar[type[nn.Module]]
    config: Any
    layers: nn.ModuleList
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
        hosted = {(name, layer): memory for layer, name, memory in self._hosted()}
        self._asked = {what for memory in hosted.values() for what in memory.asks}
        self._stateful = {key: memory.can_forget for key, memory in hosted.items() if memory.keeps_state}
        self.reads_ahead = any(memory.reads_ahead for memory in hosted.values())
        self.memory_input_names = input_names(self.layers.modules())
        self.own_banks = Banks(memories.banks)
        if memories.banks:
            self.memory_input_names |= {IDS, BLOCKS}
        self._arguments = list(inspect.signature(super().forward).parameters)
        self._passes_inputs = bool(memories.attached or self.memory_input_names or self._asked)
        self._no_split_modules = {*self._no_split_modules, self.layer_class.__name__}
        if any(entry.options.narrows_start for entry in memories.attached.values()):
            self._narrow_start()
        self.register_load_state_dict_pre_hook(refuse_adapter_of_base)
        self.post_init()

    @property
    def has_routers(self) -> bool:
        """Whether a memory has a router that tells what it does."""
        return "report" in self._asked

    def check_taking_back(self) -> None:
        """See that tokens can be taken back from what memories keep of them.

        Raises:
            ValueError: If a memory cannot.
        """
        check_taking_back(self._stateful)

    @property
    def reads_places(self) -> bool:
        """Whether a memory asks where tokens stand."""
        return "tokens" in self._asked

    def forward(
        self,
        *args: Any,
        memory_reports: RouterReports | None = None,
        token_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the family's forward; what memories ask for may be given as well, by name.

        Args:
            args: What the family's forward takes.
            memory_reports: Where routers tell what they do. Default: nobody wants to know.
            token_mask: `[B, T]`, zero for padding, where the attention mask has another form. Default: that mask.
            kwargs: What the family's forward takes, and what memories ask for.
        """
        if not self._passes_inputs:
            return super().forward(*args, **kwargs)
        kwargs.update(zip(self._arguments, args, strict=False))
        given = {name: kwargs[name] for name in self.memory_input_names if name in kwargs}
        for name in given:
            if name not in self._arguments:  # what the family takes as well, it gets as well
                del kwargs[name]
        fetched = self._fetched(kwargs, given.pop(IDS, None), given.pop(BLOCKS, None))
        states = self._memory_states(kwargs)
        tokens = self._token_places(kwargs, token_mask)
        kwargs["memory_inputs"] = MemoryInputs(given, self._shared_tables(), tokens, states, memory_reports, fetched)
        return super().forward(**kwargs)

    def table_readers(self) -> Iterator[tuple[nn.Module, Mapping[str, torch.Tensor]]]:
        """Each memory that reads shared tables, and these by name."""
        for name, number_of_layer in self._table_of_layer.items():
            modules: Any = self.memory_tables[name]
            for layer, number in number_of_layer.items():
                tables = modules[number]
                host: Any = self.layers[layer]
                yield host.memories[name], {key: tables.declared_tensor(key) for key in tables.declared}

    def _narrow_start(self) -> None:
        """Have the projections that write to the residual stream drawn by `1 / sqrt(2 L)` narrower (UltraMemV2, appendix B.3)."""
        for layer in self.layers:
            for part, role in (("self_attn", "output_projection"), ("mlp", "down")):
                projection: Any = getattr(getattr(layer, part, None), PROJECTION_NAMES[role], None)
                if projection is not None:  # a layer that was inserted for a memory lacks them
                    projection.start_scale = (2 * self.config.num_hidden_layers) ** -0.5

    def _hosted(self) -> Iterator[tuple[int, str, MemoryModule]]:
        """The layer, the name and the module of each memory; one that was inserted has no name."""
        for index, layer in enumerate(self.layers):
            for name, memory in getattr(layer, "memories", {}).items():
                yield index, name, memory
            if isinstance(getattr(layer, "memory", None), MemoryModule):
                yield index, "", layer.memory

    def _memory_states(self, given: dict[str, Any]) -> dict[tuple[str, int], MemoryState]:
        """What memories keep of the sequences, in the cache of the pass, which is made here if the pass shall have one.

        A pass that trains makes none, and under activation checkpointing uses none: it would be repeated with what it kept.

        Raises:
            ValueError: If the sequences of several requests are packed into one row, as continuous batching does.
        """
        if not self._stateful:
            return {}
        if str(self.config._attn_implementation).startswith("paged"):
            raise ValueError(
                "a memory of this model chooses by the tokens of a sequence, and continuous batching packs several into one row; "
                "expected generate. Or upscale with routing = 'token'."
            )
        if self.training and getattr(self, "gradient_checkpointing", False):
            return {}
        cache: Cache | None = given.get("past_key_values")
        if cache is None:
            use_cache = given.get("use_cache")
            if self.training or not (self.config.use_cache if use_cache is None else use_cache):
                return {}
            cache = given["past_key_values"] = DynamicCache(config=self.config)
        return states_in(cache, self._stateful, self.config.num_hidden_layers)

    def _fetched(
        self,
        given: dict[str, Any],
        memory_ids: torch.Tensor | None,
        memory_blocks: Mapping[str, FetchedBatch] | None,
    ) -> Mapping[str, FetchedBatch]:
        """What the texts of the pass fetch.

        Raises:
            ValueError: If both ids and blocks are given, ids are wrong, or blocks are those of another number of rows.
        """
        if memory_ids is not None and memory_blocks is not None:
            raise ValueError("memory_ids and memory_blocks are given; expected one of them.")
        if memory_ids is None and memory_blocks is None and not self.own_banks.read_without_ids:
            return {}
        tokens = given.get("input_ids")
        tokens = given["inputs_embeds"] if tokens is None else tokens
        if memory_blocks is not None:
            for batch in memory_blocks.values():
                if batch.num_rows != len(tokens):
                    raise ValueError(
                        f"memory_blocks were fetched for {batch.num_rows} rows; expected {len(tokens)}, one for each text of the "
                        "batch."
                    )
            return memory_blocks
        return self._fetch(memory_ids, len(tokens), tokens.device)

    @torch.compiler.disable
    def _fetch(self, memory_ids: torch.Tensor | None, batch: int, device: torch.device) -> Mapping[str, FetchedBatch]:
        model: Any = self
        return self.own_banks.fetch(memory_ids, batch, device, model.dtype)

    def _token_places(self, given: dict[str, Any], token_mask: torch.Tensor | None) -> TokenPlaces | None:
        if not self.reads_places:
            return None
        tokens = given.get("input_ids")
        tokens = given["inputs_embeds"] if tokens is None else tokens
        mask = given.get("attention_mask")
        return token_places(
            mask if token_mask is None else token_mask,
            given.get("position_ids"),
            tokens.shape[1],
            may_hold_documents=not _tells_padding(mask) and given.get("past_key_values") is None,
        )

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


def _tells_padding(attention_mask: Any) -> bool:
    """Whether a mask has a value per token, rather than one per pair of tokens."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
