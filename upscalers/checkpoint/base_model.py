"""The base checkpoint: its config, its family, and the position of each of its tensors."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from midus_hf.config.memory_entries import Memories
from midus_hf.files.checkpoint_files import INDEX_FILE, SINGLE_FILE
from midus_hf.files.json_text import parse_json
from upscalers.architecture.families import Config, Family, LayerTensor, family_of
from upscalers.architecture.layer_tensors import expected_layer, expected_outer, memories_of
from upscalers.checkpoint.safetensors_format import (
    INTEGER_NAMES,
    SAFETENSORS_NAMES,
    TORCH_NAMES,
    StoredTensor,
    dtype_of_most,
    holds_the_same,
    read_header,
)
from upscalers.checkpoint.tokenizer import has_tokenizer
from upscalers.request.errors import RequestError

_PREFIX = "model."
_LAYER_KEY = re.compile(r"^(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]*)\.(?P<rest>.+)$")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MOST_LAYERS = 10_000
_LISTED = 3


@dataclass(frozen=True)
class BaseModel:
    """A checkpoint as upscaling sees it.

    Args:
        folder: Folder of the checkpoint.
        config: The raw `config.json`.
        family: The family that the model belongs to.
        tensors: Every tensor, by full name. If the folder has no weights, the tensors are planned from the config and
            have no files.
        unexpected: Names of stored tensors that the architecture does not have; they are copied to the result.
    """

    folder: Path
    config: Config
    family: Family
    tensors: dict[str, StoredTensor]
    unexpected: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return self.config["num_hidden_layers"]

    @cached_property
    def prefix(self) -> str:
        """Prefix of `layers.` in tensor names: `"model."` or nothing."""
        return _PREFIX if any(name.startswith(_PREFIX) for name in self.tensors) else ""

    @cached_property
    def dtype(self) -> str:
        """The dtype of most weights by bytes, as safetensors names it."""
        return dtype_of_most(self.tensors.values())

    @cached_property
    def memories(self) -> Memories:
        """The memories that earlier upscalings gave the model."""
        return memories_of(self.family, self.config)

    @cached_property
    def _names_by_layer(self) -> list[dict[str, str]]:
        layers: list[dict[str, str]] = [{} for _ in range(self.num_layers)]
        for name in self.tensors:
            match = _LAYER_KEY.match(name)
            if match and name.startswith(f"{self.prefix}layers.") and int(match["layer"]) < self.num_layers:
                layers[int(match["layer"])][match["rest"]] = name
        return layers

    def layer_names(self, layer: int) -> dict[str, str]:
        """Return the full names of a layer's tensors, by their name within the layer."""
        return self._names_by_layer[layer]

    def outer_names(self) -> Iterator[str]:
        """Return the names of the tensors that belong to no layer, in the order in which they are stored."""
        own = {name for layer in self._names_by_layer for name in layer.values()}
        return (name for name in self.tensors if name not in own)

    @cached_property
    def repeated_names(self) -> frozenset[str]:
        """Names of tensors that only repeat others: a stored head that is tied to the embedding and equals its bytes.

        A stored head with other values is a parameter in its own right even if the config ties it: transformers does
        not tie it.
        """
        embedding = f"{self.prefix}embed_tokens.weight"
        return frozenset(
            name
            for name in self.family.tied_tensors(self.config)
            if name in self.tensors and holds_the_same(self.tensors[name], self.tensors[embedding])
        )

    def uncounted_names(self) -> set[str]:
        """Return the names of tensors that do not count as parameters: tied heads, buffers, and unexpected tensors."""
        layers = range(self.num_layers)
        buffers = {self.new_name(layer, name) for layer in layers for name in self.memories.buffers(layer)}
        buffers |= {self.prefix + name for name in self.memories.table_buffers()}
        return {*self.repeated_names, *self.unexpected, *buffers}

    def layer_tensors(self, layer: int) -> dict[str, LayerTensor]:
        """Return roles and shapes of a layer's tensors, by their name within the layer."""
        return expected_layer(self.family, self.config, self.memories, layer)

    def new_name(self, layer: int, name: str) -> str:
        """Return the full name of a tensor of output layer `layer`."""
        return f"{self.prefix}layers.{layer}.{name}"


def read_config(folder: Path) -> Config:
    """Read `config.json`.

    Raises:
        RequestError: If the file is missing, or is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise RequestError(
            f"{folder} has no config.json; expected a Hugging Face checkpoint folder, a hub id or a .gguf file."
        )
    return read_config_file(path)


def read_config_file(path: Path) -> Config:
    """Read a config from a file of any name.

    Raises:
        RequestError: If the file cannot be read, or is no JSON object.
    """
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}. Give another file.") from None
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}). Repair or download it again.") from None
    if not isinstance(config, dict):
        raise RequestError(f"{path} holds a {type(config).__name__}; expected a JSON object.")
    return config


def open_base(folder: Path, needs_weights: bool = True) -> BaseModel:
    """Open a checkpoint folder and check that the checkpoint is complete.

    Args:
        folder: Folder of a Hugging Face checkpoint.
        needs_weights: Whether to refuse a folder without weights. Default: True.

    Raises:
        RequestError: If the base cannot be upscaled. The message says why and what helps.
    """
    config = read_config(folder)
    family = family_of(config)
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= MOST_LAYERS:
        raise RequestError(
            f"config.json has num_hidden_layers = {layers!r}; expected an integer from 1 to {MOST_LAYERS}."
        )
    dtype = config["dtype"] if config.get("dtype") is not None else config.get("torch_dtype")
    if not isinstance(dtype, str | None):
        raise RequestError(f"config.json has dtype = {dtype!r}; expected a name such as 'bfloat16'.")
    if (folder / "adapter_config.json").is_file():
        raise RequestError(
            "the base holds a PEFT adapter (adapter_config.json), which transformers would add when it loads the result; "
            "expected a model alone. Merge the adapter (merge_and_unload) and save the model, or remove the file."
        )
    expected, integers = _expected_tensors(family, config), _stored_as_integers(family, config)
    stored = _stored_tensors(folder, needs_weights)
    if stored is None:
        dtype = SAFETENSORS_NAMES.get(str(dtype).removeprefix("torch."), "F32")
        planned = {name: StoredTensor(dtype, shape) for name, shape in expected.items()}
        return BaseModel(folder, config, family, planned)

    if not any(name.startswith(_PREFIX) for name in stored):
        expected = {name.removeprefix(_PREFIX): shape for name, shape in expected.items()}
        integers = {name.removeprefix(_PREFIX): dtype for name, dtype in integers.items()}
    missing = [name for name in expected if name not in stored]
    if missing:
        raise RequestError(
            f"the base lacks {len(missing)} tensors that its config asks for, such as {', '.join(missing[:_LISTED])}. "
            "Download or save it again, or correct config.json."
        )
    expected |= {name: shape for name, shape in family.tied_tensors(config).items() if name in stored}
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise RequestError(
                f"{name} is {list(stored[name].shape)} in the base; expected {list(shape)} by its config. "
                "Weights and config.json do not belong together."
            )
        if stored[name].dtype not in TORCH_NAMES and INTEGER_NAMES.get(stored[name].dtype) != integers.get(name):
            raise RequestError(
                f"{name} is stored as {stored[name].dtype}; expected float32, float16 or bfloat16 weights. "
                "Start from the unquantised checkpoint."
            )
    unexpected = tuple(name for name in stored if name not in expected)
    beyond = next(
        (name for name in unexpected if (match := _LAYER_KEY.match(name)) and int(match["layer"]) >= layers), None
    )
    if beyond:
        raise RequestError(
            f"the base holds {beyond}, but config.json has num_hidden_layers = {layers}. "
            "Weights and config.json do not belong together."
        )
    return BaseModel(folder, config, family, stored, unexpected)


def _expected_tensors(family: Family, config: Config) -> dict[str, tuple[int, ...]]:
    memories = memories_of(family, config)
    outer = expected_outer(family, config, memories)
    last = [name for name in outer if name != "model.embed_tokens.weight"]
    expected = {"model.embed_tokens.weight": outer["model.embed_tokens.weight"]}
    for layer in range(config["num_hidden_layers"]):
        for name, tensor in expected_layer(family, config, memories, layer).items():
            expected[f"model.layers.{layer}.{name}"] = tensor.shape
    return {**expected, **{name: outer[name] for name in last}}


def _stored_as_integers(family: Family, config: Config) -> dict[str, str]:
    """Return the dtype of each tensor that a memory of the config stores as integers, by full name."""
    memories = memories_of(family, config)
    tensors = {f"{_PREFIX}{name}": tensor for name, tensor in memories.table_tensors().items()}
    for layer in range(config["num_hidden_layers"]):
        tensors |= {
            f"{_PREFIX}layers.{layer}.{name}": tensor for name, tensor in memories.layer_tensors(layer).items()
        }
    return {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype}


def _stored_tensors(folder: Path, needs_weights: bool) -> dict[str, StoredTensor] | None:
    single = folder / SINGLE_FILE
    if single.is_file():  # transformers prefers the single file where both exist
        return read_header(single)
    index_path = folder / INDEX_FILE
    if index_path.is_file():
        return _indexed_tensors(folder, index_path, needs_weights)
    if not needs_weights:
        return None
    pickled = sorted(
        file.name for pattern in _PICKLED for file in folder.glob(pattern) if file.name != "training_args.bin"
    )
    if pickled:
        raise RequestError(pickled_message(str(folder), pickled[0], has_tokenizer(os.listdir(folder))))
    raise RequestError(f"{folder} has no model.safetensors and no model.safetensors.index.json; expected one of them.")


def pickled_message(base: str, file: str, with_tokenizer: bool = True) -> str:
    """Return the message about a base with pickled weights: they are never loaded, and this is how to convert them.

    Args:
        base: A folder or a hub id.
        file: Name of a pickled file of the base.
        with_tokenizer: Whether the base has a tokenizer, which the conversion saves as well. Default: True.
    """
    classes = {"M": "AutoModelForCausalLM", "T": "AutoTokenizer"} if with_tokenizer else {"M": "AutoModelForCausalLM"}
    imported = ", ".join(f"{name} as {letter}" for letter, name in classes.items())
    saved = "; ".join(f"{letter}.from_pretrained({base!r}).save_pretrained('OUT')" for letter in classes)
    code = re.sub(r'([\\"$`])', r"\\\1", f"from transformers import {imported}; {saved}")
    return (
        f"the base has pickled weights ({file}), which are never loaded; expected safetensors. Convert it with "
        f'python -c "{code}" and pass --base OUT.'
    )


def _indexed_tensors(folder: Path, index_path: Path, needs_weights: bool) -> dict[str, StoredTensor] | None:
    try:
        weight_map = parse_json(index_path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{index_path.name} is not a shard index ({type(error).__name__}: {error}). Download or save it again."
        ) from None
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise RequestError(f"{index_path.name} names the shard {name!r}; expected a .safetensors file beside it.")
        if not (folder / name).is_file():
            if not needs_weights:
                return None
            raise RequestError(f"{index_path.name} names {name}, which is missing. Download or save the base again.")
        headers[name] = read_header(folder / name)
    absent = [name for name, file in weight_map.items() if name not in headers[str(file)]]
    if absent:
        raise RequestError(
            f"{index_path.name} places {absent[0]} in {weight_map[absent[0]]}, which does not hold it "
            f"({len(absent)} such tensors). Download or save the base again."
        )
    # transformers also loads tensors that the files hold but the index omits.
    forgotten = {name: tensor for header in headers.values() for name, tensor in header.items()}
    return {**forgotten, **{name: headers[str(file)][name] for name, file in weight_map.items()}}
