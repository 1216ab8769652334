"""Model types of Transformers that were proven to host memory: their parts and memories. No torch.

`types.json` has an entry for each type, which `python -m scripts.anatomy` reads from a tiny random model and proves; others are
refused: equality with the base at the start shows nothing of what a trained memory computes.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from midus_hf.config.errors import RequestError

MEMORY_PREFIX = "midus_"

#: Types with all methods, whose layouts are written down too, so that their checkpoints are planned without torch.
MAIN_TYPES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "olmo2")

#: Types of memory that are proven one by one, by their site inside a part of a layer. At other sites all are wired alike.
INSIDE = {
    "inside-attention": ("hier-lora-qk", "hier-lora-vo", "hier-kv", "moda"),
    "inside-ffn": ("hier-lora-ffn",),
}
#: What is proven of a type: sites, and types of memory inside a part.
WIRINGS = (
    "beside-ffn",
    "skip",
    "behind-attention",
    "behind-layer",
    "inserted",
    *INSIDE["inside-attention"],
    *INSIDE["inside-ffn"],
)

FILE = Path(__file__).with_name("types.json")


class UnknownType(RequestError):
    """A model type that cannot host memory, or that was not proven; the message says why, and what to do."""


@dataclass(frozen=True)
class LayerParts:
    """Names of the parts of a class of decoder layers, None for absent ones, and the stream between."""

    feed_forward: str | None  #: dense or of experts
    attention_norm: str | None  #: before the mixer; None if the mixer reads the residual stream itself
    attention_output_norm: str | None
    mlp_norm: str | None  #: None also if it is `attention_norm`
    mlp_output_norm: str | None
    #: Whether the mixer is followed by the sum of its (normalised) output and the layer's input, bit for bit.
    adds_mixer: bool
    reads_norm: bool  #: whether the mixer reads only the layer's input or the output of `attention_norm`


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """A causal language model of Transformers that hosts memory."""

    model_type: str
    class_name: str  #: middle part of the names of the classes that host memory, `Midus{class_name}ForCausalLM`
    stack: str  #: name of the class of the stack of layers
    layers: Mapping[str, LayerParts]  #: by the name of their class, in the order in which the classes first occur
    mixers: tuple[str, ...]  #: names of the children of layers that mix tokens
    attention_class: str | None  #: of all attentions whose heads memories read; None if there are several, or none
    mlp_class: str | None  #: of all gated feed-forward networks; None if there are several, or none
    some_do_not_rotate: bool  #: queries and keys
    norms_all_heads: bool  #: whether norms of queries and keys are over all heads together
    #: Roles of projections that a linear module stacks, in order, by `"LlamaMLP.gate_up_proj"`; none if in an unknown order.
    stacked: Mapping[str, tuple[str, ...]]
    wirings: tuple[str, ...]  #: what was proven, of `WIRINGS`
    refused: Mapping[str, str]  #: why the others are refused, by wiring
    config: Mapping[str, Any]  #: sizes of the tiny model that was proven
    transformers: Mapping[str, str]  #: digest of its tensors' names and shapes, by version of Transformers, `"5.24"`
    #: Of `MAIN_TYPES`: keys of the config and tensors of a model.
    layout: Mapping[str, Any] = field(default_factory=dict)

    def refusal(self, site: str, memory_type: str) -> str | None:
        """Return why a type of memory does not work at a site; None if it does.

        At a site inside a part, a type of memory that was not proven there needs all proofs of the site.
        """
        inside = INSIDE.get(site, (site,))
        needed = (memory_type,) if memory_type in inside else inside
        return next((self.refused[wiring] for wiring in needed if wiring not in self.wirings), None)


@dataclass(frozen=True, kw_only=True)
class CompositeType:
    """A composite model, such as one that reads images, whose language model hosts memory (`ModelType`)."""

    model_type: str
    language_type: str  #: `model_type` of the language model
    path: str  #: name of the module of the language model's stack of layers
    config: Mapping[str, Any]
    transformers: Mapping[str, str]


@cache
def type_of(model_type: str) -> ModelType | CompositeType:
    """Return a causal or composite type, by `model_type` or that of memory, or raise `UnknownType`."""
    model_type = model_type.removeprefix(MEMORY_PREFIX)
    row = _rows().get(model_type)
    if isinstance(row, str):
        raise UnknownType(f"{model_type!r} {row}")
    if row is None:
        raise UnknownType(
            f"{model_type!r} is not among the {len(listed_types())} types that were read and proven; expected one of these "
            "(docs/families.md). Do not rename the type: as another type the model may load and still be a different model. A "
            f"checkout of the repository proves it, with a transformers that has it: python -m scripts.anatomy {model_type}"
        )
    if "language_type" in row:
        return CompositeType(model_type=model_type, **row)
    values = {**_EMPTY, **row}  # rows leave out values that are false or empty
    values.pop("tables", None)  # in rows that earlier versions proved
    values["layers"] = {name: LayerParts(**parts) for name, parts in row["layers"].items()}
    values["stacked"] = {name: tuple(roles) for name, roles in values["stacked"].items()}
    return ModelType(model_type=model_type, **values | {key: tuple(values[key]) for key in ("mixers", "wirings")})


def model_type_of(model_type: str) -> ModelType:
    """Return a causal type, by its `model_type` or that with memory, or raise `UnknownType`."""
    row = type_of(model_type)
    if isinstance(row, ModelType):
        return row
    raise UnknownType(f"{model_type!r} is a composite model; expected its language model, {row.language_type!r}.")


def is_listed(model_type: str) -> bool:
    """Return whether a type has a row, with which its classes can be made."""
    return isinstance(_rows().get(model_type), dict)


def listed_types() -> list[str]:
    """Return the causal types that host memory, in alphabetical order."""
    return sorted(name for name, row in _rows().items() if isinstance(row, dict) and "language_type" not in row)


_EMPTY: Mapping[str, Any] = {
    "attention_class": None,
    "mlp_class": None,
    "some_do_not_rotate": False,
    "norms_all_heads": False,
    "stacked": {},
    "wirings": (),
    "refused": {},
}


@cache
def _rows() -> Mapping[str, Any]:
    """Return entries by type, of the file or proven by the user; a text says why a type hosts no memory."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    cache = user_cache()
    for path in [] if cache is None else sorted((cache / "types").glob("*.json")):
        try:
            listed = rows.get(path.stem)
            own = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise RequestError(f"{path} is not JSON; expected what scripts.anatomy wrote. Delete it.") from None
        if not isinstance(listed, dict) or installed_version() not in listed["transformers"]:
            rows[path.stem] = own
    return rows


def installed_version() -> str:
    """Return the version of the installed transformers, such as `"5.24"`."""
    return ".".join(version("transformers").split(".")[:2])


def user_cache() -> Path | None:
    """Return `~/.cache/midus_hf`, with rows that the user proved in `types`; None for a user without a home."""
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches, "midus_hf")
    caches = os.path.expanduser("~/.cache/midus_hf")
    return None if caches.startswith("~") else Path(caches)
