"""Modules of the classes that host memory in a type, made from its row in the table of types.

The classes are thin subclasses of the type's own. A module behaves as if it came from a file, which the user's cache has: its classes
are pickled by name, and checkpoints carry its source.
"""

import contextlib
import copy
import hashlib
import importlib.abc
import importlib.util
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    modeling_layers,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import midus_hf.models.families as families
from midus_hf.anatomy.types import (
    CompositeType,
    LayerParts,
    ModelType,
    UnknownType,
    installed_version,
    type_of,
    user_cache,
)
from midus_hf.config.errors import RequestError
from midus_hf.files.outputs import write_text
from midus_hf.memories.hosting.parts import LayerNames
from midus_hf.models.families import FAMILIES, HEAD_KINDS

#: Tables of Transformers with the classes of composite models, by the class of their config.
COMPOSITE_MAPPINGS = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)


def host_type(model_type: str, row: ModelType | CompositeType | None = None) -> None:
    """Make `midus_hf.models.families.MODEL_TYPE`, a type's hosting classes, by default from its own row.

    A type that cannot host memory, or whose layers changed, is an `UnknownType`.
    """
    if row is None:
        row = type_of(model_type)
        _check_version(row)
    source = composite_source(row) if isinstance(row, CompositeType) else family_source(row)
    name = f"{families.__name__}.{model_type}"
    loader = _SourceLoader(_write_source(model_type, source), source)
    spec: Any = importlib.util.spec_from_file_location(name, loader=loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    setattr(families, model_type, module)


def _check_version(row: ModelType | CompositeType) -> None:
    """Refuse a type that was not proven with the installed transformers, unless its tensors are equal."""
    if installed_version() in row.transformers:
        return
    proven = f"{row.model_type!r} was proven with transformers {', '.join(row.transformers)}"
    try:
        digest = shapes_digest(row)
    except Exception as error:  # whatever the checks of config classes and models raise, and vLLM in theirs
        raise UnknownType(
            f"{proven}, and a model of it cannot be made here, with {transformers.__version__} ({type(error).__name__}: {error}); "
            "expected one of these versions. If vLLM serves a base in this process, load the model with memory before it."
        ) from error
    if digest not in row.transformers.values():
        raise UnknownType(
            f"{proven}, and has other tensors in {transformers.__version__}; expected one of these versions. Or prove it anew, "
            f"with a checkout of the repository: python -m scripts.anatomy {row.model_type}"
        )


def shapes_digest(row: ModelType | CompositeType) -> str:
    """Return a digest of the names and shapes of a type's tiny model in the installed transformers."""
    config: Any = CONFIG_MAPPING[row.model_type](**copy.deepcopy(dict(row.config)))
    with torch.device("meta"):
        model = _native_class(row)(config)
    shapes = [
        [name, type(model.get_submodule(name.rpartition(".")[0])).__name__, *each.shape]
        for name, each in model.state_dict().items()
    ]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def _native_class(row: ModelType | CompositeType) -> Any:
    config = CONFIG_MAPPING[row.model_type]
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING,) if isinstance(row, ModelType) else COMPOSITE_MAPPINGS
    return next(each[config] for each in mappings if config in each)


def _write_source(model_type: str, source: str) -> str:
    """Write a module's source to the user's cache if the disk allows, and return its path."""
    path = Path(families.__path__[0], f"{model_type}.py")
    cache = user_cache()
    if cache is None:
        return str(path)
    with contextlib.suppress(OSError, RequestError):  # the last if another process writes it now
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        path = cache / "families" / digest / path.name
        if not path.is_file() or path.read_text(encoding="utf-8") != source:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, source)
    return str(path)


class _SourceLoader(importlib.abc.SourceLoader):
    """Loader of a module from its source, with the path of a file that has it too."""

    def __init__(self, path: str, source: str):
        self._path = path
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str | bytes) -> bytes:
        return self._source.encode()


def family_source(row: ModelType) -> str:
    """Return the source of the classes that host memory in a family."""
    family = row.class_name
    config = CONFIG_MAPPING[row.model_type]
    native = _native_class(row)
    modeling = sys.modules[native.__module__]
    causal_lm = native.__name__
    heads = _heads(config)
    hosts: dict[str, Any] = {"attention_class": row.attention_class, "mlp_class": row.mlp_class}
    hosts = {name: value for name, value in hosts.items() if value is not None}
    own = {*row.layers, row.stack, causal_lm, *(head.__name__ for head in heads.values()), *hosts.values()}
    if row.some_do_not_rotate:
        hosts["some_do_not_rotate"] = True
    if row.stacked:
        hosts["stacked"] = dict(row.stacked)
    conversions = _conversions(f"Midus{family}ForCausalLM", row.model_type, causal_lm)
    kinds = {layer: layer.removeprefix(family).removesuffix("DecoderLayer") for layer in row.layers}
    kinds = dict.fromkeys(kinds, "") if len(kinds) == 1 else kinds  # what tells classes of layers apart
    return _SOURCE.format(
        family=family,
        model_type=row.model_type,
        config_module=config.__module__,
        config=config.__name__,
        modeling=native.__module__,
        names="\n".join(f"    {name}," for name in sorted(own)),
        layers="\n".join(
            _layer_source(family, kind, layer, row.layers[layer], row.mixers, hosts) for layer, kind in kinds.items()
        ),
        layer_classes=", ".join(f"Midus{family}{kind}Layer" for kind in kinds.values()),
        block_classes=", ".join(f"Midus{family}{kind}Block" for kind in kinds.values()),
        model=row.stack,
        model_experts=_experts(getattr(modeling, row.stack)),
        causal_lm=causal_lm,
        experts=_experts(native),
        head_kinds=f"    head_kinds = {tuple(heads)}\n".replace("'", '"') if heads else "",
        mixins=", ".join(sorted({"MemoryForCausalLM", *map(_mixin, heads)})),
        heads="".join(
            _HEAD.format(family=family, kind=kind, mixin=_mixin(kind), head=head.__name__, experts=_experts(head))
            for kind, head in heads.items()
        ),
        shared=_SHARED if conversions else "",
        logit_scale=_LOGIT_SCALE if row.model_type == "hyperclovax" else "",
        conversions=conversions,
    )


def _heads(config: Any) -> dict[str, type]:
    """Return the family's task heads by kind: those that are Transformers' general ones."""
    generic = {kind: getattr(modeling_layers, f"Generic{kind}") for kind in HEAD_KINDS}
    tables = {kind: getattr(transformers, f"AutoModel{kind}")._model_mapping for kind in HEAD_KINDS}
    own = {kind: tables[kind][config] for kind in HEAD_KINDS if config in tables[kind]}
    return {kind: head for kind, head in own.items() if isinstance(head, type) and issubclass(head, generic[kind])}


def _mixin(kind: str) -> str:
    return f"Memory{kind if kind == 'ForQuestionAnswering' else 'ForClassification'}"


def _experts(native: Any) -> str:
    """Return the line that gives a class the experts of its native class, if any."""
    line = f"    _can_set_experts_implementation = {native.__name__}._can_set_experts_implementation\n"
    return line if native._can_set_experts_implementation() else ""


def _conversions(name: str, model_type: str, native: str) -> str:
    """Return the line by which a class shares its native class's checkpoint conversions, or ""."""
    converted = any(map(get_checkpoint_conversion_mapping, (model_type, native)))
    return f"\n\nshare_conversions({name})\n" if converted else ""


def _layer_source(
    family: str, kind: str, layer: str, parts: LayerParts, mixers: tuple[str, ...], hosts: dict[str, Any]
) -> str:
    """Return the source of the classes that take over layers of one class; `hosts` is of host layers."""
    names = {name: getattr(parts, name) for name in _NORMS}
    names |= {"feed_forward_name": parts.feed_forward, "mixer_names": mixers}
    block: dict[str, Any] = {name: repr(value) for name, value in names.items() if value != getattr(LayerNames, name)}
    host = block | hosts | ({} if parts.adds_mixer else {"adds_mixer": False})
    if parts.reads_norm and "attention_class" in hosts:
        block["block_attention"] = hosts["attention_class"]
    return _LAYER.format(family=family, kind=kind, layer=layer, host=_attributes(host), block=_attributes(block))


def _attributes(values: Mapping[str, Any]) -> str:
    """Return lines that assign attributes of a class, below an empty line; empty if there are none."""
    lines = "".join(f"    {name} = {value}\n" for name, value in values.items()).replace("'", '"')
    return f"\n{lines}" if lines else ""


def composite_source(row: CompositeType) -> str:
    """Return the source of the classes of a composite model whose language model hosts memory."""
    config = CONFIG_MAPPING[row.model_type]
    composite = _native_class(row)
    if row.language_type not in FAMILIES:
        host_type(row.language_type)
    language: Any = FAMILIES[row.language_type]
    conversions = _conversions(f"Midus{composite.__name__}", row.model_type, composite.__name__)
    arguments: dict[str, Any] = {
        parameter.name: parameter.default
        for parameter in inspect.signature(composite.forward).parameters.values()
        if parameter.name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    arguments |= {name: None for name in _ARGUMENTS_OF_MEMORIES if name not in arguments}
    return _COMPOSITE_SOURCE.format(
        model_type=row.model_type,
        config_module=config.__module__,
        config=config.__name__,
        # Not `Midus{config}`: the language model's config may have that name.
        own_config=f"Midus{composite.__name__}Config",
        modeling=composite.__module__,
        composite=composite.__name__,
        language_module=language.__module__,
        language_config=language.config_class.__name__,
        language_model=language.model_class.__name__,
        path=row.path,
        experts=_experts(composite),
        shared=_SHARED if conversions else "",
        signature="".join(f"        {name}={default!r},\n" for name, default in arguments.items()),
        arguments="".join(f"            {name}={name},\n" for name in arguments),
        conversions=conversions,
    )


_NORMS = ("attention_norm", "attention_output_norm", "mlp_output_norm")
# The import that both templates need where a checkpoint of the type is converted.
_SHARED = "from midus_hf.models.families import share_conversions\n"

_SOURCE = '''"""{family} with memory."""

from {config_module} import {config}
from {modeling} import (
{names}
)

from midus_hf.memories.hosting.layer import HostLayer, MemoryBlock
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import {mixins}
{shared}

class Midus{family}Config(MemoryConfig, {config}):
    """`{config}` with a list of memory entries."""

    model_type = "midus_{model_type}"
    memory: list | None = None
{head_kinds}{logit_scale}

{layers}

class Midus{family}Model(MemoryModel, {model}):
    """`{model}` whose layers host memory."""

    config: Midus{family}Config
    layer_classes = ({layer_classes},)
    block_classes = ({block_classes},)
{model_experts}
{heads}
@register_family
class Midus{family}ForCausalLM(MemoryForCausalLM, {causal_lm}):
    """`{causal_lm}` over a `Midus{family}Model`."""

    config: Midus{family}Config
    model_class = Midus{family}Model
{experts}{conversions}'''
_HEAD = '''
class Midus{family}{kind}({mixin}, {head}):
    """`{head}` over a `Midus{family}Model`."""

    config: Midus{family}Config
    model_class = Midus{family}Model
{experts}
'''
# TRL's fused losses take `logits_scaling` of any type but `hyperclovax` for a divisor, and read `logit_scale` first.
_LOGIT_SCALE = '''
    @property
    def logit_scale(self) -> float:
        """Return what the logits are multiplied by."""
        return self.logits_scaling
'''

_LAYER = '''class Midus{family}{kind}Layer(HostLayer, {layer}):
    """`{layer}` that memories are attached to."""
{host}

class Midus{family}{kind}Block(MemoryBlock, {layer}):
    """`{layer}` that was inserted for a memory."""
{block}'''
# The older name of the cache, and arguments of memories, which the signature of a forward names.
_ARGUMENTS_OF_MEMORIES = ("past_key_values", "output_router_logits", "token_mask", "memory_ids")

_COMPOSITE_SOURCE = '''"""{composite} with memory in its language model."""

from {config_module} import {config}
from {modeling} import {composite}

from {language_module} import {language_config}, {language_model}
{shared}from midus_hf.models.language_model import CompositeMemoryConfig, MemoryForConditionalGeneration
from midus_hf.models.families import register_composite_family


class {own_config}(CompositeMemoryConfig, {config}):
    """`{config}` whose language model has a list of memory entries."""

    model_type = "midus_{model_type}"
    language_config_class = {language_config}
    composite_class_name = "Midus{composite}"


@register_composite_family
class Midus{composite}(MemoryForConditionalGeneration, {composite}):
    """`{composite}` whose language model is a `{language_model}`."""

    config: {own_config}
    model_class = {language_model}
    stack_path = "{path}"
{experts}
    def forward(
        self,
{signature}        **kwargs,
    ):
        """Run the family's forward; arguments are passed on by name."""
        return super().forward(
{arguments}            **kwargs,
        )
{conversions}'''
