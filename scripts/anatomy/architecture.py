"""Read the architecture of a model type from a tiny random model that transformers builds: where the layers are, and their parts.

Nothing is written down per type but the sizes of its tiny model (`tiny.py`): parts are read from the built
model, and what the parts do with the residual stream is read from a recorded forward pass.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from midus_hf.anatomy.types import LayerParts, UnknownType
from midus_hf.memories.hosting.parts import FEED_FORWARDS, MIXERS
from scripts.anatomy.tiny import tiny_config, tiny_model

#: Names of the separate projections of attention and of gated feed-forward networks, by role. Proofs read this table, and host
#: layers another, so that an error in one of them shows.
_PROJECTIONS = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "output_projection": ("o_proj", "out_proj", "dense", "Wo"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3"),
    "down": ("down_proj", "w2", "fc2", "output_linear", "Wo"),
}


class Projection(NamedTuple):
    """A projection: the name of a module in a part of a layer, and the rows of its output, all or from one number to another."""

    module: str
    rows: slice = slice(None)


def projection_of(part: nn.Module, role: str, stacked: Mapping[str, Sequence[str]]) -> Projection | None:
    """Return the projection of an attention or a feed-forward network in a role; None if the part has none.

    Args:
        part: The attention or the network.
        role: Role of the projection.
        stacked: Roles of the projections that linear modules stack, as in a type's row.
    """
    for name, module in part.named_children():
        roles = stacked.get(f"{type(part).__name__}.{name}", ())
        if role in roles and isinstance(module, nn.Linear):
            shares = [1] * len(roles)
            if "query" in roles:  # of heads
                config: Any = part.config
                shares = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
            ends = [0, *(module.out_features * count // sum(shares) for count in itertools.accumulate(shares))]
            place = roles.index(role)
            return Projection(name, slice(ends[place], ends[place + 1]))
    name = part_name(part, _PROJECTIONS[role])
    return None if name is None else Projection(name)


@dataclass(frozen=True)
class Architecture:
    """A model type, as transformers builds it.

    Args:
        model_type: `model_type` of the config.
        causal_lm: Class of the causal language model.
        layers: For each class of decoder layers, in the order in which they first occur, the parts of its layers.
        norms_all_heads: Whether norms of queries and keys are over all heads together.
    """

    model_type: str
    causal_lm: type[PreTrainedModel]
    layers: dict[type[nn.Module], LayerParts]
    norms_all_heads: bool

    @property
    def class_name(self) -> str:
        """Middle part of the names of the classes that host memory, `Midus{class_name}ForCausalLM`."""
        return self.causal_lm.__name__.removesuffix("ForCausalLM")


def is_composite(model_type: str) -> bool:
    """Return whether a type of transformers holds a language model within a composite model."""
    return "text_config" in CONFIG_MAPPING[model_type].sub_configs


def part_name(layer: nn.Module, names: Sequence[str]) -> str | None:
    """Return the first of some names that a child of a decoder layer has; None if no child has any."""
    return next((name for name in names if isinstance(getattr(layer, name, None), nn.Module)), None)


def mixer_of(layer: nn.Module) -> Any:
    """Return the child of a decoder layer that mixes tokens; None if no child is known to."""
    return getattr(layer, part_name(layer, MIXERS) or "", None)


def feed_forward_of(layer: nn.Module) -> Any:
    """Return the feed-forward network of a decoder layer; None if no child is known to be one."""
    return getattr(layer, part_name(layer, FEED_FORWARDS) or "", None)


@cache
def architecture_of(model_type: str) -> Architecture:
    """Read the architecture of a type from a tiny random model and one recorded pass.

    Args:
        model_type: The `model_type` of a causal language model of transformers.

    Raises:
        UnknownType: If the type cannot host memory. The message says why.
    """
    config_class = CONFIG_MAPPING[model_type]
    if "text_config" in config_class.sub_configs:
        raise UnknownType(
            f"{model_type!r} holds a language model within a composite model; expected the language model alone. If transformers "
            "loads it alone, save it as a checkpoint of its own."
        )
    if "decoder" in config_class.sub_configs or getattr(tiny_config(model_type), "is_encoder_decoder", False):
        raise UnknownType(f"{model_type!r} is an encoder with a decoder; expected a decoder alone.")
    model: Any = tiny_model(model_type)
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise UnknownType(f"{model_type!r} {_where_layers_are(model)}")
    counted = model.config.num_hidden_layers
    if len(layers) != counted:
        raise UnknownType(
            f"{model_type!r} has {len(layers)} layers at model.layers where num_hidden_layers is {counted}; expected equal numbers."
        )
    saved = model.config.to_dict().get("num_hidden_layers")
    if saved != counted:
        raise UnknownType(
            f"{model_type!r} has {counted} layers where num_hidden_layers of its saved config is {saved}; expected equal numbers."
        )
    parts: dict[type[nn.Module], list[LayerParts]] = {}
    for layer, calls in zip(layers, _recorded_pass(model, layers), strict=True):
        parts.setdefault(type(layer), []).append(_parts(layer, calls))
    return Architecture(
        model_type=model_type,
        causal_lm=type(model),
        layers={kind: _agreed(kind_parts) for kind, kind_parts in parts.items()},
        norms_all_heads=any(map(_norms_all_heads, map(mixer_of, layers))),
    )


def _norms_all_heads(mixer: Any) -> bool:
    """Return whether a norm of an attention's queries is wider than a head."""
    weight = getattr(getattr(mixer, "q_norm", None), "weight", None)
    return isinstance(weight, torch.Tensor) and weight.shape[0] > getattr(mixer, "head_dim", weight.shape[0])


def _where_layers_are(model: PreTrainedModel) -> str:
    """Return why the layers of a model, which are not at model.layers, cannot be taken over, as the rest of a sentence."""
    config = model.config
    count = getattr(config, "num_hidden_layers", None)
    paths = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(paths) != 1:
        return "has no single list of decoder layers; expected one at model.layers."
    if ".encoder." in paths[0] and getattr(config, "is_decoder", None) is False:
        return "is an encoder, whose tokens read later tokens; expected a decoder."
    return f"has its layers at {paths[0]}; expected a type whose decoder layers are at model.layers."


class _Call(NamedTuple):
    """One call of a module in a recorded pass: its name in the layer, empty for the layer; the first tensors in and out."""

    name: str
    read: torch.Tensor
    output: torch.Tensor


def _recorded_pass(model: Any, layers: nn.ModuleList) -> list[list[_Call]]:
    """Return the calls of each layer and of its children, in the order in which they end, from one pass through a model."""
    passes: list[list[_Call]] = [[] for _ in layers]

    def note(calls: list[_Call], name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        read, first = _first_tensor((*args, *kwargs.values())), _first_tensor(output)
        if read is not None and first is not None:
            calls.append(_Call(name, read, first))

    for calls, layer in zip(passes, layers, strict=True):
        for name, module in (("", layer), *layer.named_children()):
            module.register_forward_hook(partial(note, calls, name), with_kwargs=True)
    model_type = model.config.model_type
    if not passes_on(model, layers, "layers"):
        raise UnknownType(
            f"{model_type!r} does not pass all keyword arguments on to its decoder layers; expected a stack that does."
        )
    shape = (1, _LENGTH, model.config.get_text_config().hidden_size)
    for calls in passes:
        if not calls or calls[-1].name or calls[-1].read.shape != shape or calls[-1].output.shape != shape:
            raise UnknownType(
                f"the residual stream of {model_type!r} is not one tensor [B, T, D]; expected layers that read and return one."
            )
    return passes


def passes_on(model: Any, receivers: Iterable[nn.Module], receivers_name: str) -> bool:
    """Return whether a tiny model passes an argument that it does not know on to some of its modules, which then do not see it.

    Args:
        model: A model on which nothing else runs.
        receivers: Modules that should get the argument.
        receivers_name: What the modules are to the model, for the message.

    Raises:
        UnknownType: If a pass with the argument fails.
    """
    waiting = set(receivers)

    def take(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if kwargs.pop("memory_inputs", None) is not None:
            waiting.discard(module)
        return args, kwargs

    for module in tuple(waiting):
        module.register_forward_pre_hook(take, with_kwargs=True)
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 3 + _LENGTH)[None], use_cache=False, memory_inputs=object())
    except Exception as error:  # models raise whatever their parts raise
        raise UnknownType(
            f"a pass through a tiny model of {model.config.model_type!r} fails with an argument for its {receivers_name} "
            f"({type(error).__name__}: {error})."
        ) from None
    return not waiting


def _parts(layer: nn.Module, calls: list[_Call]) -> LayerParts:
    """Return the parts of one layer, from the recorded calls of the layer and its children."""
    mixer, network = part_name(layer, MIXERS), part_name(layer, FEED_FORWARDS)
    call_of = {call.name: call for call in calls}
    norms = [call for call in calls if "Norm" in type(getattr(layer, call.name, None)).__name__]

    def before(name: str | None) -> str | None:
        return next((norm.name for norm in norms if name in call_of and norm.output is call_of[name].read), None)

    def behind(name: str | None) -> str | None:
        return next((norm.name for norm in norms if name in call_of and norm.read is call_of[name].output), None)

    attention_norm = before(mixer)
    output_norm = behind(mixer)
    mlp_norm = before(network)
    entered = call_of[""].read
    adds = False
    reads = False
    if mixer in call_of:
        added = call_of[output_norm or mixer].output
        following = call_of.get(mlp_norm or network or "")
        adds = following is not None and following.name != "" and torch.equal(following.read, entered + added)
        reads = call_of[attention_norm].read is entered if attention_norm else call_of[mixer].read is entered
    return LayerParts(
        feed_forward=network,
        attention_norm=attention_norm,
        attention_output_norm=output_norm,
        mlp_norm=None if mlp_norm == attention_norm else mlp_norm,
        mlp_output_norm=behind(network),
        adds_mixer=adds,
        reads_norm=reads,
    )


def _agreed(parts: list[LayerParts]) -> LayerParts:
    """Return the parts that all layers agree on; a name on which they do not agree is None, a property false."""
    values = {}
    for field in fields(LayerParts):
        layer_values = {getattr(each, field.name) for each in parts}
        if len(layer_values) == 1:
            values[field.name] = layer_values.pop()
        else:
            values[field.name] = False if True in layer_values else None
    return LayerParts(**values)


def _first_tensor(values: Any) -> torch.Tensor | None:
    if isinstance(values, torch.Tensor):
        return values
    if not isinstance(values, (tuple, list)):
        return None
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


_LENGTH = 7
