"""Prove on a tiny random model of a type that a memory at a site is wired right, before any checkpoint of the type is written.

What was read of an architecture is believed only after this proof. A memory that adds nothing must change no bit. A memory with
values must compute what plain forward hooks compute on the base, take gradients, and follow a cache as the base does.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from midus_hf.banks.initial_blocks import initial_block
from midus_hf.config.backbone import MEMORY_PREFIX
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.memory_checks import layer_projections
from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.config.memory_types import MEMORY_TYPES, Site
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.fetched import FetchedBatch
from midus_hf.models.families import FAMILIES
from midus_hf.models.inference.architecture import (
    architecture_of,
    feed_forward_of,
    has_heads,
    has_projections,
    mixer_of,
)
from midus_hf.models.inference.family_modules import host_family
from midus_hf.models.inference.proof_hooks import HOOKS, HOOKS_INSIDE, adapted_projections, block_before
from midus_hf.models.inference.tiny import tiny_config, tiny_model
from midus_hf.models.parts import CACHE, MissingPart


class UnprovenArchitecture(ValueError):
    """A model type on which a memory at a site computes something else than it should; the message says what differed."""


_TABLE = {"type": "ultramem", "n": 8, "k": 4}
_CHAPTERS = {"type": "chapters", "routing": "token", "memory_tokens": 32, "chapters": 8, "k": 2}
_TREE = {"sizes": [3, 0, 2], "branching": 3}
# For each wiring, the entry of a small memory. Memories at one site are wired alike, but inside a part each type in its own way.
_ENTRIES: dict[str, dict[str, Any]] = {
    "beside-ffn": {**_TABLE, "site": "beside-ffn"},
    "skip": {**_TABLE, "site": "skip"},
    "behind-attention": {**_CHAPTERS, "site": "behind-attention"},
    "behind-layer": {**_CHAPTERS, "site": "behind-layer"},
    "inserted": {"type": "headwise", "n": 8, "k": 3, "site": "inserted"},
    "hier-lora-qk": {"type": "hier-lora-qk", **_TREE, "site": "inside-attention"},
    "hier-lora-vo": {"type": "hier-lora-vo", **_TREE, "site": "inside-attention"},
    "hier-lora-ffn": {"type": "hier-lora-ffn", **_TREE, "site": "inside-ffn"},
    "hier-kv": {"type": "hier-kv", **_TREE, "site": "inside-attention"},
    "depth-attention": {"type": "depth-attention", "site": "inside-attention"},
}

#: What `prove` can prove: sites at which all memories are wired alike, and types of memory inside a part of a layer.
WIRINGS = tuple(_ENTRIES)


def wirings_of(site: str, memory_type: str) -> tuple[str, ...]:
    """Return the wirings that a memory needs: its site's, its type's inside a part, or all of the part's for a type with none.

    Args:
        site: The memory's site.
        memory_type: The memory's type.
    """
    if site in WIRINGS:
        return (site,)
    inside = tuple(wiring for wiring, entry in _ENTRIES.items() if entry["site"] == site)
    return (memory_type,) if memory_type in inside else inside


_LENGTH, _PADDED, _NEW_TOKENS = 12, 4, 3
# Largest difference of logits of a pass in one piece and in steps, if the base itself has none.
_TOLERANCE = 1e-4
# Largest difference of logits that are summed in another order, as a share of what the memory changes.
_ROUNDING = 1e-3
# Standard deviation of values of blocks, by type of memory, so that they are neither lost nor drown the rest. Factors multiply one
# another, and softmax hides small keys.
_STD = {"hier-kv": 0.5}


@cache
def prove(model_type: str, wiring: str) -> None:
    """Prove that memories of a wiring change nothing at birth in a model type, and what they should with values.

    Args:
        model_type: The `model_type` of a causal language model of transformers.
        wiring: One of `WIRINGS`.

    Raises:
        UnknownArchitecture: If the type cannot host memory.
        MissingPart: If its layers have no part for the site.
        UnprovenArchitecture: If the proof fails.
    """
    architecture_of(model_type)
    if model_type not in FAMILIES:
        host_family(model_type)
    try:
        _prove(model_type, wiring)
    except (MissingPart, UnprovenArchitecture):
        raise
    except Exception as error:  # models raise whatever their parts raise
        raise UnprovenArchitecture(f"{model_type}: the proof ended with {type(error).__name__}: {error}") from error


def _prove(model_type: str, wiring: str) -> None:
    deeper = with_more_heads(model_type) if MEMORY_TYPES[_ENTRIES[wiring]["type"]].attends else {}
    for dtype in (torch.bfloat16, torch.float32):
        base = _cast(tiny_model(model_type, **deeper), dtype)
        hosting = _hosting(base, wiring, dtype)
        born = {name: _fetched(layout, dtype, born=True) for name, layout in hosting.config.memories().banks.items()}
        _prove_birth(base, hosting, _arguments(born), f"{model_type} in {str(dtype).removeprefix('torch.')}")
    _give_values(hosting)
    fetched = {name: _fetched(layout, dtype, born=False) for name, layout in hosting.config.memories().banks.items()}
    _prove_values(base, hosting, fetched, wiring, model_type)
    _prove_steps(base, hosting, fetched, model_type)
    _prove_gradients(hosting, fetched, model_type)


def with_more_heads(model_type: str) -> dict[str, Any]:
    """Return changes of a type's tiny config that repeat all layers; none if two or more of its layers have heads.

    A memory that reads what earlier layers wrote needs two layers. Tiny models of hybrid types may have a single one with heads.
    """
    config = tiny_config(model_type)
    count = config.num_hidden_layers
    mixers = [getattr(layer, mixer_of(layer) or "", None) for layer in tiny_model(model_type).model.layers]
    if sum(map(has_heads, mixers)) > 1:
        return {}
    lists = {key: value * 2 for key, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    return {"num_hidden_layers": 2 * count, **lists}


def _arguments(fetched: Mapping[str, FetchedBatch]) -> dict[str, Any]:
    """Return the keyword arguments by which a pass of a hosting model gets blocks."""
    return {"memory_blocks": fetched} if fetched else {}


def _fetched(layout: BankLayout, dtype: torch.dtype, born: bool) -> FetchedBatch:
    """Return blocks for both rows of the batch, as a new bank holds them, or with random values."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.arange(2)
    records = {}
    for level in layout.levels:
        if born:
            records[level] = torch.stack([initial_block(layout, level, row, 0, dtype) for row in rows.tolist()])
        else:
            drawn = _STD.get(layout.memory_type, 0.05) * torch.randn(
                len(rows), layout.record_numel(level), generator=generator
            )
            records[level] = drawn.to(dtype).requires_grad_()
    return FetchedBatch(layout, records, dict.fromkeys(layout.levels, rows))


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Return a model in a dtype as transformers loads the model: the tensors that its class keeps in float32 stay in float32."""
    model.to(dtype)
    kept = [re.compile(rf"(^|\.){part}(\.|$)") for part in model._keep_in_fp32_modules_strict or ()]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part.search(name) for part in kept):
            tensor.data = tensor.data.float()
    return model


def _hosting(base: Any, wiring: str, dtype: torch.dtype) -> Any:
    """Return a model with the weights of a base, and a memory of the wiring that adds nothing yet."""
    causal_lm = FAMILIES[base.config.model_type]
    fields = {key: value for key, value in base.config.to_dict().items() if key not in _OF_SAVING}
    entry = {**_ENTRIES[wiring], "layers": [0, len(base.model.layers) - 2]}
    site, weights = entry["site"], base.state_dict()
    if site.startswith("inside-"):
        entry["layers"] = _layers_with_projections(base, entry["type"], site)
    if site == "skip":
        entry["into"] = [1, len(base.model.layers) - 1]
    if site == "inserted":
        donor = _donor(base)
        entry["layers"] = [donor]
        fields, weights = _with_copy(fields, donor), _with_copied_weights(weights, donor)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hosting = causal_lm(causal_lm.config_class(**fields, memory=[entry])).eval()
    _cast(hosting, dtype)
    wanted = hosting.state_dict()
    if site == "inserted":  # a block drops parts of the layer that it copies
        weights = {name: tensor for name, tensor in weights.items() if name in wanted or not _of_layer(name, donor)}
    others = [name for name in wanted if name not in weights and not is_of_memory(name)]
    others += [name for name in weights if name not in wanted]
    if others:
        raise UnprovenArchitecture(
            f"{base.config.model_type}: a model with memory has other tensors than its base, such as {others[0]}."
        )
    hosting.load_state_dict(weights, strict=False)
    return hosting


def _layers_with_projections(base: Any, memory_type: str, site: Site) -> list[int]:
    """Return the layers of a base whose projections fit a memory inside a part."""
    options = MEMORY_TYPES[memory_type]()
    widths = layer_projections(options, ModelSizes.of(base.config))
    part_of = mixer_of if site == "inside-attention" else feed_forward_of
    parts = [getattr(layer, part_of(layer) or "", None) for layer in base.model.layers]
    layers = [index for index, part in enumerate(parts) if has_projections(part, widths)]
    if len(layers) < (2 if options.attends else 1):
        raise MissingPart(f"every layer of {base.config.model_type!r}", site)
    return layers


def _donor(base: Any) -> int:
    """Return the last layer with attention whose heads a memory can read."""
    layers = enumerate(base.model.layers)
    donors = [index for index, layer in layers if has_heads(getattr(layer, mixer_of(layer) or "", None))]
    if not donors:
        raise MissingPart(f"every layer of {base.config.model_type!r}", "inserted")
    return donors[-1]


def _with_copy(fields: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return the values of a config with one more layer in front of a layer, of the same kind."""
    num_layers = fields["num_hidden_layers"]
    repeated = {
        key: [*value[:layer], value[layer], *value[layer:]]
        for key, value in fields.items()
        if isinstance(value, list) and len(value) == num_layers
    }
    return {**fields, **repeated, "num_hidden_layers": num_layers + 1}


def _with_copied_weights(weights: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """Return weights by name, with a copy of a layer in front of the layer."""
    copied: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        match = _LAYER.match(name)
        if match is None or int(match[1]) < layer:
            copied[name] = tensor
            continue
        copied[f"model.layers.{int(match[1]) + 1}.{match[2]}"] = tensor
        if int(match[1]) == layer:
            copied[name] = tensor
    return copied


def _of_layer(name: str, layer: int) -> bool:
    return name.startswith(f"model.layers.{layer}.")


def is_of_memory(name: str) -> bool:
    """Return whether a tensor belongs to a memory, by its name."""
    return any(part in ("memory", "memories", "memory_tables") for part in name.split("."))


@torch.no_grad()
def _prove_birth(base: Any, hosting: Any, blocks: dict[str, Any], model_type: str) -> None:
    """Compare bits of a model whose memory adds nothing with its base: padded, cached and generated."""
    ids, mask = _batch()
    for name, arguments in {"logits": {}, "logits with padding": {"attention_mask": mask}}.items():
        computed = hosting(ids, **arguments, **blocks).logits
        _check_equal(base(ids, **arguments).logits, computed, f"{model_type}: {name} at birth")
    generated = [
        model.generate(ids, attention_mask=mask, max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0, **more)
        for model, more in ((base, {}), (hosting, blocks))
    ]
    _check_equal(*generated, f"{model_type}: generated tokens at birth")


@torch.no_grad()
def _prove_values(base: Any, hosting: Any, fetched: Mapping[str, FetchedBatch], wiring: str, model_type: str) -> None:
    """Compare a memory that has values with the same memory in forward hooks on the base."""
    ids, _ = _batch()
    inputs: dict[int, Any] = {}
    handles = [
        layer.register_forward_pre_hook(_noting(inputs, index), with_kwargs=True)
        for index, layer in enumerate(hosting.model.layers)
    ]
    (entry,) = hosting.config.memories().entries
    site = entry.site
    memory = f"a memory at {site}" if site == wiring else f"a memory {wiring} at {site}"
    computed = hosting(ids, use_cache=False, **_arguments(fetched)).logits
    if torch.equal(computed, base(ids, use_cache=False).logits):
        raise UnprovenArchitecture(f"{model_type}: {memory} changes no logit; expected a change.")
    if site.startswith("inside-"):
        _prove_inside(base, hosting, entry, fetched.get(entry.name), computed, f"{model_type}: logits of {memory}")
        return
    for position, index in enumerate(entry.layers):
        host = hosting.model.layers[index]
        if site == "inserted":
            handles.append(base.model.layers[index].register_forward_pre_hook(block_before(host), with_kwargs=True))
            continue

        def read(hidden_states: torch.Tensor, host: Any = host, index: int = index) -> torch.Tensor:
            return host.memories[entry.name](hidden_states, **host._inputs_of(entry.name, inputs[index]))

        into = entry.into[position] if entry.into else index
        handles += HOOKS[site](base.model.layers[index], base.model.layers[into], host, read)
    expected = base(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    _check_equal(expected, computed, f"{model_type}: logits of {memory} and of the same memory in hooks")


def _prove_inside(
    base: Any,
    hosting: Any,
    entry: MemoryEntry,
    fetched: FetchedBatch | None,
    computed: torch.Tensor,
    compared: str,
) -> None:
    """Compare logits with the logits of a base whose attention or feed-forward networks have hooks that compute a memory."""
    ids, _ = _batch()
    hook = HOOKS_INSIDE.get(entry.type, adapted_projections)
    implementation = base.config._attn_implementation
    if entry.options.attends:
        base.set_attn_implementation("eager")
    handles = hook(base, hosting, entry, fetched)
    try:
        expected = base(ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
        base.set_attn_implementation(implementation)
    compared = f"{compared} and of hooks that state what it computes"
    if hook is adapted_projections:
        _check_equal(expected, computed, compared)
        return
    by = (expected - computed).abs().max().item()
    most = _ROUNDING * (base(ids, use_cache=False).logits - computed).abs().max().item()
    if not by <= most:
        raise UnprovenArchitecture(f"{compared} differ by up to {by:.1e}; expected at most {most:.1e}.")


@torch.no_grad()
def _prove_steps(base: Any, hosting: Any, fetched: Mapping[str, FetchedBatch], model_type: str) -> None:
    """Compare passes in steps with a pass in one piece."""
    own, allowed = _difference_of_steps(hosting, **_arguments(fetched)), _difference_of_steps(base)
    if own > max(_TOLERANCE, 4 * allowed):
        raise UnprovenArchitecture(
            f"{model_type}: with a cache, logits differ by {own:.1e} from those of one pass, and by {allowed:.1e} without memory; "
            f"expected at most {max(_TOLERANCE, 4 * allowed):.1e}."
        )


def _difference_of_steps(model: Any, **arguments: Any) -> float:
    """Return the largest difference between logits of a pass in one piece and of a prefill and two steps."""
    ids, _ = _batch()
    whole = model(ids, use_cache=False, **arguments).logits
    cache, logits = None, []
    for piece in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        output = model(piece, use_cache=True, **{CACHE: cache}, **arguments)
        cache = output.get(CACHE)
        if cache is None:
            raise UnprovenArchitecture(
                f"{model.config.model_type.removeprefix(MEMORY_PREFIX)}: the model returns no cache; expected one, with "
                "which passes in steps are compared."
            )
        logits.append(output.logits)
    return (torch.cat(logits, dim=1) - whole).abs().max().item()


def _prove_gradients(hosting: Any, fetched: Mapping[str, FetchedBatch], model_type: str) -> None:
    """Check that every parameter of a memory, and every tensor of fetched blocks, takes a gradient."""
    ids, _ = _batch()
    hosting(ids, labels=ids, **_arguments(fetched)).loss.backward()
    dead = [
        name
        for name, parameter in hosting.named_parameters()
        if is_of_memory(name) and (parameter.grad is None or not parameter.grad.any())
    ]
    dead += [
        f"{field.name} of the blocks of level {level} for layer {field.layer}"
        for batch in fetched.values()
        for level, fields in batch.layout.records.items()
        for field, part in zip(fields, _gradients_of(batch, level), strict=True)
        if not part.any()
    ]
    if dead:
        raise UnprovenArchitecture(f"{model_type}: {dead[0]} takes no gradient; expected one for each new tensor.")


@torch.no_grad()
def _give_values(hosting: Any) -> None:
    """Move the parameters of memories off their start values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in hosting.named_parameters():
            if is_of_memory(name):
                parameter.add_(0.1 * torch.randn_like(parameter))


def _gradients_of(batch: FetchedBatch, level: int) -> tuple[torch.Tensor, ...]:
    """Return the gradient of each tensor of the blocks of a level, zero if there is none."""
    record = batch.records[level]
    gradient = torch.zeros_like(record) if record.grad is None else record.grad
    return gradient.split([field.numel for field in batch.layout.records[level]], dim=1)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids `[2, T]`, and a mask that pads the second row on the left."""
    ids = torch.stack([torch.arange(3, 3 + _LENGTH), torch.arange(9, 9 + _LENGTH)])
    mask = torch.ones_like(ids)
    mask[1, :_PADDED] = 0
    return ids, mask


def _check_equal(expected: torch.Tensor, computed: torch.Tensor, compared: str) -> None:
    if not torch.equal(expected, computed):
        same_shape = expected.shape == computed.shape
        by = f" by up to {(expected - computed).abs().max().item():.1e}" if same_shape else ""
        raise UnprovenArchitecture(f"{compared} differ{by}; expected equal bits.")


def _noting(inputs: dict[int, Any], index: int) -> Callable[..., None]:
    def note(layer: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[index] = kwargs.get("memory_inputs")

    return note


_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

# Keys of a saved config that a config class does not take, or that another model type has otherwise.
_OF_SAVING = ("model_type", "architectures", "dtype", "transformers_version")
