"""Services: what a model does for its memories besides calling them in its layers."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.memories.hosting.parts import (
    CACHE,
    Keywords,
    TokenPlaces,
    projection_name,
    shown_tokens,
    token_places,
)
from midus_hf.memories.hosting.state import MemoryState, crop_error, refuse_one_row, starts_in_mask, states_in
from midus_hf.memories.module import MemoryModule, MemoryTables
from midus_hf.memories.registry import Memories

# Memories by their name, empty for an inserted one, and the index of their layer.
Hosted = Mapping[tuple[str, int], MemoryModule]
LayerTables = dict[tuple[str, int], dict[str, torch.Tensor]]


class Service:
    """What a model makes for its memories in every pass, and does around passes; keeps nothing of a pass.

    A memory's layer names the classes of services that it needs. The stack makes one object of each, with itself and, by name and
    layer, the memories that need it.
    """

    #: Name of the service in a stack's `services`.
    key: ClassVar[str]
    #: Whether to skip a memory when this service produced nothing for it; the value of a pass then has the memory's name as a key.
    is_required: ClassVar[bool] = False
    #: Whether a pass may get a cache from the service, which then comes after services that ask whether there is one.
    may_add_cache: ClassVar[bool] = False

    def __init__(self, model: "HostStack", memories: Memories, hosted: Hosted):
        pass

    def prepare_pass(self, model: "HostStack", arguments: Keywords, own: Keywords) -> Any:
        """Prepare a pass of the stack; `layer_arguments` gets the result. Default: None.

        The service may change the `arguments` of the family's forward; `own` are those that the family's forward does not get.
        """
        return None

    @classmethod
    def layer_arguments(cls, value: Any, name: str, layer: int) -> Keywords:
        """Return a memory's keyword arguments in a layer, by default its item of the pass's value, as `key`."""
        return {cls.key: value[name, layer]} if isinstance(value, dict) and (name, layer) in value else {}

    def run(self, model: Any, forward: Callable[[Keywords], Any], arguments: Keywords) -> Any:
        """Run the family's forward of a model with a head, by a mapping of arguments. Default: as it is."""
        return forward(arguments)

    def prepare_inputs(self, inputs: Keywords, attention_mask: object) -> None:
        """Add to the inputs of the next pass of a generation, from its attention mask. Default: nothing."""

    def before_generate(self, arguments: Keywords) -> None:
        """Check and change the keyword arguments of `generate`. Default: nothing."""

    def check_assistant(self) -> None:
        """Refuse assisted decoding, before any token is drafted. Default: allowed."""

    def check_continuous_batching(self, arguments: Keywords) -> None:
        """Refuse continuous batching: tokens of several requests in one row. Default: allowed."""

    def after_loading(self, name: str | os.PathLike | None, arguments: Keywords) -> None:
        """Load what lies next to a checkpoint, with the arguments of `from_pretrained`. Default: nothing."""

    def before_saving(self, folder: str | os.PathLike) -> None:
        """Write what belongs next to the weights in a folder, and is uploaded with them. Default: nothing."""

    def after_saving(self, folder: str | os.PathLike) -> None:
        """Write what belongs next to the weights in a folder. Default: nothing."""

    def check_upload(self) -> None:
        """Refuse an upload by Transformers. Default: allowed."""


class HostStack(nn.Module):
    """A model's stack, as its services see it."""

    config: PreTrainedConfig
    dtype: torch.dtype
    layers: Sequence[HostLayer]
    memory_tables: Any
    memory_input_names: set[str]
    #: Services that the memories need, by key; not typed, so that code of checkpoints without services needs none.
    services: dict[str, Any]
    own_banks: Any = None


class Tables(Service):
    """Tables that several layers read, as `tables`; the stack holds them in `memory_tables`."""

    key = "tables"

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        shared = {name: tables for name in memories.attached if (tables := memories.tables(name))}
        self.number_of_layer = {
            name: {layer: str(number) for number, tables in enumerate(layer_tables) for layer in tables.layers}
            for name, layer_tables in shared.items()
        }
        if shared:
            modules = {
                name: nn.ModuleDict({str(number): MemoryTables(each.tensors) for number, each in enumerate(tables)})
                for name, tables in shared.items()
            }
            model.memory_tables = nn.ModuleDict(modules)

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> LayerTables:
        tables: LayerTables = {}
        for name, number_of_layer in self.number_of_layer.items():
            by_number = {number: module() for number, module in model.memory_tables[name].items()}
            tables |= {(name, layer): by_number[number] for layer, number in number_of_layer.items()}
        return tables


class Tokens(Service):
    """Padding and documents of a pass, as `tokens`, a `TokenPlaces`; memories with states refuse branches."""

    key = "tokens"

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        needed = ((name, service) for (name, _), memory in hosted.items() for service in memory.services)
        self.reader = next((name for name, service in needed if service.may_add_cache), None)

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> TokenPlaces:
        mask, cache, positions = arguments["attention_mask"], arguments[CACHE], arguments["position_ids"]
        tokens = arguments["inputs_embeds"] if arguments["input_ids"] is None else arguments["input_ids"]
        may_hold = not (isinstance(mask, torch.Tensor) and mask.dim() == 2) and cache is None
        positions = positions.expand(len(tokens), -1) if positions is not None and positions.dim() == 2 else None
        given = mask if own["token_mask"] is None else own["token_mask"]
        shown = shown_tokens(mask)
        places = token_places(given, positions, tokens.shape[1], may_hold_documents=may_hold)
        if shown is None or self.reader is None or torch.compiler.is_compiling():
            return places
        before = 0 if cache is None else int(cache.get_seq_length())
        first = min(before, shown.shape[2] - tokens.shape[1])  # a sliding cache has the last columns only
        reaches_back = before > 0 and own["token_mask"] is None  # which tells no padding of the cache
        real = None if places.real is None else places.real.expand(len(tokens), -1)
        shown = shown.expand(len(tokens), -1, -1)  # of one mask for all rows
        return TokenPlaces(real, starts_in_mask(shown, real, first, reaches_back, self.reader))

    @classmethod
    def layer_arguments(cls, value: TokenPlaces | None, name: str, layer: int) -> Keywords:
        return {"tokens": value or TokenPlaces()}

    def prepare_inputs(self, inputs: Keywords, attention_mask: object) -> None:
        """Add a mask of padding, since static caches get a mask of another form."""
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
            # Of one stride whatever the length before, since compiled code would be compiled again for each token.
            own = attention_mask[:, -tokens.shape[1] :]
            inputs["token_mask"] = own.clone(memory_format=torch.contiguous_format)


class TrainedTokens(Service):
    """Tokens that are not padding, as `real`, `[B, T]`, bool; absent in evaluation, or without padding."""

    key = "real"

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> torch.Tensor | None:
        if not model.training:
            return None
        mask = arguments["attention_mask"] if own["token_mask"] is None else own["token_mask"]
        tokens = arguments["inputs_embeds"] if arguments["input_ids"] is None else arguments["input_ids"]
        real = token_places(mask, None, tokens.shape[1], may_hold_documents=False).real
        return None if real is None else real.expand(len(tokens), -1)  # of one mask for all rows

    @classmethod
    def layer_arguments(cls, value: torch.Tensor | None, name: str, layer: int) -> Keywords:
        return {} if value is None else {cls.key: value}


class States(Service):
    """States of sequences, as `state`, a `MemoryState`, for results that depend on earlier tokens."""

    key = "state"
    may_add_cache = True

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        self.stateful, attention = dict(hosted), model.config._attn_implementation
        if attention in ("vllm", "sglang") and self.may_add_cache:  # where states lie
            own = "midus-hf installed beside vLLM (for engram and packs), a server such as `transformers serve`"
            refuse_one_row(self.stateful, f"attention {attention!r}", own)

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> dict[tuple[str, int], MemoryState]:
        """Return the states in the pass's cache, which is created outside training if it is used."""
        cache: Cache | None = arguments[CACHE]
        use_cache = arguments["use_cache"]
        if cache is None and not model.training:
            if getattr(model.config, "use_cache", False) if use_cache is None else use_cache:
                cache = arguments[CACHE] = DynamicCache(config=model.config)
        # The repetition of a checkpointed layer would read what the layer had kept.
        if cache is None or (model.training and getattr(model, "gradient_checkpointing", False)):
            return {}
        return states_in(cache, self.stateful, model.config.num_hidden_layers)

    def check_assistant(self) -> None:
        """Refuse assisted decoding, which takes tokens back, if a memory cannot take them back."""
        for (name, _), memory in self.stateful.items():
            if not memory.is_croppable:
                raise crop_error(name)

    def check_continuous_batching(self, arguments: Keywords) -> None:
        """Refuse continuous batching, whose cache has no place for states."""
        instead = "`generate`, or `transformers serve` without --continuous-batching"
        refuse_one_row(self.stateful, "continuous batching", instead)


class WholeSequences(Service):
    """Passes over whole sequences, for memories that let a token depend on later tokens."""

    key = "whole"

    def before_generate(self, arguments: Keywords) -> None:
        """Let a generation compute all tokens so far for each new token; refuse caches and embeddings."""
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
    """Initial scale `1 / sqrt(2 L)` of projections into the stream (UltraMemV2, appendix B.3)."""

    key = "initialisation"

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
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
def scale_initial(projection: Any) -> None:
    """Multiply a projection's weight by its `initial_scale`, unless a checkpoint has filled it."""
    if not getattr(projection.weight, "_is_hf_initialized", False):
        projection.weight.mul_(projection.initial_scale)


class BankService(Service):
    """Service of memories with a bank next to the weights, opened on loading, written in `after_saving`.

    TRL keeps log-probabilities of a reference model by a hash of its `state_dict`, which includes `digest` only for this: a state is
    saved and loaded, and FSDP shards every tensor in it.
    """

    files: ClassVar[tuple[str, ...]] = (f"{BANKS_FOLDER}/**",)
    #: Name of the digest in what runs record, where it is not `key`, which had another name in checkpoints of runs before.
    digest_name: ClassVar[str] = ""
    #: Whether reading an open bank runs passes of the model.
    runs_passes: ClassVar[bool] = False

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        model.register_state_dict_post_hook(_add_digests)

    def open_bank(self, folder: Path | None, arguments: Keywords) -> None:
        """Open the bank in a checkpoint's folder or None, with the arguments of `from_pretrained`."""
        raise NotImplementedError

    def digest(self) -> str | None:
        """Return a digest of what the memories read, whatever its folder; None if nothing is open."""
        raise NotImplementedError

    def after_loading(self, name: str | os.PathLike | None, arguments: Keywords) -> None:
        """Open the bank next to the checkpoint; none for a model that was made of a state."""
        if name is not None:
            self.open_bank(folder_of_checkpoint(name, arguments, self.files), arguments)

    def check_upload(self) -> None:
        """Refuse an upload while a bank is open: Transformers uploads before, and no nested folders."""
        if self.digest() is not None:
            raise RequestError(
                "this model has a bank beside its weights, which an upload by Transformers would leave out; expected "
                "save_pretrained(folder), and then in a shell: hf upload REPO_ID folder."
            )


def _add_digests(stack: HostStack, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
    """Add the digests of a stack's services to its state, if TRL's `hash_module` asks for it."""
    frame = sys._getframe()
    while (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("hash_module", "trl.trainer.utils"):
        if frame.f_back is None:
            return
        frame = frame.f_back
    for key, service in stack.services.items():
        if isinstance(service, BankService) and (digest := service.digest()) is not None:
            state[f"{prefix}beside.{key}"] = torch.tensor(list(digest.encode()), dtype=torch.uint8)


def folder_of_checkpoint(name: str | os.PathLike, options: Keywords, patterns: Sequence[str]) -> Path | None:
    """Return the folder of a checkpoint, None if absent; of a hub id, download files by patterns.

    The name and the options are the arguments of `from_pretrained`.
    """
    folder = Path(name, options.get("subfolder") or "")
    if folder.is_dir():
        return folder
    known = ("revision", "cache_dir", "token", "local_files_only")
    hub_options = {key: options[key] for key in known if options.get(key) is not None}
    subfolder = options.get("subfolder") or "."
    wanted = [PurePosixPath(subfolder, each).as_posix() for each in patterns]
    with contextlib.suppress(OSError, ValueError):
        return Path(snapshot_download(str(name), allow_patterns=wanted, **hub_options), subfolder)
    return None


# What a router calls with its logits `[S, C]` and its loss, a scalar.
RouterReport = Callable[[torch.Tensor, torch.Tensor], None]


class RouterReports:
    """Reports of all routers on one pass; a checkpointed layer replaces its report by an equal one."""

    def __init__(self, needs_gradient: bool = False):
        self.needs_gradient = needs_gradient  # of the routers' losses
        self.routed: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def store(self, name: str, layer: int, logits: torch.Tensor, loss: torch.Tensor) -> None:
        """Store what a memory's router reports; refuse losses of a router that runs without gradients."""
        if self.needs_gradient and not torch.is_grad_enabled():
            raise RequestError(
                f"the router of memory {name!r} in layer {layer} runs without gradients in a pass that trains, as under reentrant "
                "activation checkpointing; expected gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        self.routed[layer, name] = (logits, loss)

    def logits(self) -> tuple[torch.Tensor, ...]:
        """Return the logits of all routers, ordered by layer."""
        return tuple(self.routed[key][0] for key in sorted(self.routed))

    def loss(self) -> torch.Tensor | None:
        """Return the sum over memories of the mean loss of each memory's layers; None if no router reported."""
        losses: dict[str, list[torch.Tensor]] = {}
        for layer, name in sorted(self.routed):
            losses.setdefault(name, []).append(self.routed[layer, name][1])
        means = [torch.stack([loss.to(each[0].device) for loss in each]).mean() for each in losses.values()]
        return torch.stack([mean.to(means[0].device) for mean in means]).sum() if means else None


class Reports(Service):
    """Reports of routers, which memories call as `report` if a pass collects them, and their losses.

    In training, losses are added as in transformers' mixture-of-experts models. `output_router_logits`, an argument of `forward` or
    an attribute of the config, returns the routers' logits and adds losses outside training too; false never adds losses.
    """

    key = "report"
    fields = ("logits", "start_logits", "end_logits", CACHE, "hidden_states", "attentions")

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> RouterReports | None:
        return own["memory_reports"]

    @classmethod
    def layer_arguments(cls, value: RouterReports | None, name: str, layer: int) -> Keywords:
        return {} if value is None else {"report": partial(value.store, name, layer)}

    def run(self, model: Any, forward: Callable[[Keywords], Any], arguments: Keywords) -> Any:
        """Run the forward of a model, and add the losses of routers."""
        wanted = arguments.pop("output_router_logits", None)
        if wanted is None:
            wanted = getattr(model.config.get_text_config(), "output_router_logits", None)
        learns = model.training and torch.is_grad_enabled()
        trains = learns and any(arguments.get(name) is not None for name in ("labels", "start_positions"))
        if learns and not trains and wanted is None:
            warnings.warn(
                "a pass that trains has no labels, so the losses of its routers are not added; where the loss is computed outside "
                "the model, call it with output_router_logits=True and add aux_loss.",
                stacklevel=6,
            )
        if wanted is False or not (wanted or trains):
            return forward(arguments)
        return_dict = arguments.pop("return_dict", None)
        reports = RouterReports(needs_gradient=trains)
        family_output = forward({**arguments, "memory_reports": reports, "return_dict": True})
        added, loss = reports.loss(), family_output.loss
        if loss is not None and added is not None:
            share = model.share_of_step(arguments)
            loss = loss + (share.to(loss.device) if isinstance(share, torch.Tensor) else share) * added.to(loss.device)
        values = {name: family_output[name] for name in self.fields if name in family_output}
        values |= {"loss": loss, "aux_loss": added, "router_logits": reports.logits() if wanted else None}
        output = model.output_class(**values)
        return_dict = model.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()
