"""The base checkpoint: its config, its family, and the position of each of its tensors."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from midus_hf.anatomy.record import LANGUAGE_KEY
from midus_hf.anatomy.types import ModelType
from midus_hf.config.errors import RequestError, first_few
from midus_hf.files.checkpoint_files import ADAPTER_CONFIG, CONFIG_FILE, read_json
from midus_hf.files.outputs import write_text
from midus_hf.sources.names import MERGE_ADAPTER, gguf_refusal
from upscalers.architecture.layer_tensors import Config, Layout, Shape, check_lists, family_of
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.composite_model import CompositeModel, composite_model_of
from upscalers.checkpoint.safetensors_format import (
    INTEGER_NAMES,
    SAFETENSORS_NAMES,
    TORCH_NAMES,
    StoredTensor,
    most_common_dtype,
    stored_tensors,
)

_PREFIX = "model."
_EMBEDDING = "embed_tokens.weight"
_LAYER_KEY = re.compile(r"^(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]*)\.(?P<rest>.+)$")
# Layers after the last predict further tokens; transformers does not load them.
_PREDICTING = "num_nextn_predict_layers"
# Heads of Transformers' general classes for tasks (`transformers.modeling_layers`).
_TASK_HEADS = ("score.weight", "qa_outputs.weight")
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class BaseCheckpoint:
    """An opened checkpoint: its config, its family, and the position of each of its tensors."""

    folder: Path
    config: Config
    family: ModelType
    layout: Layout
    tensors: dict[str, StoredTensor]  # by the names that they have in a separate language model
    unexpected: tuple[str, ...] = ()  # stored, but not part of the architecture; copied to the result
    composite: CompositeModel | None = None
    prefix: str = _PREFIX
    tied_head: str | None = None  # the head, if the embedding is stored only under its name
    #: Of a composite model's tensors outside the language model, by full name; they are copied.
    outer_shapes: Mapping[str, Shape] = field(default_factory=dict)
    hub_id: str | None = None  # of a base on the hub, whose folder is in a cache

    @property
    def label(self) -> str:
        """Name in messages: a hub id, or the folder."""
        return self.hub_id or str(self.folder)

    @property
    def num_layers(self) -> int:
        return self.config["num_hidden_layers"]

    @cached_property
    def dtype(self) -> str:
        return most_common_dtype(self.tensors.values())

    @cached_property
    def layer_names(self) -> list[dict[str, str]]:
        layers: list[dict[str, str]] = [{} for _ in range(self.num_layers)]
        for name in self.tensors:
            match = _LAYER_KEY.match(name)
            if match and name.startswith(f"{self.prefix}layers.") and int(match["layer"]) < self.num_layers:
                layers[int(match["layer"])][match["rest"]] = name
        return layers

    def outer_names(self, num_layers: int) -> dict[str, str]:
        """Return names of tensors outside the layers in a model of `num_layers` layers, by their names here."""
        within = {name for layer in self.layer_names for name in layer.values()}
        names = {name: name for name in self.tensors if name not in within}
        for name in names:
            match = _LAYER_KEY.match(name)
            if match and name.startswith(f"{self.prefix}layers."):
                names[name] = self.new_name(int(match["layer"]) - self.num_layers + num_layers, match["rest"])
        return names

    @cached_property
    def repeated_names(self) -> frozenset[str]:
        """Names of tied heads that repeat the embedding; transformers does not tie different values."""
        return frozenset(
            name
            for name in self.layout.tied
            if name in self.tensors and self.tensors[name].has_same_bytes(self.tensors[self.embedding_name])
        )

    @property
    def embedding_name(self) -> str:
        return f"{self.prefix}{_EMBEDDING}"

    @cached_property
    def uncounted_names(self) -> set[str]:
        """Names of tensors that do not count as parameters: tied heads, buffers, and unexpected tensors."""
        buffers = {self.prefix + name.removeprefix(_PREFIX) for name in self.layout.buffers}
        return {*self.repeated_names, *self.unexpected, *buffers}

    @property
    def weight_names(self) -> dict[str, str]:
        """Name in digests (without `model.`) of each weight that transformers saves, by stored name."""
        left_out = {*self.repeated_names, *self.unexpected}
        return {name: name.removeprefix(self.prefix) for name in self.tensors if name not in left_out}

    @property
    def auto_class(self) -> str:
        return "AutoModelForCausalLM" if self.composite is None else self.composite.auto_class

    def whole_config(self, config: Config) -> Config:
        """Return the content of `config.json`: a language model's within the composite model's, if any."""
        return config if self.composite is None else self.composite.wrapped(config)

    def stored_name(self, name: str) -> str:
        """Return a tensor's stored name in this model, or in a model made from it."""
        if self.tied_head is not None and name == self.embedding_name:
            name = self.tied_head
        return name if self.composite is None else self.composite.names.stored_name(name)

    def by_name(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        named = dict(stored)
        if self.composite is not None:
            named = {self.composite.names.language_name(name): tensor for name, tensor in stored.items()}
        return {self.embedding_name if name == self.tied_head else name: tensor for name, tensor in named.items()}

    def new_name(self, layer: int, name: str) -> str:
        return f"{self.prefix}layers.{layer}.{name}"


def read_config(path: Path) -> Config:
    """Read the `config.json` of a folder, or a config of any name, which must be a JSON object."""
    if path.is_dir():
        folder = path
        path = path / CONFIG_FILE
        if not path.is_file():
            raise RequestError(f"{folder} has no config.json{_describe_folder(folder)}")
    config = read_json(path)
    if not isinstance(config, dict):
        raise RequestError(f"{path} holds a {type(config).__name__}; expected a JSON object.")
    return config


def _describe_folder(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        return f", but a PEFT adapter (adapter_config.json); expected a whole model. {MERGE_ADAPTER}"
    ggufs = sorted(folder.glob("*.gguf"))
    return f", but {gguf_refusal(ggufs[0])}" if ggufs else "; expected a Hugging Face checkpoint folder or a hub id."


def write_config(folder: Path, config: Config) -> None:
    """Write `config.json`, whole or not at all."""
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def open_base(folder: Path, needs_weights: bool = True, hub_id: str | None = None) -> BaseCheckpoint:
    """Open a checkpoint's folder; refuse what is missing, contradictory, or cannot be upscaled."""
    config = read_config(folder)
    composite = None
    if isinstance(config.get(LANGUAGE_KEY), dict) and isinstance(config.get("model_type"), str):
        composite = composite_model_of(config)
    family = family_of(config) if composite is None else family_of(composite.language_config, config)
    if composite is not None:
        config = composite.language_config
    if (folder / ADAPTER_CONFIG).is_file():
        raise RequestError(
            "the base holds a PEFT adapter (adapter_config.json), which transformers would load with the result; "
            f"expected only a model. {MERGE_ADAPTER} Or remove the file."
        )
    stored = stored_tensors(folder, needs_weights)
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
        raise RequestError(
            f"config.json has num_hidden_layers = {layers!r}; expected an integer from 1 to {MOST_LAYERS}."
        )
    layout = layout_of(config)
    outside = dict[str, Shape]()
    expected = layout.outer | {
        f"{_PREFIX}layers.{layer}.{name}": tensor.shape
        for layer, tensors in enumerate(layout.layers)
        for name, tensor in tensors.items()
    }
    if composite is not None:
        composite = composite.with_stored_names(stored or ())
        outside = dict(composite.names.others)
        expected |= outside
    if stored is None:
        named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        dtype = SAFETENSORS_NAMES.get(named, "F32")
        planned = {name: StoredTensor(dtype, shape) for name, shape in expected.items()}
        return BaseCheckpoint(
            folder, config, family, layout, planned, composite=composite, outer_shapes=outside, hub_id=hub_id
        )

    if composite is not None:
        stored = {composite.names.language_name(name): tensor for name, tensor in stored.items()}
    if (task_head := next((name for name in stored if name in _TASK_HEADS), None)) is not None:
        raise RequestError(
            f"the checkpoint has {task_head}, the head of a classifier, reward or question-answering model, which the result would "
            "lack; expected a language model. Upscale the language model, and load the result with "
            "AutoModelForSequenceClassification or a similar class."
        )
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in stored) else ""
    integers = layout.integers
    tied_head = None
    if not prefix:
        expected = {name.removeprefix(_PREFIX): shape for name, shape in expected.items()}
        integers = {name.removeprefix(_PREFIX): dtype for name, dtype in integers.items()}
    embedding = f"{prefix}{_EMBEDDING}"
    if embedding in expected and embedding not in stored:
        # Where duplicates were removed, only the head may be left; transformers ties the embedding to it.
        held = (name for name, shape in layout.tied.items() if name in stored and shape == expected[embedding])
        tied_head = next(held, None)
        stored = {embedding if name == tied_head else name: tensor for name, tensor in stored.items()}
    if missing := [name for name in expected if name not in stored]:
        check_lists(config)
        raise RequestError(
            f"the base lacks {len(missing)} tensors that its config requires, {first_few(missing)}. Download or save it again, or "
            f"correct config.json, which has num_hidden_layers = {layers}."
        )
    expected |= {name: shape for name, shape in layout.tied.items() if name in stored}
    unexpected = _check_tensors(stored, expected, outside.keys(), integers, config)
    found = (unexpected, composite, prefix, tied_head, outside, hub_id)
    return BaseCheckpoint(folder, config, family, layout, stored, *found)


def _check_tensors(
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, Shape],
    outside: Collection[str],
    integers: Mapping[str, str],
    config: Config,
) -> tuple[str, ...]:
    """Refuse shapes and dtypes that the config does not expect; return names of other tensors."""
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise RequestError(
                f"{name} is {list(stored[name].shape)} in the base; expected {list(shape)} by its config. "
                "Weights and config.json do not belong together."
            )
        form = stored[name].dtype
        is_readable = form in TORCH_NAMES or (name in integers and INTEGER_NAMES.get(form) == integers[name])
        if not is_readable and name not in outside:
            wanted = integers.get(name, "float32, float16 or bfloat16")
            raise RequestError(
                f"{name} is stored as {form}; expected {wanted} weights. Start from the unquantised checkpoint."
            )
    unexpected = tuple(name for name in stored if name not in expected)
    layers = config["num_hidden_layers"]
    predicting = config.get(_PREDICTING) or 0
    for name in unexpected:
        if (match := _LAYER_KEY.match(name)) and int(match["layer"]) >= layers + predicting:
            also = f" and {_PREDICTING} = {predicting}" if predicting else ""
            raise RequestError(
                f"the base holds {name}, but config.json has num_hidden_layers = {layers}{also}. "
                "Weights and config.json do not belong together."
            )
    return unexpected
