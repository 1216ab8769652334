"""LoRA, rsLoRA and DoRA adapters that are merged into a base while it is read."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.files.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from midus_hf.files.json_text import parse_json
from upscalers.checkpoint.computed_tensor import ComputedTensor, read_tensor
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, StoredTensor, holds_the_same, read_header
from upscalers.checkpoint.source import adapter_folder

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_PART = re.compile(r"^(?P<module>.+)\.lora_(?P<part>(?:embedding_)?[AB]|magnitude_vector)(?:\.weight)?$")
# Keys of an adapter's config that say how the matrices are merged, or that do not matter for merging.
_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "target_modules"),
    *("exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("eva_config", "runtime_config", "fan_in_fan_out"),  # PEFT ignores the last for `nn.Linear`, which all families have
}  # fmt: skip
# Initialisations that leave the base's weights unchanged; others subtract the adapter's initial product from the base.
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva")


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder, by the name that the person gave, with its config."""

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def label(self) -> str:
        """Name of the adapter in records: its hub id, or the last part of a local path, so that records reveal no folders."""
        path = Path(self.name).expanduser()
        return path.resolve().name if path.exists() else self.name

    @classmethod
    def open(cls, name: str) -> "Adapter":
        """Open the adapter in a folder or a repository of the hub; refuse anything but LoRA, rsLoRA and DoRA."""
        folder = adapter_folder(name, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
        try:
            config = parse_json((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            (folder / ADAPTER_WEIGHTS).open("rb").close()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"adapter {name!r} has no valid {ADAPTER_CONFIG} or no {ADAPTER_WEIGHTS} ({type(error).__name__}); expected a LoRA "
                "that PEFT saved. Give its folder."
            ) from None
        adapter = cls(name, folder, config if isinstance(config, dict) else {})
        if adapter.config.get("peft_type") != "LORA":
            raise adapter._refused(f"its peft_type is {adapter.config.get('peft_type')!r}")
        for key, value in adapter.config.items():
            is_start = key == "init_lora_weights" and value not in _HARMLESS_STARTS
            if is_start or (key not in _READ and value and (key, value) != ("bias", "none")):
                raise adapter._refused(f"it has {key} = {value!r}")
        return adapter

    def sha256(self) -> str:
        """Return the SHA-256 of the file of the adapter's matrices."""
        with (self.folder / ADAPTER_WEIGHTS).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _refused(self, reason: str) -> ValueError:
        return ValueError(
            f"adapter {self.name!r} cannot be merged while the base is read: {reason}; expected a LoRA, rsLoRA or DoRA. Merge it "
            "with PEFT (merge_and_unload), save the model, and give that as the base."
        )

    def merged(self, tensors: Mapping[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
        """Return a base's tensors, by full name, in which weights that the adapter changes are read with the change."""
        changed = dict(tensors)
        for module, parts in self._parts(tensors, prefix).items():
            of_embedding = "embedding_A" in parts
            kind = "embedding_" if of_embedding else ""
            if not {f"{kind}A", f"{kind}B"} <= parts.keys() or (of_embedding and len(parts) > 2):
                raise self._refused(f"{module} has {', '.join(sorted(parts))}")
            a, b, magnitude = parts[f"{kind}A"], parts[f"{kind}B"], parts.get("magnitude_vector")
            name = _stored_name(f"{module}.weight", prefix)
            weight = tensors.get(name)
            if weight is None or isinstance(weight, ComputedTensor) or weight.dtype not in TORCH_NAMES:
                held = "does not hold" if weight is None else f"holds as {weight.as_stored.dtype}"
                raise ValueError(
                    f"adapter {self.name!r} changes {name}, which the base {held}; expected float weights of the model that the "
                    "adapter was made for. Give that base."
                )
            rank = self._of_module("rank_pattern", module, self.config["r"])
            alpha = self._of_module("alpha_pattern", module, self.config["lora_alpha"])
            product = (b.shape[0], a.shape[1]) if len(a.shape) == len(b.shape) == 2 else ()
            if product[:: -1 if of_embedding else 1] != weight.shape or not a.shape[0] == b.shape[1] == rank:
                raise ValueError(
                    f"adapter {self.name!r} has matrices {list(b.shape)} and {list(a.shape)} for {name}; expected rank {rank} and a "
                    f"product of {list(weight.shape)}. Give the base that the adapter was made for."
                )
            scaling = alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank
            merged = MergedTensor(weight.dtype, weight.shape, None, 0, weight, a, b, magnitude, scaling, of_embedding)
            changed[name] = merged
        return changed

    def _parts(self, base: Mapping[str, StoredTensor], prefix: str) -> dict[str, dict[str, StoredTensor]]:
        """Return the matrices of each changed module, and the magnitudes of DoRA, by the module's path."""
        modules: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in read_header(self.folder / ADAPTER_WEIGHTS).items():
            match = _PART.match(name.removeprefix(_PREFIX))
            if match is not None and tensor.dtype in TORCH_NAMES:
                modules.setdefault(match["module"], {})[match["part"]] = tensor
            elif not _is_unchanged(name, tensor, base, prefix):
                raise self._refused(f"it holds {name} as {tensor.dtype}")
        if not modules:
            raise self._refused("it holds no matrices")
        return modules

    def _of_module(self, key: str, module: str, usual: Any) -> Any:
        """Return the value of the first pattern under a key that a module's path ends with."""
        patterns = self.config.get(key) or {}
        return next((patterns[each] for each in patterns if re.match(rf"(.*\.)?({each})$", module)), usual)


@dataclass(frozen=True)
class MergedTensor(ComputedTensor):
    """A weight with a change added, `W + scaling * B A`, as PEFT merges it; DoRA gives its rows the lengths of `magnitude`."""

    a: StoredTensor | None = None
    b: StoredTensor | None = None
    magnitude: StoredTensor | None = None
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
        elif self.magnitude is None:
            weight += change * self.scaling
        else:
            whole = weight + change * self.scaling
            factor = read_tensor(self.magnitude).float() / whole.norm(dim=1)
            weight = (factor[:, None] * whole).to(weight.dtype)
        return weight


def _stored_name(name: str, prefix: str) -> str:
    return name if prefix == "model." else name.removeprefix("model.")


def _is_unchanged(name: str, tensor: StoredTensor, base: Mapping[str, StoredTensor], prefix: str) -> bool:
    """Return whether a tensor is the base's embedding or head, which PEFT saves together with matrices that change an embedding."""
    kept = _stored_name(name.removeprefix(_PREFIX).replace(".base_layer.", "."), prefix)
    if kept == "lm_head.weight" and kept not in base:  # the head is tied to the embedding
        kept = f"{prefix}embed_tokens.weight"
    return kept in base and holds_the_same(tensor, base[kept])
