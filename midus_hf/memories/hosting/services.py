"""Services for memories: shared tables, places of tokens, states of sequences, and how projections are initialised."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from midus_hf.config.errors import RequestError
from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.parts import CACHE, Keywords, projection_name
from midus_hf.memories.hosting.service import HostStack, Service
from midus_hf.memories.hosting.state import MemoryState, not_croppable, refuse_one_row, states_in
from midus_hf.memories.hosting.token_places import TokenPlaces, token_places
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.tables import MemoryTables

# Tables by name, for each memory and layer.
LayerTables = dict[tuple[str, int], dict[str, torch.Tensor]]


class Tables(Service):
    """Tables that several layers read, as `tables`, which the stack holds in `memory_tables`, if options share any."""

    key = "tables"

    def __init__(self, model: HostStack, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        shared = {name: tables for name in memories.attached if (tables := memories.tables(name))}
        self.number_of_layer = {
            name: {layer: str(number) for number, tables in enumerate(layer_tables) for layer in tables.layers}
            for name, layer_tables in shared.items()
        }
        if shared:
            model.memory_tables = nn.ModuleDict(
                {
                    name: nn.ModuleDict(
                        {str(number): MemoryTables(each.tensors) for number, each in enumerate(tables)}
                    )
                    for name, tables in shared.items()
                }
            )

    def of_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> LayerTables:
        """Return the tables of each memory and layer."""
        tables: LayerTables = {}
        for name, number_of_layer in self.number_of_layer.items():
            by_number = {number: module() for number, module in model.memory_tables[name].items()}
            tables |= {(name, layer): by_number[number] for layer, number in number_of_layer.items()}
        return tables

    @staticmethod
    def given(value: LayerTables | None, name: str, layer: int) -> Keywords:
        """Return the tables of the layer, if it shares any."""
        return {"tables": value[name, layer]} if value and (name, layer) in value else {}


class Tokens(Service):
    """Padding and documents of a pass, as `tokens`, a `TokenPlaces`."""

    key = "tokens"

    def of_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> TokenPlaces:
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
    def given(value: TokenPlaces | None, name: str, layer: int) -> Keywords:
        """Return the places of the tokens. Default: no padding, one document per row."""
        return {"tokens": value or TokenPlaces()}

    def prepare_inputs(self, inputs: Keywords, attention_mask: object) -> None:
        """Add a mask of padding, since static caches get a mask of another form."""
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
            # Of one stride whatever the length before, since compiled code would be compiled again for each token.
            own = attention_mask[:, -tokens.shape[1] :]
            inputs["token_mask"] = own.clone(memory_format=torch.contiguous_format)


class States(Service):
    """States of the sequences in the cache of a pass, each as `state`, a `MemoryState`, if the pass has a cache.

    It is for memories whose result for a token depends on earlier tokens.
    """

    key = "state"
    may_add_cache = True

    def __init__(self, model: HostStack, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        self.stateful, attention = dict(hosted), model.config._attn_implementation
        if attention in ("vllm", "sglang") and self.may_add_cache:  # where states lie
            own = "midus-hf installed beside vLLM (for engram and packs), a server such as `transformers serve`"
            refuse_one_row(self.stateful, f"attention {attention!r}", own)

    def of_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> dict[tuple[str, int], MemoryState]:
        """Return the states of the cache of the pass. Outside training, create a cache if the pass uses one and has none."""
        cache: Cache | None = arguments[CACHE]
        use_cache = arguments["use_cache"]
        if (
            cache is None
            and not model.training
            and (getattr(model.config, "use_cache", False) if use_cache is None else use_cache)
        ):
            cache = arguments[CACHE] = DynamicCache(config=model.config)
        # The repetition of a checkpointed layer would read what the layer had kept.
        if cache is None or (model.training and getattr(model, "gradient_checkpointing", False)):
            return {}
        return states_in(cache, self.stateful, model.config.num_hidden_layers)

    @staticmethod
    def given(value: dict[tuple[str, int], MemoryState] | None, name: str, layer: int) -> Keywords:
        """Return the state of the memory in the layer. Default: sequences begin here, and no state is kept."""
        return {"state": value[name, layer]} if value and (name, layer) in value else {}

    def check_assistant(self) -> None:
        """Refuse assisted decoding, which takes tokens back, if a memory cannot take them back."""
        for (name, _), memory in self.stateful.items():
            if not memory.is_croppable:
                raise not_croppable(name)

    def check_continuous_batching(self, arguments: Keywords) -> None:
        """Refuse continuous batching, whose cache has no place for states."""
        instead = "`generate`, or `transformers serve` without --continuous-batching"
        refuse_one_row(self.stateful, "continuous batching", instead)


class WholeSequences(Service):
    """Passes over whole sequences, for memories that let a token depend on later tokens."""

    key = "whole"

    def before_generate(self, arguments: Keywords) -> None:
        """Let a generation compute all tokens so far for each new token, without a cache.

        Raises:
            RequestError: If a cache is passed, or embeddings, which need a cache.
        """
        if any(arguments.get(name) is not None for name in (CACHE, "past_key_values")):
            raise RequestError(
                "a cache is passed, but a memory of this model looks at the whole sequence, which no cache holds; "
                "expected none. Upscale with routing = 'chunk' for a model that continues from a cache."
            )
        if arguments.get("inputs_embeds") is not None:
            raise RequestError(
                "inputs_embeds is given, but a memory of this model looks at the whole sequence, and what follows embeddings is "
                "computed from a cache; expected input_ids. Or upscale with routing = 'chunk'."
            )
        warnings.warn(
            "a memory of this model chooses by the whole sequence, later tokens included: generation computes every token anew "
            "for each one that it adds, and what it computes of a token is not what training saw.",
            stacklevel=4,
        )
        arguments["use_cache"] = False


class ScaledInitialisation(Service):
    """Scale `1 / sqrt(2 L)` of the initial projections that write to the residual stream (UltraMemV2, appendix B.3)."""

    key = "initialisation"

    def __init__(self, model: HostStack, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        for layer in model.layers:
            for part, role in ((layer.mixer_name, "output_projection"), (layer.feed_forward_name, "down")):
                module: Any = getattr(layer, part or "", None)
                projection: Any = getattr(module, projection_name(module, role), None)
                # A layer that was inserted for a memory has no projection of this name, and some families wrap theirs.
                if isinstance(getattr(projection, "weight", None), nn.Parameter):
                    # Transformers initialises the projection later, and the stack then scales it.
                    projection.initial_scale = (2 * model.config.num_hidden_layers) ** -0.5
                    scale_initial(projection)


@torch.no_grad()
def scale_initial(module: nn.Module) -> None:
    """Multiply the weight of a projection by its `initial_scale`, if it has one and no checkpoint has filled the weight."""
    scale = getattr(module, "initial_scale", None)
    weight: Any = getattr(module, "weight", None)
    if scale is not None and not getattr(weight, "_is_hf_initialized", False):
        weight.mul_(scale)
