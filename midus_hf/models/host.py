"""Mixins by which a family hosts memory: for its config and its stack of layers."""

import copy
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.anatomy.record import base_layers
from midus_hf.carried.module import write_code
from midus_hf.carried.standins import ENTRY_MODULE
from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.layer import MemoryBlock
from midus_hf.memories.hosting.parts import CACHE, Keywords, MemoryInputs, arguments_of_pass, named_cache
from midus_hf.memories.hosting.service import HostStack, scale_initial
from midus_hf.memories.module import DeclaredModule, MemoryModule
from midus_hf.memories.registry import Memories, layer_class, memories_of
from midus_hf.models.families import show_in_transformers


class CodeMixin:
    """Mixin for a config that is saved with the code of its classes, and lists the model's memories."""

    keys_to_ignore_at_inference = [CACHE, "router_logits", "aux_loss"]

    @classmethod
    def class_names(cls) -> dict[str, str]:
        """Return the names of the classes of the code, by the Auto class that loads each."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return `PreTrainedConfig.to_dict` with an `auto_map` that names the code saved with the config."""
        auto_map = {auto_class: f"{ENTRY_MODULE}.{name}" for auto_class, name in self.class_names().items()}
        return {**super().to_dict(), "auto_map": auto_map}

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> Any:
        """Save the config and the code that its `auto_map` names, also whenever a model saves its config."""
        write_code(save_directory, self)
        return super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Let `transformers serve` find the language model at each load: others may have taken its name."""
        name = cls.class_names()["AutoModelForCausalLM"]
        show_in_transformers(name, getattr(sys.modules[cls.__module__], name))

    def memories(self) -> Memories:
        """Return the memories of the language model, read from its current `memory` list by `read_memories`."""
        return memories_of(self)


class MemoryConfig(CodeMixin):
    """Mixin for the config of a family that hosts memory.

    A family declares the field `memory: list | None` of entries (`read_memories`), validated and kept as plain dictionaries.
    `head_kinds` are the ends of the names of the family's task heads, such as `"ForSequenceClassification"`. Entries that do not fit
    the model, and `layer_types` without one entry per layer, are a `RequestError`.
    """

    memory: list | None
    head_kinds: ClassVar[tuple[str, ...]] = ()
    # The families' plans split heads or layers over devices, but a memory reads whole heads, and what other layers carry.
    base_model_tp_plan = None
    base_model_pp_plan = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        memories = self.memories()
        self.memory = copy.deepcopy(self.memory or [])
        for values, entry in zip(self.memory, memories.entries, strict=True):
            values["type"] = entry.options.type  # which had another name in earlier versions
        layer_types = getattr(self, "layer_types", None)
        if layer_types is not None and len(layer_types) != self.num_hidden_layers:
            raise RequestError(
                f"layer_types has {len(layer_types)} entries; expected one for each of the {self.num_hidden_layers} "
                "layers, memory blocks included."
            )

    @classmethod
    def class_names(cls) -> dict[str, str]:
        """Return the names of the config, the stack, the language model and the task heads."""
        name = cls.__name__.removesuffix("Config")
        models = {f"AutoModel{kind}": name + kind for kind in ("ForCausalLM", *cls.head_kinds)}
        return {"AutoConfig": cls.__name__, "AutoModel": f"{name}Model", **models}


class HostMixin:
    """Mixin for both a stack of layers and a model over a stack that hosts memory."""

    # As in the config: the head of a language model is not split either, since it may be the embedding.
    _tp_plan = None
    _pp_plan = None
    stack: Any  # the stack of layers that host memories

    def __init__(self, config: Any):
        super().__init__(config)
        self.register_load_state_dict_pre_hook(_refuse_adapter_of_base)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy the code a second time, and set `auto_map` to the wrong module."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as its family does, and what its memories have next to the weights.

        Refused are quantised tensors that a memory reads itself, tensor and pipeline parallelism, and wrong or absent banks.
        """
        for name, whole in (("tp_plan", {}), ("tp_size", 1), ("pp_size", 1)):
            asked = kwargs.get(name) or getattr(kwargs.get("distributed_config"), name, None)
            if asked not in (None, whole):
                raise RequestError(
                    f"{name} is {asked!r}, but a memory reads whole heads, and what other layers carry, so a model with memory is "
                    "not split by heads or layers; expected none. Load it with device_map, or train it with FSDP."
                )
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if getattr(model, "hf_quantizer", None) is not None:
            _refuse_quantised_tensors(model)
        for service in model.stack.services.values():
            service.after_loading(pretrained_model_name_or_path, kwargs)
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """Save the model as its family does, and what its memories have next to the weights."""
        if kwargs.get("push_to_hub"):
            self._check_upload()
        services = self.stack.services.values() if kwargs.get("is_main_process", True) else ()
        for service in services:
            service.before_saving(save_directory)
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        for service in services:
            service.after_saving(save_directory)
        return saved

    def _get_files_timestamps(self, *args: Any) -> dict[str, float]:
        """Return the times of a folder's files, to upload newer ones, without those of services."""
        times: dict[str, float] = super()._get_files_timestamps(*args)
        beside = ("glossary.jsonl", "tokenizer", "special_tokens_map.json", "chat_template")
        return {name: time for name, time in times.items() if not name.startswith(beside)}

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the model as its family does, unless a bank is open."""
        self._check_upload()
        return super().push_to_hub(*args, **kwargs)

    def _check_upload(self) -> None:
        for service in self.stack.services.values():
            service.check_upload()

    @property
    def banks(self) -> Any:
        """Banks that memories of the model fetch blocks from (`Banks`); None if no memory fetches blocks."""
        return self.stack.own_banks

    @property
    def glossary(self) -> Any:
        """Names and texts that the model knows (`Glossary`); a `RequestError` without packs or a folder."""
        files = self.stack.services.get("glossary")
        if files is None or files.glossary is None:
            raise RequestError("this model has no glossary; expected one with packs that from_pretrained loaded.")
        return files.glossary

    def fetch_memory(self, memory_ids: torch.Tensor) -> Any:
        """Fetch the blocks of paths `[B, p]` for a pass, which with these `memory_blocks` reads no bank."""
        if self.banks is None:
            raise RequestError("no memory of this model fetches blocks; expected a model with a hierarchical memory.")
        return self.banks.fetch(memory_ids, len(memory_ids), self.device, self.dtype)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Check an implementation as the family does, when a model is made or its attention is set."""
        layers = [layer_class(entry.options, attn_implementation) for entry in memories_of(self.config).entries]
        if (attn_implementation or "").removeprefix("paged|") in ALL_ATTENTION_FUNCTIONS:  # others the family refuses
            for layer in layers:
                layer.check_attention(attn_implementation)
        adjusted: str = super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        for layer in layers:
            layer.check_attention(adjusted)
        return adjusted

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as transformers does, but refuse the base's if layers have other numbers here."""
        before = set(getattr(self, "peft_config", {}))
        loading_info = super().load_adapter(*args, **kwargs)
        for adapter in set(self.peft_config) - before:
            names = _adapter_tensors(self).get(adapter, set())
            loaded = names - set(loading_info.missing_keys)
            try:
                _check_adapter_layers(self.config, adapter, loaded, names, self.peft_config[adapter])
            except RequestError as error:
                raise RequestError(f"{error} This model now has the adapter: load the model again.") from None
        return loading_info

    def run(self, arguments: Keywords, cache: Any, past_key_values: Any, **memory_arguments: Any) -> Any:
        """Run the family's forward and services, with the arguments of memories that are not None."""
        if "report" not in self.stack.services:
            del memory_arguments["output_router_logits"]
        given = {name: value for name, value in memory_arguments.items() if value is not None}
        forward = super().forward

        def run(arguments: Keywords) -> Any:
            return forward(**arguments)

        for service in self.stack.services.values():
            run = partial(service.run, self, run)
        return run({**arguments, **named_cache(cache, past_key_values, stacklevel=6), **given})

    def share_of_step(self, arguments: Keywords) -> torch.Tensor | float:
        """Return the weight of the routers' losses in this pass's loss. Default: 1, for a mean over the pass."""
        return 1.0

    def _initialize_weights(self, module: nn.Module, *_: Any) -> None:
        # Transformers passes over a module of other code whose own parameters a checkpoint has filled. But a family's module may also
        # fill buffers of its parts (Falcon H1), and a memory may hold only linear layers.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, DeclaredModule):
            module.reset_parameters()
        elif not isinstance(module, MemoryBlock):  # which dropped tensors that some families fill (Gemma 4)
            super()._init_weights(module)
            if hasattr(module, "initial_scale"):
                scale_initial(module)


class MemoryModel(HostMixin, HostStack):
    """Mixin for a family's decoder stack, whose layers host memories, and which holds shared tables.

    Layers are taken over in place, so the family decides how they are built. With attached memories, every base layer is a host
    layer.
    """

    # Classes of host layers and of memory blocks, one per class of the family's layers.
    layer_classes: ClassVar[tuple[Any, ...]]
    block_classes: ClassVar[tuple[Any, ...]]

    def __init__(self, config):
        super().__init__(config)
        memories = memories_of(config)
        hosting = [self._make_host(index, self.block_classes, memories) for index in sorted(memories.inserted)]
        if memories.attached or any(layer.takes_inputs for layer in hosting):  # which all layers are called with
            others = [index for index in range(config.num_hidden_layers) if index not in memories.inserted]
            hosting += [self._make_host(index, self.layer_classes, memories) for index in others]
        hosted: dict[tuple[str, int], MemoryModule] = {}  # by name, empty for an inserted memory, and layer
        for index, each in enumerate(self.layers):
            hosted |= {(name, index): memory for name, memory in getattr(each, "memories", {}).items()}
            memory = getattr(each, "memory", None)
            if isinstance(memory, MemoryModule):
                hosted["", index] = memory
        self._taken_arguments = {name for memory in hosted.values() for name in memory.forward_arguments}
        self.memory_input_names = set(self._taken_arguments)
        needed = dict.fromkeys(service for memory in hosted.values() for service in memory.services)
        self.services = {}
        for service in sorted(needed, key=lambda service: service.may_add_cache):
            users = {key: memory for key, memory in hosted.items() if service in memory.services}
            self.services[service.key] = service(self, memories, users)
        self._makes_inputs = bool(memories.attached or self.services or self._taken_arguments)
        taken_names = (type(layer).__name__ for layer in hosting)
        self._no_split_modules = {*(self._no_split_modules or ()), *taken_names}
        self.post_init()  # type: ignore[operator]

    def _make_host(self, index: int, classes: tuple[Any, ...], memories: Memories) -> Any:
        """Make a layer one that hosts memories, by the class of its family, and return it."""
        layer: Any = self.layers[index]
        layer.__class__ = next(each for each in classes if each.family_class is type(layer))
        layer.host(self.config, index, memories)
        return layer

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
        memory_reports: Any = None,
        token_mask: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the family's forward with inputs of memories; see `MemoryForCausalLM.forward`.

        `memory_reports` (`RouterReports`) collects reports of routers. Memories that take `input_ids` refuse `inputs_embeds` without
        their `token_ids` `[B, T]`.
        """
        arguments: Keywords = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **named_cache(cache, past_key_values),
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
        }
        own = {"memory_reports": memory_reports, "token_mask": token_mask, "token_ids": token_ids}
        own |= {name: kwargs.pop(name) for name in self.memory_input_names if name in kwargs}
        if self._makes_inputs:
            values = {key: service.prepare_pass(self, arguments, own) for key, service in self.services.items()}
            taken = arguments_of_pass(self._taken_arguments, arguments, own)
            kwargs["memory_inputs"] = MemoryInputs(values, taken)
        return super().forward(**arguments, **kwargs)

    @property
    def stack(self) -> HostStack:
        """The stack itself."""
        return self


def _refuse_quantised_tensors(model: nn.Module) -> None:
    """Refuse tensors of memories that Transformers has quantised, other than the weights of linear layers."""
    for name, tensor in model.named_parameters():
        holder = model.get_submodule(name.rpartition(".")[0])
        if isinstance(holder, DeclaredModule) and type(tensor) is not nn.Parameter:
            raise RequestError(
                f"the quantisation has made a {type(tensor).__name__} of {name}, which a memory cannot read; expected only "
                "linear layers."
            )


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _refuse_adapter_of_base(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_of_torch: Any, **_more: Any
) -> None:
    """Refuse an adapter of the base, as a pre-hook of `load_state_dict`, by which PEFT loads adapters."""
    for adapter, names in _adapter_tensors(model).items():
        loaded = {name for name in names if prefix + name in state_dict}
        _check_adapter_layers(model.config, adapter, loaded, names, getattr(model, "peft_config", {}).get(adapter))


def _check_adapter_layers(
    config: Any, adapter: str, loaded: Iterable[str], names: Iterable[str], adapter_config: Any
) -> None:
    """Refuse an adapter of the base; if it is in some layers only, its model's name tells, and this warns."""
    text_config = config.get_text_config()
    numbers: dict[int, int] = {}  # of each layer of the base where it occurs first
    for number, layer in base_layers(config).items():
        numbers.setdefault(layer, number)
    has, lacks = (
        sorted({int(match[1]) for match in map(_LAYER.search, listed) if match})
        for listed in (loaded, set(names) - set(loaded))
    )
    moved = [layer for layer in has if numbers.get(layer, layer) != layer]
    if not moved or has[-1] >= len(numbers):
        return
    if any(layer > has[-1] for layer in lacks):
        raise RequestError(
            f"adapter {adapter!r} has weights for layers {has[0]} to {has[-1]} and none for {', '.join(map(str, lacks))}, "
            f"which its targets also match: it was made for the base of {len(numbers)} layers, and layer {moved[0]} of the "
            f"base is layer {numbers[moved[0]]} here. On this model of {text_config.num_hidden_layers} layers it would change the "
            "wrong ones. Expected an adapter that was trained on this model. Or merge this one into the base with PEFT "
            "(merge_and_unload), save the result, and upscale that."
        )
    trained_on = getattr(adapter_config, "base_model_name_or_path", None)
    if trained_on and trained_on != config._name_or_path:
        warnings.warn(
            f"adapter {adapter!r} was trained on {trained_on!r} and changes layers {has[0]} to {has[-1]}. If that is the base of "
            f"this model, these are the wrong layers: layer {moved[0]} of the base is layer {numbers[moved[0]]} here.",
            stacklevel=2,
        )


def _adapter_tensors(module: nn.Module) -> dict[str, set[str]]:
    """Return the names of the tensors that PEFT has put on submodules of a module, by adapter."""
    tensors: dict[str, set[str]] = {}
    for module_name, within in module.named_modules():
        for attribute in getattr(within, "adapter_layer_names", ()):
            adapters = getattr(within, attribute, None)
            if isinstance(adapters, nn.Module):
                for name, _ in adapters.named_parameters():  # "default.weight", or "default" of a ParameterDict
                    tensors.setdefault(name.split(".")[0], set()).add(f"{module_name}.{attribute}.{name}")
    return tensors
