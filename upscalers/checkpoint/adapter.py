"""An adapter of PEFT in a folder: its config, and the tensors that it brings."""

import re
from dataclasses import dataclass
from pathlib import Path

from upscalers.architecture.family import Config
from upscalers.checkpoint.base_model import read_config_file
from upscalers.checkpoint.safetensors_format import StoredTensor, read_header
from upscalers.checkpoint.source import adapter_folder
from upscalers.request.errors import RequestError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: Kinds of adapters whose tensors belong to modules, by whose names PEFT finds them. Adapters of other kinds belong to the model as a
#: whole (prompts, prefixes), or count layers in other ways.
KINDS = (
    *("LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "VERA", "FOURIERFT", "LN_TUNING", "MISS", "C3A", "ROAD", "RANDLORA"),
    *("WAVEFT", "HIRA", "DELORA", "GRALORA", "OSF", "SHIRA", "TRAINABLE_TOKENS"),
)  # fmt: skip

_PREFIX = "base_model.model."
_LAYER = re.compile(r"(?P<before>(?:^|.*?\.)layers\.)(?P<layer>\d+)(?=\.|$)")


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder.

    Args:
        folder: Folder in which config and weights lie.
        config: Content of `adapter_config.json`.
        tensors: The tensors of the weights, by name.
    """

    folder: Path
    config: Config
    tensors: dict[str, StoredTensor]


def open_adapter(name: str) -> Adapter:
    """Open an adapter of PEFT; nothing that is pickled is read.

    Args:
        name: A folder, or the id of an adapter on the hub.

    Raises:
        RequestError: If there is no adapter of this name, its weights are not in safetensors, or its kind has no tensors by layer.
    """
    folder = adapter_folder(name)
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise RequestError(
            f"{name} has no {ADAPTER_CONFIG}; expected the folder of a PEFT adapter. Give the one that save_pretrained wrote."
        )
    config = read_config_file(path)
    kind = config.get("peft_type")
    if kind not in KINDS:
        raise RequestError(
            f"{path} has peft_type = {kind!r}, whose tensors belong to no layer by name, or are not tried; expected one of "
            f"{', '.join(KINDS)}. Train such an adapter on the upscaled model itself."
        )
    if config.get("layer_replication"):
        raise RequestError(
            f"{path} has layer_replication = {config['layer_replication']}, which repeats layers of the base; expected null. Merge "
            "the adapter into the base (merge_and_unload), and upscale what comes out."
        )
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise RequestError(
            f"{name} has no {ADAPTER_WEIGHTS}; expected one. Pickled weights (adapter_model.bin) are never loaded: load the adapter "
            "with PEFT, whose save_pretrained writes safetensors."
        )
    tensors = read_header(weights)
    if not tensors:
        raise RequestError(f"{weights} holds no tensors; expected those of an adapter. Save or download it again.")
    return Adapter(folder, config, tensors)


def module_path(tensor: str) -> str:
    """Return the name of a tensor of an adapter without PEFT's prefix: the name of a module of the model, and what follows it."""
    return tensor.removeprefix(_PREFIX)


def layer_of(name: str) -> int | None:
    """Return the number of the layer in the name of a module or tensor; None if it is in no layer."""
    match = _LAYER.match(name)
    return int(match["layer"]) if match else None


def renumbered(name: str, numbers: dict[int, int]) -> str:
    """Return the name of a module or tensor with the number of its layer replaced; unchanged outside of layers."""
    return _LAYER.sub(
        lambda match: f"{match['before']}{numbers.get(int(match['layer']), match['layer'])}", name, count=1
    )
