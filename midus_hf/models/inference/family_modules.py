"""Modules of the classes that host memory in a type, made from what Transformers builds.

The classes are thin subclasses of the type's own. Their source is one template, filled with names read from a tiny random model. A
module behaves as if it came from a file: its classes are pickled by name, and code that checkpoints carry is written from its source.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import midus_hf.models.families as families
from midus_hf.models.families import HEADS
from midus_hf.models.inference.architecture import Architecture, architecture_of
from midus_hf.models.parts import NamesParts


def host_family(model_type: str) -> ModuleType:
    """Make the classes that host memory in a family, and register them.

    Args:
        model_type: The `model_type` of a causal language model of transformers.

    Returns:
        The module of the classes, `midus_hf.models.families.MODEL_TYPE`.

    Raises:
        ValueError: If the type's layers cannot host memory. The message says why.
    """
    return module_from_source(model_type, family_source(model_type))


def module_from_source(model_type: str, source: str) -> ModuleType:
    """Return a module of classes of a type, `midus_hf.models.families.MODEL_TYPE`, that behaves as if it came from a file.

    Args:
        model_type: The `model_type` whose classes the module has.
        source: Source of the module.
    """
    module_name = f"{families.__name__}.{model_type}"
    loader = _SourceLoader(source)
    spec = importlib.util.spec_from_loader(module_name, loader, origin=loader.path_of(module_name))
    assert spec is not None
    spec.has_location = True  # so the module has a `__file__`, by which Python finds the source of its classes
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    loader.exec_module(module)
    setattr(families, model_type, module)
    return module


def family_source(model_type: str) -> str:
    """Return the source of the classes that host memory in a family.

    Args:
        model_type: The `model_type` of a causal language model of transformers.

    Raises:
        ValueError: If the type's layers cannot host memory. The message says why.
    """
    architecture = architecture_of(model_type)
    family = architecture.causal_lm.__name__.removesuffix("ForCausalLM")
    attention, mlp = architecture.attention, architecture.mlp
    heads = _head_classes(architecture.config)
    own = (*architecture.layers, architecture.stack, architecture.causal_lm, attention, mlp, *heads.values())
    converted = any(map(get_checkpoint_conversion_mapping, (model_type, architecture.causal_lm.__name__)))
    kinds = {layer: _kind(family, layer, architecture) for layer in architecture.layers}
    return _SOURCE.format(
        family=family,
        model_type=model_type,
        config_module=architecture.config.__module__,
        config=architecture.config.__name__,
        modeling=architecture.causal_lm.__module__,
        names="\n".join(f"    {name}," for name in sorted({each.__name__ for each in own if each is not None})),
        attention=_ATTENTION.format(family=family, attention=attention.__name__) if attention else "",
        mlp=_MLP.format(family=family, mlp=mlp.__name__) if mlp else "",
        layers="\n".join(_layer_source(family, kind, layer, architecture) for layer, kind in kinds.items()),
        layer_classes=", ".join(f"Midus{family}{kind}Layer" for kind in kinds.values()),
        block_classes=", ".join(f"Midus{family}{kind}Block" for kind in kinds.values()),
        model=architecture.stack.__name__,
        causal_lm=architecture.causal_lm.__name__,
        shared="from midus_hf.models.listing import share_conversions\n" if converted else "",
        registering=", register_head" if heads else "",
        mixins=_MIXINS.format(names=", ".join(sorted({HEADS[kind][2] for kind in heads}))) if heads else "",
        head_kinds=repr(tuple(heads)).replace("'", '"'),
        heads="".join(
            _HEAD.format(family=family, kind=kind, mixin=HEADS[kind][2], head=head.__name__)
            for kind, head in heads.items()
        ),
        conversions=f"\n\nshare_conversions(Midus{family}ForCausalLM)\n" if converted else "",
    )


def _head_classes(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """Return the classes of a family's task heads, by the kind of head."""
    return {kind: classes[config_class] for kind, (_, classes, _) in HEADS.items() if config_class in classes}


def _kind(family: str, layer: type, architecture: Architecture) -> str:
    """Return the part of a layer class's name that tells it from the other layer classes of its family."""
    return "" if len(architecture.layers) == 1 else layer.__name__.removeprefix(family).removesuffix("DecoderLayer")


def _layer_source(family: str, kind: str, layer: type, architecture: Architecture) -> str:
    """Return the source of the classes that take over layers of one class."""
    parts = architecture.layers[layer]
    names = {name: repr(getattr(parts, name)) for name in _NORMS}
    names |= {"feed_forward_name": repr(parts.feed_forward), "mixer_names": repr(architecture.mixers)}
    differing = {name: value for name, value in names.items() if value != repr(getattr(NamesParts, name))}
    differing = {"family_class": layer.__name__, **differing}
    hosts: dict[str, Any] = {}
    if architecture.attention is not None:
        hosts["attention_class"] = f"Midus{family}Attention"
    if architecture.mlp is not None:
        hosts["mlp_class"] = f"Midus{family}MLP"
    if architecture.some_do_not_rotate:
        hosts["some_do_not_rotate"] = True
    if not parts.adds_mixer:
        hosts["adds_mixer"] = False
    reads = architecture.attention is not None and parts.reads_norm
    return _LAYER.format(
        family=family,
        kind=kind,
        layer=layer.__name__,
        host=_attributes({**differing, **hosts}),
        block=_attributes(
            {**differing, **({"block_attention_class": f"Midus{family}BlockAttention"} if reads else {})}
        ),
    )


def _attributes(values: Mapping[str, Any]) -> str:
    """Return lines that assign attributes of a class."""
    return "".join(f"    {name} = {value}\n" for name, value in values.items()).replace("'", '"')


class _SourceLoader(importlib.abc.InspectLoader):
    """Loader of a module from its source."""

    def __init__(self, source: str):
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str):
        return self.source_to_code(self._source, self.path_of(fullname))

    def path_of(self, fullname: str) -> str:
        """Return the path to show in tracebacks, where no file exists."""
        return f"{families.__path__[0]}/{fullname.rpartition('.')[2]}.py"


_NORMS = ("attention_norm", "attention_output_norm", "mlp_output_norm")

_SOURCE = '''"""{family} with memory."""

from {config_module} import {config}
from {modeling} import (
{names}
)

from midus_hf.models.adapted import Adapted, HostAttention
from midus_hf.models.block import BlockAttention, MemoryBlock
from midus_hf.models.families import register_family{registering}
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.layer import HostLayer
{shared}{mixins}

class Midus{family}Config(MemoryConfig, {config}):
    """`{config}` with a list of memory entries."""

    model_type = "midus_{model_type}"
    memory: list | None = None
    head_kinds = {head_kinds}

{attention}{mlp}
{layers}

class Midus{family}Model(MemoryModel, {model}):
    """`{model}` whose layers host memory."""

    config: Midus{family}Config
    layer_classes = ({layer_classes},)
    block_classes = ({block_classes},)


@register_family
class Midus{family}ForCausalLM(MemoryForCausalLM, {causal_lm}):
    """`{causal_lm}` over a `Midus{family}Model`."""

    config: Midus{family}Config
    model_class = Midus{family}Model
{heads}{conversions}'''

_MIXINS = "from midus_hf.models.task_heads import {names}\n"

_HEAD = '''

@register_head
class Midus{family}{kind}({mixin}, {head}):
    """`{head}` over a `Midus{family}Model`."""

    config: Midus{family}Config
    model_class = Midus{family}Model
'''

_ATTENTION = '''
class Midus{family}Attention(HostAttention, {attention}):
    """`{attention}` in a layer that memories are attached to."""

    family_class = {attention}


class Midus{family}BlockAttention(BlockAttention, {attention}):
    """`{attention}` in a memory block."""

    family_class = {attention}

'''

_MLP = '''
class Midus{family}MLP(Adapted, {mlp}):
    """`{mlp}` in a layer that memories are attached to."""

    family_class = {mlp}

'''

_LAYER = '''class Midus{family}{kind}Layer(HostLayer, {layer}):
    """`{layer}` that memories are attached to."""

{host}

class Midus{family}{kind}Block(MemoryBlock, {layer}):
    """`{layer}` that was inserted for a memory."""

{block}'''
