"""Prove on a tiny random model of a type that a memory at a site is wired right, before the type is listed.

What was read of an architecture is believed only after this proof. A memory that adds nothing must change no bit. A memory with
values must compute what is stated by changes of the base, take gradients, and follow a cache as the base does.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hierarchical.bank import FetchedBatch, initial_block
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.memories.hosting.parts import CACHE, MissingPartError, has_heads
from midus_hf.memories.registry import MEMORY_TYPES
from midus_hf.models.families import FAMILIES
from midus_hf.models.families.template import host_type
from scripts.anatomy.architecture import feed_forward_of, mixer_of, projection_of
from scripts.anatomy.reading import read_type
from scripts.anatomy.statement import SUMS_IN_ANOTHER_ORDER, state
from scripts.anatomy.tiny import tiny_config, tiny_model


class UnprovenArchitecture(ValueError):
    """A model type on which a memory at a site computes something else than it should; the message says what differed."""


_TABLE = {"type": "ultramem-v2", "n": 8, "k": 4}
# Chunks keep a state of the sequence, which passes with a cache need.
_CHAPTERS = {"type": "moc", "chunk_size": 4, "memory_tokens": 32, "chapters": 8, "k": 2}
_TREE = {"sizes": [3, 0, 2], "branching": 3}
# For each wiring, the entry of a small memory. Memories at one site are wired alike, but inside a part each type in its own way.
_ENTRIES: dict[str, dict[str, Any]] = {
    "beside-ffn": {**_TABLE, "site": "beside-ffn"},
    "skip": {**_TABLE, "site": "skip"},
    "behind-attention": {**_CHAPTERS, "site": "behind-attention"},
    "behind-layer": {**_CHAPTERS, "site": "behind-layer"},
    "inserted": {"type": "midus-hml", "n": 8, "k": 3, "site": "inserted"},
    "hier-lora-qk": {"type": "hier-lora-qk", **_TREE, "site": "inside-attention"},
    "hier-lora-vo": {"type": "hier-lora-vo", **_TREE, "site": "inside-attention"},
    "hier-lora-ffn": {"type": "hier-lora-ffn", **_TREE, "site": "inside-ffn"},
    "hier-kv": {"type": "hier-kv", **_TREE, "site": "inside-attention"},
    "moda": {"type": "moda", "site": "inside-attention"},
}

_LENGTH, _PADDED, _NEW_TOKENS = 12, 4, 3
# Largest difference of logits of a pass in one piece and in steps, if the base itself has none.
_TOLERANCE = 1e-4
# Largest difference of logits that are summed in another order, as a share of what the memory changes.
_ROUNDING = 1e-3
# Standard deviation of values of blocks, by type of memory, so that they are neither lost nor drown the rest. Factors multiply one
# another, and softmax hides small keys.
_STD = {"hier-kv": 0.5}


@dataclass(frozen=True)
class _Trial:
    """A base, a model with its weights and a memory, and the keyword arguments by which a pass of the model gets blocks."""

    base: Any
    hosting: Any
    arguments: Mapping[str, Any]

    def batches(self) -> Mapping[str, FetchedBatch]:
        """Return the blocks by the name of their memory; empty for a memory that fetches none."""
        return self.arguments.get("memory_blocks", {})


@cache
def prove(model_type: str, wiring: str) -> None:
    """Prove that memories of a wiring change nothing at initialisation in a model type, and what they should with values.

    Args:
        model_type: The `model_type` of a causal language model of transformers.
        wiring: One of `midus_hf.anatomy.types.WIRINGS`.

    Raises:
        UnknownType: If the type cannot host memory.
        MissingPartError: If its layers have no part for the site.
        UnprovenArchitecture: If the proof fails.
    """
    row = read_type(model_type)
    if model_type not in FAMILIES:
        host_type(model_type, row)
    entry = _ENTRIES[wiring]
    memory = f"a memory at {wiring}" if wiring == entry["site"] else f"a memory {wiring} at {entry['site']}"
    deeper = with_more_heads(model_type) if MEMORY_TYPES[entry["type"]].attends else {}
    try:
        _prove_identity(_trial(tiny_model(model_type, **deeper), entry, torch.bfloat16))
        trial = _trial(tiny_model(model_type, **deeper), entry, torch.float32)
        _prove_identity(trial)
        trial = _with_values(trial)
        _prove_values(trial, memory)
        _prove_steps(trial)
        _prove_gradients(trial)
    except MissingPartError:
        raise
    except UnprovenArchitecture as error:
        raise UnprovenArchitecture(f"{model_type}: {error}") from None
    except Exception as error:  # models raise whatever their parts raise
        raise UnprovenArchitecture(f"{model_type}: the proof ended with {type(error).__name__}: {error}") from error


def with_more_heads(model_type: str) -> dict[str, Any]:
    """Return changes of a type's tiny config that repeat all layers; none if two or more of its layers have heads.

    A memory that reads what earlier layers wrote needs two layers. Tiny models of hybrid types may have a single one with heads.
    """
    config = tiny_config(model_type)
    count = config.num_hidden_layers
    if sum(has_heads(mixer_of(layer)) for layer in tiny_model(model_type).model.layers) > 1:
        return {}
    lists = {key: value * 2 for key, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    return {"num_hidden_layers": 2 * count, **lists}


def _trial(base: Any, small_entry: Mapping[str, Any], dtype: torch.dtype) -> _Trial:
    """Return a base in a dtype, and a model with its weights and a memory that adds nothing yet."""
    _cast(base, dtype)
    causal_lm = FAMILIES[base.config.model_type]
    fields = {key: value for key, value in base.config.to_dict().items() if key not in _OF_SAVING}
    site = small_entry["site"]
    weights = base.state_dict()
    last = len(base.model.layers) - 1
    entry = {**small_entry, "layers": [0, last - 1]}
    if site.startswith("inside-"):
        entry["layers"] = _layers_with_projections(base, small_entry)
    if site == "skip":
        entry["into"] = [1, last]
    if site == "inserted":
        donors = [index for index, layer in enumerate(base.model.layers) if has_heads(mixer_of(layer))]
        if not donors:
            raise MissingPartError(f"every layer of {base.config.model_type!r}", site)
        entry["layers"] = [donors[-1]]
        sources = [*range(donors[-1] + 1), *range(donors[-1], len(base.model.layers))]  # the last donor twice
        fields = _with_copy(fields, sources)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hosting = causal_lm(causal_lm.config_class(**fields, memory=[entry])).eval()
    _cast(hosting, dtype)
    wanted = hosting.state_dict()
    if site == "inserted":  # a block drops parts of the layer that it copies
        block = f"model.layers.{donors[-1]}."
        weights = _copied_weights(weights, sources, wanted)
        weights = {name: tensor for name, tensor in weights.items() if name in wanted or not name.startswith(block)}
    others = [name for name in wanted if name not in weights and not _is_of_memory(name)]
    others += [name for name in weights if name not in wanted]
    if others:
        raise UnprovenArchitecture(f"a model with memory has other tensors than its base, such as {others[0]}.")
    hosting.load_state_dict(weights, strict=False)
    return _Trial(base, hosting, _blocks(hosting, dtype, initial=True))


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Cast a model as transformers loads it in a dtype: the tensors that its class keeps in float32 stay in float32."""
    model.to(dtype)
    kept = [re.compile(rf"(^|\.){part}(\.|$)") for part in model._keep_in_fp32_modules_strict or ()]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part.search(name) for part in kept):
            tensor.data = tensor.data.float()


def _layers_with_projections(base: Any, entry: Mapping[str, Any]) -> list[int]:
    """Return the layers of a base whose projections fit a memory inside a part."""
    options = MEMORY_TYPES[entry["type"]]()
    part_of = mixer_of if entry["site"] == "inside-attention" else feed_forward_of
    layers = []
    stacked = read_type(base.config.model_type).stacked
    for index, part in enumerate(map(part_of, base.model.layers)):
        widths = options.layer_projections(ModelSizes.from_config(base.config))
        if part is not None and all(_widths(part, role, stacked) == width for role, width in widths.items()):
            layers.append(index)
    if len(layers) < (2 if options.attends else 1):
        raise MissingPartError(f"every layer of {base.config.model_type!r}", entry["site"])
    return layers


def _widths(part: nn.Module, role: str, stacked: Mapping[str, tuple[str, ...]]) -> tuple[int, int] | None:
    """Return the input and output width of the projection in a role; None if the part has no linear one."""
    projection = projection_of(part, role, stacked)
    module = None if projection is None else getattr(part, projection.module)
    if projection is None or not isinstance(module, nn.Linear):
        return None
    return module.in_features, len(range(module.out_features)[projection.rows])


def _with_copy(fields: dict[str, Any], sources: list[int]) -> dict[str, Any]:
    """Return the values of a config for layers that are copies of its layers."""
    num_layers = fields["num_hidden_layers"]
    repeated = {
        key: [value[source] for source in sources]
        for key, value in fields.items()
        if isinstance(value, list) and len(value) == num_layers
    }
    own = {int(layer): values for layer, values in fields.get("per_layer_config", {}).items()}
    if own:
        repeated["per_layer_config"] = {
            str(index): own[source] for index, source in enumerate(sources) if source in own
        }
    return {**fields, **repeated, "num_hidden_layers": len(sources)}


def _copied_weights(
    weights: Mapping[str, torch.Tensor], sources: list[int], wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return weights by name for layers that are copies of layers, with tables of a block per layer in the wanted shapes."""
    num_layers = 1 + max(sources)
    prefix = "model.layers."
    copied = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    for index, source in enumerate(sources):
        own = f"{prefix}{source}."
        copied |= {
            f"{prefix}{index}.{name.removeprefix(own)}": weights[name] for name in weights if name.startswith(own)
        }
    for name in copied.keys() & wanted.keys():
        for dim, (size, needed) in enumerate(zip(copied[name].shape, wanted[name].shape, strict=True)):
            if size * len(sources) == needed * num_layers and size != needed:
                blocks = copied[name].unflatten(dim, (num_layers, -1))
                copied[name] = blocks.index_select(dim, torch.tensor(sources)).flatten(dim, dim + 1)
    return copied


def _is_of_memory(name: str) -> bool:
    """Return whether a tensor belongs to a memory, by its name."""
    return not {"memory", "memories", "memory_tables"}.isdisjoint(name.split("."))


def _blocks(hosting: Any, dtype: torch.dtype, *, initial: bool) -> dict[str, Any]:
    """Return the arguments that give blocks to both rows of the batch, as a new bank holds them, or with random values."""
    rows = torch.arange(2)
    batches = {}
    for name, layout in block_layouts(hosting.config.memories()).items():
        generator = torch.Generator().manual_seed(2)
        std = _STD.get(layout.memory_type, 0.05)
        records = {}
        for level in layout.levels:
            if initial:
                records[level] = torch.stack([initial_block(layout, level, row, 0, dtype) for row in rows.tolist()])
            else:
                drawn = std * torch.randn(len(rows), layout.record_numel(level), generator=generator)
                records[level] = drawn.to(dtype).requires_grad_()
        batches[name] = FetchedBatch(layout, records, dict.fromkeys(layout.levels, rows))
    return {"memory_blocks": batches} if batches else {}


def _with_values(trial: _Trial) -> _Trial:
    """Return a trial with values in blocks, after the parameters of memories are moved off their start values."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in trial.hosting.named_parameters():
            if _is_of_memory(name):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return _Trial(trial.base, trial.hosting, _blocks(trial.hosting, torch.float32, initial=False))


@torch.no_grad()
def _prove_identity(trial: _Trial) -> None:
    """Compare bits of a model whose memory adds nothing with its base: padded, cached and generated."""
    ids, mask = _batch()
    moment = f"at initialisation in {str(trial.base.dtype).removeprefix('torch.')}"
    for name, arguments in {"logits": {}, "logits with padding": {"attention_mask": mask}}.items():
        computed = trial.hosting(ids, **arguments, **trial.arguments).logits
        _check_equal(trial.base(ids, **arguments).logits, computed, f"{name} {moment}")
    generated = [
        model.generate(ids, attention_mask=mask, max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0, **more)
        for model, more in ((trial.base, {}), (trial.hosting, trial.arguments))
    ]
    _check_equal(*generated, f"generated tokens {moment}")


@torch.no_grad()
def _prove_values(trial: _Trial, memory: str) -> None:
    """Compare a memory that has values with what is stated of the memory by changes of the base."""
    ids, _ = _batch()
    (entry,) = trial.hosting.config.memories().entries
    inputs: dict[nn.Module, Any] = {}
    memories = [layer.memories[entry.name] for layer in trial.hosting.model.layers if hasattr(layer, "memories")]
    for module in memories:
        module.register_forward_pre_hook(
            lambda memory, args, kwargs: inputs.update({memory: kwargs}), with_kwargs=True
        )
    computed = trial.hosting(ids, use_cache=False, **trial.arguments).logits
    plain = trial.base(ids, use_cache=False).logits
    if torch.equal(computed, plain):
        raise UnprovenArchitecture(f"{memory} changes no logit; expected a change.")
    stated = deepcopy(trial.base)
    state(stated, trial.hosting, entry, trial.batches().get(entry.name), inputs)
    expected = stated(ids, use_cache=False).logits
    compared = f"logits of {memory} and of a base that states what it computes"
    if entry.options.type not in SUMS_IN_ANOTHER_ORDER:
        _check_equal(expected, computed, compared)
        return
    by = (expected - computed).abs().max().item()
    most = _ROUNDING * (plain - computed).abs().max().item()
    if not by <= most:
        raise UnprovenArchitecture(f"{compared} differ by up to {by:.1e}; expected at most {most:.1e}.")


@torch.no_grad()
def _prove_steps(trial: _Trial) -> None:
    """Compare passes in steps with a pass in one piece."""
    own, without = _difference_of_steps(trial.hosting, trial.arguments), _difference_of_steps(trial.base, {})
    most = max(_TOLERANCE, 4 * without)
    if own > most:
        raise UnprovenArchitecture(
            f"with a cache, logits differ by {own:.1e} from those of one pass, and by {without:.1e} without memory; expected at "
            f"most {most:.1e}."
        )


def _difference_of_steps(model: Any, arguments: Mapping[str, Any]) -> float:
    """Return the largest difference between logits of a pass in one piece and of a prefill and two steps."""
    ids, _ = _batch()
    whole = model(ids, use_cache=False, **arguments).logits
    cache = None
    logits = []
    for piece in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        output = model(piece, use_cache=True, **{CACHE: cache}, **arguments)
        cache = output.get(CACHE)
        if cache is None:
            raise UnprovenArchitecture(
                "the model returns no cache; expected one, with which passes in steps are compared."
            )
        logits.append(output.logits)
    return (torch.cat(logits, dim=1) - whole).abs().max().item()


def _prove_gradients(trial: _Trial) -> None:
    """Check that every parameter of a memory, and every tensor of fetched blocks, takes a gradient."""
    ids, _ = _batch()
    trial.hosting(ids, labels=ids, **trial.arguments).loss.backward()
    gradients = {name: each.grad for name, each in trial.hosting.named_parameters() if _is_of_memory(name)}
    for batch in trial.batches().values():
        for level, fields in batch.layout.records.items():
            gradient = batch.records[level].grad
            for field in fields:
                name = f"{field.name} of the blocks of level {level} for layer {field.layer}"
                gradients[name] = None if gradient is None else gradient[:, field.start : field.start + field.numel]
    for name, gradient in gradients.items():
        if gradient is None or not gradient.any():
            raise UnprovenArchitecture(f"{name} takes no gradient; expected one for each new tensor.")


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


# Keys of a saved config that a config class does not take, or that another model type has otherwise.
_OF_SAVING = ("model_type", "architectures", "dtype", "transformers_version")
