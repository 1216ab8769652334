"""Layouts of the main types, read from models on the meta device: keys of the config, and tensors with their roles."""

from dataclasses import fields
from typing import Any, get_args, get_origin

from transformers import CONFIG_MAPPING

from midus_hf.anatomy.types import ModelType
from upscalers.architecture.built_layout import read_layout
from upscalers.architecture.layout import layout_from

#: A model all of whose sizes differ, so that a size identifies its name.
_SIZES = {
    "vocab_size": 131,
    "hidden_size": 44,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 18,
}
_DIMENSIONS = {_SIZES[name]: name for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
_DIMENSIONS |= {4 * 18: "queries", 2 * 18: "keys"}


def written_layout(row: ModelType) -> dict[str, Any]:
    """Return the layout of a main type, as `known_layout` of `upscalers/architecture/layout.py` reads it."""
    config_class = CONFIG_MAPPING[row.model_type]
    own = [field for field in fields(config_class) if field.name in vars(config_class)["__annotations__"]]
    flags = [field.name for field in own if field.name.endswith("_bias")]

    def read(**changes: bool) -> Any:
        off = dict.fromkeys((*flags, "tie_word_embeddings"), False)
        native = {"model_type": row.model_type, **_SIZES, **off, **changes}
        return layout_from(native, **read_layout(native, row))

    def dimensions(shape: tuple[int, ...]) -> list[str]:
        return [_DIMENSIONS[size] for size in shape]

    whole = read(**dict.fromkeys(flags, True))
    without = {flag: read(**dict.fromkeys(flags, True) | {flag: False}) for flag in flags}
    assert (
        whole.layers[0] == whole.layers[1] and not whole.buffers and not whole.expert_layers and not whole.is_converted
    )
    layer = {}
    for name, tensor in whole.layers[0].items():
        assert tensor.parts is None
        condition = next((flag for flag in flags if name not in without[flag].layers[0]), None)
        layer[name] = [tensor.role, dimensions(tensor.shape), tensor.offset, condition]
    return {
        "keys": {field.name: [field.default, *_names_of(field.type)] for field in own},
        "outer": {name: dimensions(shape) for name, shape in whole.outer.items()},
        "tied": sorted(read(tie_word_embeddings=True).tied),
        "layer": layer,
    }


def _names_of(hint: Any) -> list[str]:
    """Return the names of the types that a key of a config takes."""
    return sorted((get_origin(kind) or kind).__name__ for kind in get_args(hint) or (hint,))
