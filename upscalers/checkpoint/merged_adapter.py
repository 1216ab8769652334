"""LoRA adapters that are merged into a base while it is read."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.files.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from midus_hf.files.json_text import parse_json
from upscalers.checkpoint.computed_tensor import ComputedTensor, read_tensor
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, StoredTensor, holds_the_same, read_header
from upscalers.checkpoint.source import adapter_folder
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_MATRIX = re.compile(r"^(?P<module>.+)\.(?P<kind>lora|lora_embedding)_(?P<side>[AB])(?:\.weight)?$")
# Keys of an adapter's config that say how the matrices are merged, or that do not matter for merging.
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
}  # fmt: skip
_IRRELEVANT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "target_modules",
    "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size",
    "eva_config", "runtime_config", "fan_in_fan_out",  # PEFT ignores the last for `nn.Linear`, which all families have
}  # fmt: skip
# Starts of training that leave the base's weights as they are; others take away from the base what the adapter begins with.
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva")
_NO_BIAS = "none"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Args:
        name: Name as the person gave it.
        folder: Folder with the adapter's files.
    """

    name: str
    folder: Path

    @property
    def label(self) -> str:
        """Name of the adapter in records: its hub id, or the last part of a local path, so that records reveal no folders."""
        path = Path(self.name).expanduser()
        return path.resolve().name if path.exists() else self.name

    @property
    def file(self) -> Path:
        """The file of the adapter's matrices.

        Raises:
            RequestError: If there is none.
        """
        if (self.folder / ADAPTER_WEIGHTS).is_file():
            return self.folder / ADAPTER_WEIGHTS
        raise RequestError(
            f"adapter {self.name!r} has no {ADAPTER_WEIGHTS}; expected a LoRA that PEFT saved. Save it again."
        )

    @classmethod
    def open(cls, name: str) -> "Adapter":
        """Open the adapter in a folder or in a repository of the hub, which is downloaded into the cache of the hub.

        Raises:
            RequestError: If there is no adapter of this name, or it is no plain LoRA.
        """
        adapter = cls(name, adapter_folder(name, (ADAPTER_CONFIG, ADAPTER_WEIGHTS)))
        _ = adapter.config, adapter.file
        return adapter

    def sha256(self) -> str:
        """Return the SHA-256 of the file of the adapter's matrices."""
        with self.file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The adapter's config, if the adapter is a plain LoRA.

        Raises:
            RequestError: If it is another kind of adapter.
        """
        path = self.folder / ADAPTER_CONFIG
        try:
            config = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(
                f"adapter {self.name!r} has no sound {ADAPTER_CONFIG} ({type(error).__name__}); expected a LoRA that PEFT "
                "saved. Give its folder."
            ) from None
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            kind = config.get("peft_type") if isinstance(config, dict) else None
            raise self._refused(f"its peft_type is {kind!r}")
        for key, value in config.items():
            neutral = not value or (key == "bias" and value == _NO_BIAS)
            if key not in _READ | _IRRELEVANT and not neutral:
                raise self._refused(f"it has {key} = {value!r}")
        if config.get("init_lora_weights") not in _HARMLESS_STARTS:
            raise self._refused(f"it has init_lora_weights = {config['init_lora_weights']!r}")
        return config

    def _refused(self, reason: str) -> RequestError:
        return RequestError(
            f"adapter {self.name!r} cannot be merged while the base is read: {reason}; expected a plain LoRA. Merge it with PEFT "
            "(merge_and_unload), save the model, and give that as the base."
        )

    def merged(self, tensors: Mapping[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
        """Return a base's tensors, in which weights that the adapter changes are read with the change.

        Args:
            tensors: The base's tensors, by full name.
            prefix: Prefix of the decoder's tensors, `"model."` or nothing.

        Raises:
            RequestError: If the adapter changes weights that the base does not have, or that have other shapes.
        """
        changed = dict(tensors)

        for module, kind, a, b in self._matrices(tensors, prefix):
            name = _stored_name(f"{module}.weight", prefix)
            weight = tensors.get(name)
            if weight is None or isinstance(weight, ComputedTensor) or weight.dtype not in TORCH_NAMES:
                held = "does not hold" if weight is None else f"holds as {weight.as_stored.dtype}"
                raise RequestError(
                    f"adapter {self.name!r} changes {name}, which the base {held}; expected float weights of the model that the "
                    "adapter was made for. Give that base."
                )
            rank, alpha = (
                self.config[key] if pattern is None else pattern
                for key, pattern in (
                    ("r", _by_pattern(self.config.get("rank_pattern"), module)),
                    ("lora_alpha", _by_pattern(self.config.get("alpha_pattern"), module)),
                )
            )
            is_embedding = kind == "lora_embedding"
            product = (b.shape[0], a.shape[1]) if len(a.shape) == len(b.shape) == 2 else ()
            if product[:: -1 if is_embedding else 1] != weight.shape or not a.shape[0] == b.shape[1] == rank:
                raise RequestError(
                    f"adapter {self.name!r} has matrices {list(b.shape)} and {list(a.shape)} for {name}; expected rank {rank} and a "
                    f"product of {list(weight.shape)}. Give the base that the adapter was made for."
                )
            scaling = alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank
            changed[name] = MergedTensor(weight.dtype, weight.shape, None, 0, weight, a, b, scaling, is_embedding)
        return changed

    def _matrices(
        self, base: Mapping[str, StoredTensor], prefix: str
    ) -> Iterator[tuple[str, str, StoredTensor, StoredTensor]]:
        """Yield the path of each changed module, the kind of the change, and the matrices A and B."""
        tensors = read_header(self.file)
        modules: dict[tuple[str, str], dict[str, StoredTensor]] = {}
        for name, tensor in tensors.items():
            match = _MATRIX.match(name.removeprefix(_PREFIX))
            if match is not None and tensor.dtype in TORCH_NAMES:
                modules.setdefault((match["module"], match["kind"]), {})[match["side"]] = tensor
            elif not _is_unchanged(name, tensor, base, prefix):
                raise self._refused(f"it holds {name} as {tensor.dtype}")
        if not modules:
            raise self._refused("it holds no matrices")
        for (module, kind), sides in modules.items():
            if sides.keys() != {"A", "B"}:
                raise self._refused(f"{module} has one of two matrices")
            yield module, kind, sides["A"], sides["B"]


@dataclass(frozen=True)
class MergedTensor(ComputedTensor):
    """A weight with a LoRA's change added, `W + scaling * B A`, as PEFT merges it.

    Args:
        a: Position of A, `[rank, inputs]`.
        b: Position of B, `[outputs, rank]`.
        scaling: Factor of the product.
        of_embedding: Whether the weight is an embedding, whose rows are inputs. Default: False.
    """

    a: StoredTensor | None = None
    b: StoredTensor | None = None
    scaling: float = 1.0
    of_embedding: bool = False

    def read(self) -> "torch.Tensor":
        assert self.weight is not None and self.a is not None and self.b is not None
        # PEFT holds adapters in float32, and adds the change in float32 to the weight in place; the change of an embedding
        # is rounded before it is added.
        weight = read_tensor(self.weight)
        change = read_tensor(self.b).float() @ read_tensor(self.a).float()
        if self.of_embedding:
            weight += (change.T * self.scaling).to(weight.dtype)
        else:
            weight += change * self.scaling
        return weight


def _stored_name(name: str, prefix: str) -> str:
    return name if prefix == "model." else name.removeprefix("model.")


def _is_unchanged(name: str, tensor: StoredTensor, base: Mapping[str, StoredTensor], prefix: str) -> bool:
    """Return whether a tensor is the base's embedding or head, which PEFT saves beside matrices that change an embedding."""
    kept = _stored_name(name.removeprefix(_PREFIX).replace(".base_layer.", "."), prefix)
    if kept == "lm_head.weight" and kept not in base:  # the head is tied to the embedding
        kept = f"{prefix}embed_tokens.weight"
    return kept in base and holds_the_same(tensor, base[kept])


def _by_pattern(patterns: Mapping[str, Any] | None, module: str) -> Any:
    """Return the value of the first pattern that a module's path ends with; None if there is none."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return None
