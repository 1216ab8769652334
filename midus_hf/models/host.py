"""Mixins by which a family hosts memory: for its config and its stack of layers."""

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache

from midus_hf.carried.module import write_code
from midus_hf.carried.standins import auto_map
from midus_hf.config.installed import INSTALLED, needed_for, not_carried
from midus_hf.config.memory_entries import Memories, memories_of
from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.memory.fetched import FetchedBatch
from midus_hf.memory.memory_state import MemoryState, refuse_one_row, states_in
from midus_hf.memory.needs import needs_of
from midus_hf.memory.registry import MemoryModule
from midus_hf.memory.routing.report import RouterReports
from midus_hf.memory.routing.token_places import token_places
from midus_hf.memory.sequence_heads import require_log_sum_exp
from midus_hf.memory.tables import MemoryTables
from midus_hf.models.adapted import PROJECTION_NAMES
from midus_hf.models.adapter_layers import TakesAdapters, refuse_adapter_of_base
from midus_hf.models.dead_memories import warn_of_dead_memories
from midus_hf.models.fetching import BLOCKS, IDS, Banks, HostsBanks
from midus_hf.models.listing import register_targets, show_in_transformers
from midus_hf.models.memory_inputs import MemoryInputs
from midus_hf.models.parts import CACHE, named_cache


class MemoryConfig:
    """Mixin for the config of a family that hosts memory.

    A family declares the field `memory: list | None`, a list of entries `{"type", "layers", ...}`. Entries are validated here, and
    kept as plain dictionaries, so that `config.json` stores them unchanged. `head_kinds` are the ends of the names of the family's
    classes for tasks, such as `"ForSequenceClassification"`.

    Raises:
        ValueError: If an entry has an unknown type or key, or names layers that are absent, repeated or taken, or does not fit the
            model; if `layer_types` does not have one entry per layer.
    """

    memory: list | None
    head_kinds: ClassVar[tuple[str, ...]] = ()
    keys_to_ignore_at_inference = [CACHE, "router_logits", "aux_loss"]
    # The families' tensor-parallel plans split heads over devices, but a memory reads whole heads.
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
        """Return the result of `PreTrainedConfig.to_dict`, with an `auto_map` that always names the code saved beside the config."""
        name = type(self).__name__.removesuffix("Config")
        return {**super().to_dict(), "auto_map": auto_map(name, self.head_kinds)}

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> Any:
        """Save the config, and beside it the code that its `auto_map` names.

        Since a model saves its config too, `trust_remote_code=True` finds the code however the model was saved.
        """
        write_code(save_directory, self)
        return super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Let `transformers serve` find this language model, at each load of a config, since others may have taken its name."""
        name = f"{cls.__name__.removesuffix('Config')}ForCausalLM"
        show_in_transformers(name, getattr(sys.modules[cls.__module__], name))

    def memories(self) -> Memories:
        """Return the memories of the model, read from the current `memory` list.

        Raises:
            ValueError: If `read_memories` refuses the list.
        """
        return memories_of(self)


class HostsMemory(HostsBanks, TakesAdapters):
    """Mixin for both a stack of layers and a language model that hosts memory."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy the code a second time, and set `auto_map` to the wrong module."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as its family does.

        Raises:
            ValueError: If a quantisation config has quantised a tensor that a memory reads itself.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if getattr(model, "hf_quantizer", None) is not None:
            _refuse_quantised_tensors(model)
        return loaded

    @needed_for("depth")
    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Check the implementation as the family does; called when a model is made and when its attention is set."""
        model: Any = self
        if any(entry.options.attends for entry in memories_of(model.config).entries):
            require_log_sum_exp(attn_implementation)
        adjusted: str = super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        return adjusted

    def _initialize_weights(self, module: nn.Module, *_: Any) -> None:
        """Initialise a module that no checkpoint has filled."""
        # Transformers passes over a module of other code if a checkpoint has filled the parameters that the module itself holds. But
        # a family's module may also fill buffers of its parts (Falcon H1), and a memory may hold linear layers alone.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, DeclaredModule):
            module.reset_parameters()
            return
        super()._init_weights(module)
        _narrow(module)


class MemoryModel(HostsMemory):
    """Mixin for a family's decoder stack, which takes layers over as hosts of memories and holds shared tables.

    If memories are attached, every layer of the base becomes a host layer, since all layers are called with the inputs for memories.
    Layers are taken over in place, so the family alone decides how they are built.
    """

    # Classes of host layers and of memory blocks, one per class of the family's layers.
    layer_classes: ClassVar[tuple[Any, ...]]
    block_classes: ClassVar[tuple[Any, ...]]
    config: Any
    layers: nn.ModuleList
    memory_tables: nn.ModuleDict
    memory_input_names: set[str]
    stateful: dict[tuple[str, int], bool]  # by name and layer of a memory with a state: whether it takes tokens back
    warned_of_dead_memories: bool = False

    def __init__(self, config):
        super().__init__(config)
        register_targets(config.model_type)
        self.register_load_state_dict_pre_hook(refuse_adapter_of_base)
        memories = memories_of(config)
        taken_over: dict[int, tuple[Any, ...]] = {}
        if memories.attached:
            taken_over = dict.fromkeys(range(config.num_hidden_layers), self.layer_classes)
        if memories.inserted:
            taken_over |= dict.fromkeys(memories.inserted, self.block_classes)
        for index, hosts in taken_over.items():
            layer = self.layers[index]
            host = next(each for each in hosts if each.family_class is type(layer))
            host.take_over(layer, config, index, memories)
        hosted = {(name, layer): memory for layer, name, memory in self._hosted()}
        if INSTALLED:
            entries = {(entry.name, layer): entry for entry in memories.entries for layer in entry.layers}
            self.needs = needs_of(((entries[key], memory) for key, memory in hosted.items()), memories.sizes)
        self.memory_input_names = {name for memory in hosted.values() for name in memory.forward_arguments}
        if self.needs.tables:
            self._share_tables(memories)
        if self.needs.states:
            self.stateful = {key: memory.can_forget for key, memory in hosted.items() if memory.keeps_state}
            if config._attn_implementation in ("vllm", "sglang"):
                own = "a server that runs Transformers' own attention, such as `transformers serve`"
                refuse_one_row(self.stateful, f"attention {config._attn_implementation!r}", own)
        if INSTALLED or self.needs.banks:
            self.own_banks = Banks(memories.banks)
        if self.needs.banks:
            self.memory_input_names |= {IDS, BLOCKS}
        self._no_split_modules = {
            *(self._no_split_modules or ()),
            *(type(self.layers[index]).__name__ for index in taken_over),
        }
        if self.needs.narrow:
            self._narrow_start()
        self.post_init()

    @needed_for("tables")
    def _share_tables(self, memories: Memories) -> None:
        """Create the tables that layers share."""
        shared = {name: memories.tables(name) for name in memories.attached}
        self._table_of_layer = {
            name: {layer: str(number) for number, tables in enumerate(layer_tables) for layer in tables.layers}
            for name, layer_tables in shared.items()
            if layer_tables
        }
        self.memory_tables = nn.ModuleDict(
            {
                name: nn.ModuleDict(
                    {str(number): MemoryTables(tables.tensors) for number, tables in enumerate(layer_tables)}
                )
                for name, layer_tables in shared.items()
                if layer_tables
            }
        )

    @needed_for("inputs")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        *,
        past_key_values: Cache | None = None,
        memory_reports: RouterReports | None = None,
        token_mask: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the family's forward with the inputs of memories, which are keyword arguments too.

        Arguments that are not listed here are passed to the family's forward.

        Args:
            input_ids: `[B, T]`, or None if `inputs_embeds` are passed.
            cache: Keys and values of the tokens before. Default: none.
            inputs_embeds: `[B, T, D]`. Default: embeddings of `input_ids`.
            past_key_values: Older name of `cache`.
            memory_reports: Collector of the routers' reports. Default: routers do not report.
            token_mask: `[B, T]`, zero for padding, for attention masks of another form. Default: the attention mask.
            token_ids: `[B, T]`, the ids behind `inputs_embeds`, for memories that take `input_ids`. Default: `input_ids`.
            kwargs: Other arguments of the family's forward, and arguments that memories take.

        Raises:
            ValueError: If a memory takes `input_ids`, and embeddings are passed alone.
        """
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **named_cache(cache, past_key_values),
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
        }
        cache = arguments[CACHE]
        if self.needs.inputs:
            tokens = inputs_embeds if input_ids is None else input_ids
            brought: dict[str, Any] = {}
            if self.needs.reports:
                brought["reports"] = memory_reports
            if self.needs.arguments or self.needs.banks:
                pass_arguments: dict[str, Any] = {}
                for name in self.memory_input_names:
                    value = kwargs.pop(name, None) if name not in arguments else arguments[name]
                    if value is not None:
                        pass_arguments[name] = value
                if "input_ids" in self.memory_input_names:
                    pass_arguments["input_ids"] = ids_of_pass(input_ids, token_ids)
                brought["arguments"] = pass_arguments
            if self.needs.banks:
                brought["fetched"] = self._blocks_of_pass(
                    tokens, **{name: brought["arguments"].pop(name, None) for name in (IDS, BLOCKS)}
                )
            if self.needs.tables:
                brought["tables"] = self._shared_tables()
            if self.needs.places:
                mask = attention_mask if token_mask is None else token_mask
                begins = not _tells_padding(attention_mask) and cache is None
                brought["tokens"] = token_places(mask, position_ids, tokens.shape[1], may_hold_documents=begins)
            if self.needs.states:
                arguments[CACHE] = self._cache_of_pass(cache, use_cache)
                brought["states"] = self._memory_states(arguments[CACHE])
            kwargs["memory_inputs"] = MemoryInputs(**brought)
        return super().forward(**arguments, **kwargs)

    @not_carried
    def table_readers(self) -> Iterator[tuple[nn.Module, Mapping[str, torch.Tensor]]]:
        """Yield each memory that reads shared tables, with these tables by name."""
        for name, number_of_layer in (self._table_of_layer if self.needs.tables else {}).items():
            modules: Any = self.memory_tables[name]
            for layer, number in number_of_layer.items():
                tables = modules[number]
                host: Any = self.layers[layer]
                yield host.memories[name], {key: tables.declared_tensor(key) for key in tables.declared}

    def _narrow_start(self) -> None:
        """Set the start scale `1 / sqrt(2 L)` of the projections that write to the residual stream (UltraMemV2, appendix B.3)."""
        layers: Any = self.layers
        for layer in layers:
            for part, role in ((layer.mixer_name, "output_projection"), (layer.feed_forward_name, "down")):
                projection: Any = getattr(getattr(layer, part or "", None), PROJECTION_NAMES[role], None)
                # A layer that was inserted for a memory has no projection of this name, and some families wrap theirs.
                if isinstance(getattr(projection, "weight", None), nn.Parameter):
                    projection.start_scale = (2 * self.config.num_hidden_layers) ** -0.5
                    _narrow(projection)

    def _hosted(self) -> Iterator[tuple[int, str, MemoryModule]]:
        """Yield the layer, the name and the module of each memory; the name of an inserted memory is empty."""
        for index, layer in enumerate(self.layers):
            for name, memory in getattr(layer, "memories", {}).items():
                yield index, name, memory
            if isinstance(getattr(layer, "memory", None), MemoryModule):
                yield index, "", layer.memory

    @needed_for("states")
    def _cache_of_pass(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return the cache of the pass. Outside training, create one if the pass uses a cache and has none."""
        if (
            cache is None
            and not self.training
            and (getattr(self.config, "use_cache", True) if use_cache is None else use_cache)
        ):
            return DynamicCache(config=self.config)
        return cache

    @needed_for("states")
    def _memory_states(self, cache: Cache | None) -> dict[tuple[str, int], MemoryState]:
        """Return the states that memories keep of the sequences, in the cache of the pass."""
        # The repetition of a checkpointed layer would read what the layer had kept.
        if cache is None or (self.training and getattr(self, "gradient_checkpointing", False)):
            return {}
        return states_in(cache, self.stateful, self.config.num_hidden_layers)

    @needed_for("banks")
    def _blocks_of_pass(
        self,
        tokens: torch.Tensor,
        memory_ids: torch.Tensor | None,
        memory_blocks: Mapping[str, FetchedBatch] | None,
    ) -> Mapping[str, FetchedBatch]:
        """Return the blocks of the texts of the pass, by the name of the memory."""
        if memory_ids is not None and memory_blocks is not None:
            raise ValueError("memory_ids and memory_blocks are given; expected one of them.")
        if memory_ids is None and memory_blocks is None and not self.own_banks.read_without_ids:
            return {}
        if memory_blocks is not None:
            for batch in memory_blocks.values():
                if batch.num_rows != len(tokens):
                    raise ValueError(
                        f"memory_blocks were fetched for {batch.num_rows} rows; expected {len(tokens)}, one for each text of the "
                        "batch."
                    )
            return memory_blocks
        return self._fetch(memory_ids, len(tokens), tokens.device)

    @needed_for("banks")
    @torch.compiler.disable
    def _fetch(self, memory_ids: torch.Tensor | None, batch: int, device: torch.device) -> Mapping[str, FetchedBatch]:
        model: Any = self
        return self.own_banks.fetch(memory_ids, batch, device, model.dtype)

    @needed_for("tables")
    def _shared_tables(self) -> dict[str, dict[int, dict[str, torch.Tensor]]]:
        tables = {}
        for name, number_of_layer in self._table_of_layer.items():
            modules: Any = self.memory_tables[name]
            by_number = {number: module() for number, module in modules.items()}
            tables[name] = {layer: by_number[number] for layer, number in number_of_layer.items()}
        return tables

    @not_carried
    def train(self, mode: bool = True):
        """Set the training mode, and warn, once per model, of memories that cannot learn however long they train."""
        super().train(mode)
        if mode and not self.warned_of_dead_memories:
            self.warned_of_dead_memories = warn_of_dead_memories(self, dict(enumerate(self.layers)))
        return self


def ids_of_pass(input_ids: torch.Tensor | None, token_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the ids of the tokens of a pass, `[B, T]`."""
    ids = token_ids if input_ids is None else input_ids
    if ids is None:
        raise ValueError(
            "inputs_embeds is passed alone, and a memory of this model reads input_ids; expected input_ids. Or pass the ids beside "
            "the embeddings, as token_ids."
        )
    return ids


def _refuse_quantised_tensors(model: nn.Module) -> None:
    """Refuse tensors of memories that Transformers has quantised, other than the weights of linear layers."""
    for name, tensor in model.named_parameters():
        holder = model.get_submodule(name.rpartition(".")[0])
        if isinstance(holder, DeclaredModule) and type(tensor) is not nn.Parameter:
            raise ValueError(
                f"the quantisation has made a {type(tensor).__name__} of {name}, which a memory cannot read; expected linear layers "
                "alone. Round tables with midus_hf.memory.quantise_tables, before or after."
            )


@torch.no_grad()
def _narrow(module: nn.Module) -> None:
    """Multiply the weight of a projection by its start scale, if it has one, unless a checkpoint has filled the weight."""
    scale: float | None = getattr(module, "start_scale", None)
    if scale is not None:
        weight: Any = module.weight
        if not getattr(weight, "_is_hf_initialized", False):
            weight.mul_(scale)


def _tells_padding(attention_mask: Any) -> bool:
    """Return whether a mask has a value per token, rather than per pair of tokens."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
