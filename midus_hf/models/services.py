"""Services of a model for its memories: arguments, tables, places of tokens, states, and how projections start."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from midus_hf.config.memory_entries import Memories
from midus_hf.memory.memory_state import MemoryState, check_taking_back, refuse_one_row, states_in
from midus_hf.memory.needs import SERVICES, Service, mixin_for, register
from midus_hf.memory.registry import MemoryModule
from midus_hf.memory.routing.token_places import TokenPlaces, token_places
from midus_hf.memory.tables import MemoryTables
from midus_hf.models.parts import CACHE, PROJECTION_NAMES


@register(SERVICES, "arguments")
class Arguments(Service):
    """Arguments of the model's forward that memories take by name."""

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        self._names = {name for memory in hosted.values() for name in memory.forward_arguments}

    def of_pass(self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that memories take, by name.

        Raises:
            ValueError: If a memory takes `input_ids`, and embeddings are passed alone.
        """
        values = {name: arguments.get(name, own.get(name)) for name in self._names}
        if "input_ids" in values and values["input_ids"] is None:
            values["input_ids"] = own["token_ids"]
            if values["input_ids"] is None:
                raise ValueError(
                    "inputs_embeds is passed alone, and a memory of this model reads input_ids; expected input_ids. Or pass the ids "
                    "beside the embeddings, as token_ids."
                )
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def given(value: Any, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return the arguments that the memory takes."""
        return {key: value[key] for key in memory_class.forward_arguments if key in value} if value else {}


@register(SERVICES, "tables")
class Tables(Service):
    """Tables that several layers read. The stack holds them, in `memory_tables`."""

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        shared = {name: tables for name in memories.attached if (tables := memories.tables(name))}
        self.number_of_layer = {
            name: {layer: str(number) for number, tables in enumerate(layer_tables) for layer in tables.layers}
            for name, layer_tables in shared.items()
        }
        model.memory_tables = nn.ModuleDict(
            {
                name: nn.ModuleDict(
                    {str(number): MemoryTables(tables.tensors) for number, tables in enumerate(layer_tables)}
                )
                for name, layer_tables in shared.items()
            }
        )

    def of_pass(
        self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]
    ) -> dict[str, dict[int, dict[str, torch.Tensor]]]:
        """Return for each memory the tables of each layer, by the index of the layer."""
        tables = {}
        for name, number_of_layer in self.number_of_layer.items():
            by_number = {number: module() for number, module in model.memory_tables[name].items()}
            tables[name] = {layer: by_number[number] for layer, number in number_of_layer.items()}
        return tables

    @staticmethod
    def given(value: Any, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return the tables of the layer, if it shares any."""
        tables = (value or {}).get(name, {})
        return {"tables": tables[layer]} if layer in tables else {}


@register(SERVICES, "tokens")
class Places(Service):
    """Padding and documents of a pass."""

    def of_pass(self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]) -> TokenPlaces:
        """Return where padding is and documents begin."""
        mask = arguments["attention_mask"]
        tells_padding = isinstance(mask, torch.Tensor) and mask.dim() == 2
        tokens = arguments["inputs_embeds"] if arguments["input_ids"] is None else arguments["input_ids"]
        return token_places(
            mask if own["token_mask"] is None else own["token_mask"],
            arguments["position_ids"],
            tokens.shape[1],
            may_hold_documents=not tells_padding and arguments[CACHE] is None,
        )

    @staticmethod
    def given(value: Any, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return the places of the tokens. Default: no padding, one document per row."""
        return {"tokens": value or TokenPlaces()}


@mixin_for("tokens")
class TellsPadding:
    """Mixin for a language model whose memories need to know the padding of what it generates from."""

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        *args: Any,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs as the family does, and add a mask of padding, since static caches get a mask of another form.

        transformers reads from the signature whether embeddings may replace the prompt's ids.
        """
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        tells_padding = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
        if tells_padding and "tokens" in self.stack.services:
            assert attention_mask is not None
            own = attention_mask[:, -_tokens_of(inputs).shape[1] :]
            # Of one stride whatever the length before, since compiled code would be compiled again for each token.
            inputs["token_mask"] = own.clone(memory_format=torch.contiguous_format)
        return inputs


@register(SERVICES, "state")
class States(Service):
    """States of the sequences, in the cache of a pass."""

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        self.stateful = {key: memory for key, memory in hosted.items() if "state" in memory.context}
        attention = model.config._attn_implementation
        if attention in ("vllm", "sglang"):
            own = "a server that runs Transformers' own attention, such as `transformers serve`"
            refuse_one_row(self.stateful, f"attention {attention!r}", own)

    def of_pass(
        self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]
    ) -> dict[tuple[str, int], MemoryState]:
        """Return the states of the cache of the pass. Outside training, create a cache if the pass uses one and has none."""
        cache: Cache | None = arguments[CACHE]
        use_cache = arguments["use_cache"]
        if (
            cache is None
            and not model.training
            and (getattr(model.config, "use_cache", True) if use_cache is None else use_cache)
        ):
            cache = arguments[CACHE] = DynamicCache(config=model.config)
        # The repetition of a checkpointed layer would read what the layer had kept.
        if cache is None or (model.training and getattr(model, "gradient_checkpointing", False)):
            return {}
        return states_in(cache, self.stateful, model.config.num_hidden_layers)

    @staticmethod
    def given(value: Any, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return the state of the memory in the layer. Default: sequences begin here, and no state is kept."""
        return {"state": value[name, layer]} if value and (name, layer) in value else {}


@mixin_for("state")
class KeepsStates:
    """Mixin for a language model whose memories keep states of sequences, which not every way of generating allows."""

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the family's generator of candidates for assisted decoding, which takes tokens back."""
        if "state" in self.stack.services:
            check_taking_back(self.stack.services["state"].stateful)
        return super()._get_candidate_generator(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Make the manager of continuous batching, which all of its entry points call, as the family does.

        Raises:
            ValueError: If a memory keeps a state of a sequence.
        """
        if "state" in self.stack.services:
            instead = "`generate`, or `transformers serve` without --continuous-batching"
            refuse_one_row(self.stack.services["state"].stateful, "continuous batching", instead)
        return super().init_continuous_batching(*args, **kwargs)


@register(SERVICES, "whole")
class WholeSequences(Service):
    """Passes over whole sequences, since a token depends on later tokens."""


@mixin_for("whole")
class GeneratesFromWholeSequences:
    """Mixin for a language model whose memories read whole sequences."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the family does, with a pass over all tokens so far for each new token, without a cache.

        Raises:
            ValueError: If a cache is passed, or embeddings, which need a cache.
        """
        if "whole" not in self.stack.services:
            return super().generate(*args, **kwargs)
        if any(kwargs.get(name) is not None for name in (CACHE, "past_key_values")):
            raise ValueError(
                "a cache is passed, but a memory of this model looks at the whole sequence, which no cache holds; "
                "expected none. Upscale with routing = 'chunk' for a model that continues from a cache."
            )
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "inputs_embeds is given, but a memory of this model looks at the whole sequence, and what follows embeddings is "
                "computed from a cache; expected input_ids. Or upscale with routing = 'chunk'."
            )
        warnings.warn(
            "a memory of this model chooses by the whole sequence, later tokens included: generation computes every token anew "
            "for each one that it adds, and what it computes of a token is not what training saw.",
            stacklevel=3,
        )
        kwargs["use_cache"] = False
        return super().generate(*args, **kwargs)


@register(SERVICES, "narrow")
class NarrowStart(Service):
    """Start scale `1 / sqrt(2 L)` of the projections that write to the residual stream (UltraMemV2, appendix B.3)."""

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        for layer in model.layers:
            for part, role in ((layer.mixer_name, "output_projection"), (layer.feed_forward_name, "down")):
                projection: Any = getattr(getattr(layer, part or "", None), PROJECTION_NAMES[role], None)
                # A layer that was inserted for a memory has no projection of this name, and some families wrap theirs.
                if isinstance(getattr(projection, "weight", None), nn.Parameter):
                    projection.start_scale = (2 * model.config.num_hidden_layers) ** -0.5
                    _narrow(projection)


@mixin_for("narrow")
class InitialisesNarrowly:
    """Mixin for a model whose projections may have a start scale."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "start_scale"):
            _narrow(module)


@torch.no_grad()
def _narrow(module: nn.Module) -> None:
    """Multiply the weight of a projection by its `start_scale`, unless a checkpoint has filled the weight."""
    weight: Any = module.weight
    if not getattr(weight, "_is_hf_initialized", False):
        weight.mul_(module.start_scale)


def _tokens_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the ids of the tokens of a pass, `[B, T]`, or their embeddings, `[B, T, D]`."""
    return inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
