"""Families that host memory. The classes of each family are made from a model of the family that transformers builds.

A family's memory classes are thin subclasses of the family's own. Their source is one template, filled with names read from the
built model. Each family's source becomes a module, such as `midus_hf.models.families.llama`, that behaves as if it came from a
file: its classes are pickled by name, and code that checkpoints carry is written from its source.
"""

import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

#: Language models that host memory, by the `model_type` of their family.
FAMILIES: dict[str, type[PreTrainedModel]] = {}


def register_family(causal_lm_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Register a language model under the `model_type` of the config class that the model's config extends."""
    FAMILIES[base_config_class(causal_lm_class.config_class).model_type] = causal_lm_class
    return causal_lm_class


def base_config_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the family's own config class, which a config that hosts memory extends."""
    own_type = config_class.model_type
    return next(
        parent
        for parent in config_class.__mro__
        if issubclass(parent, PreTrainedConfig) and parent.model_type not in ("", own_type)
    )


def host_family(model_type: str) -> ModuleType:
    """Make the classes that host memory in a family, and register them.

    Only the parts of a layer are checked, not its forward pass. Layers that scale their additions to the residual stream, such as
    Granite's, need classes written by hand. `upscale` detects these layers, since it compares logits.

    Args:
        model_type: The `model_type` of a causal language model of transformers, whose layers have `self_attn`, `mlp` and the norms
            of Llama, Gemma 2 or OLMo 2.

    Returns:
        The module of the classes, `midus_hf.models.families.MODEL_TYPE`.

    Raises:
        ValueError: If the layers have other parts.
    """
    module_name = f"{__name__}.{model_type}"
    loader = _SourceLoader(family_source(model_type))
    spec = importlib.util.spec_from_loader(module_name, loader, origin=loader.path_of(module_name))
    assert spec is not None
    spec.has_location = True  # so the module has a `__file__`, by which Python finds the source of its classes
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    loader.exec_module(module)
    setattr(sys.modules[__name__], model_type, module)
    return module


def family_source(model_type: str) -> str:
    """Return the source of the classes that host memory in a family, with the argument of `host_family`.

    Raises:
        ValueError: If the layers of the family have other parts than `host_family` takes.
    """
    config_class = CONFIG_MAPPING[model_type]
    causal_lm_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    assert isinstance(causal_lm_class, type)
    with torch.device("meta"):
        model: Any = causal_lm_class(config_class(num_hidden_layers=1))
    layers = getattr(getattr(model, "model", None), "layers", [None])
    parts = frozenset(name for name, _ in layers[0].named_children()) if layers[0] is not None else frozenset()
    norms = parts - {"self_attn", "mlp"}
    if norms not in _ROLES_OF_NORMS or len(parts) != len(norms) + 2:
        known = "; ".join(", ".join(sorted(names)) for names in _ROLES_OF_NORMS)
        raise ValueError(
            f"layers of {model_type!r} at model.layers have {', '.join(sorted(parts)) or 'no parts'}; expected self_attn, mlp and "
            f"one of these sets of norms: {known}. Write the classes of the family by hand, and enter them with register_family."
        )
    layer = layers[0]
    attention, mlp = type(layer.self_attn).__name__, type(layer.mlp).__name__
    names = sorted([attention, mlp, type(layer).__name__, type(model.model).__name__, causal_lm_class.__name__])
    return _SOURCE.format(
        family=causal_lm_class.__name__.removesuffix("ForCausalLM"),
        model_type=model_type,
        config_module=config_class.__module__,
        config=config_class.__name__,
        modeling=causal_lm_class.__module__,
        names="\n".join(f"    {name}," for name in names),
        attention=attention,
        mlp=mlp,
        layer=type(layer).__name__,
        model=type(model.model).__name__,
        causal_lm=causal_lm_class.__name__,
        roles="".join(f"    {role} = {name!r}\n" for role, name in _ROLES_OF_NORMS[norms].items()).replace("'", '"'),
    )


class _SourceLoader(importlib.abc.InspectLoader):
    """Loader of a module from its source.

    Args:
        source: The module's source code.
    """

    def __init__(self, source: str):
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str):
        return self.source_to_code(self._source, self.path_of(fullname))

    def path_of(self, fullname: str) -> str:
        """Return the path to show in tracebacks, where no file exists."""
        return f"{__file__.removesuffix('.py')}/{fullname.rpartition('.')[2]}.py"


# For each set of norms that a layer may have, the names of norms that differ from Llama's, by their role in
# `NamesNorms`.
_ROLES_OF_NORMS: dict[frozenset[str], dict[str, str | None]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): {},
    frozenset(
        {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
    ): {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): {
        "attention_norm": None,
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": None,
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}

_SOURCE = '''"""{family} with memory."""

from {config_module} import {config}
from {modeling} import (
{names}
)

from midus_hf.models.adapted import Adapted, HostAttention
from midus_hf.models.block import BlockAttention, MemoryBlock
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.layer import HostLayer


class Midus{family}Config(MemoryConfig, {config}):
    """`{config}` with a list of memory entries."""

    model_type = "midus_{model_type}"
    memory: list | None = None


class Midus{family}Attention(HostAttention, {attention}):
    """`{attention}` in a layer that memories are attached to."""

    family_class = {attention}


class Midus{family}MLP(Adapted, {mlp}):
    """`{mlp}` in a layer that memories are attached to."""

    family_class = {mlp}


class Midus{family}Layer(HostLayer, {layer}):
    """`{layer}` that memories are attached to."""

{roles}    attention_class = Midus{family}Attention
    mlp_class = Midus{family}MLP


class Midus{family}BlockAttention(BlockAttention, {attention}):
    """`{attention}` in a memory block."""


class Midus{family}Block(MemoryBlock, {layer}):
    """`{layer}` that was inserted for a memory."""

{roles}    block_attention_class = Midus{family}BlockAttention


class Midus{family}Model(MemoryModel, {model}):
    """`{model}` whose layers host memory."""

    config: Midus{family}Config
    layer_class = Midus{family}Layer
    block_class = Midus{family}Block


@register_family
class Midus{family}ForCausalLM(MemoryForCausalLM, {causal_lm}):
    """`{causal_lm}` over a `Midus{family}Model`."""

    config: Midus{family}Config
    model_class = Midus{family}Model
'''

for _model_type in ("gemma2", "gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3"):
    host_family(_model_type)
