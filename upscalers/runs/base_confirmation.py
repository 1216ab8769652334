"""Whether an upscaled checkpoint holds the weights of its base, byte for byte."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upscalers.architecture.families import Config
from upscalers.checkpoint.base_model import BaseModel, open_base, read_config
from upscalers.checkpoint.content_digest import TensorDigests, content_sha256, weight_names
from upscalers.checkpoint.source import resolve_source
from upscalers.plan.plan import Plan
from upscalers.record.provenance import DIGEST_KEY, read_config_entry, read_plan, read_record
from upscalers.tensors.file_order import in_file_order
from upscalers.tensors.recipes import Copy
from upscalers.tensors.writer import OutputTensor


@dataclass(frozen=True)
class BaseComparison:
    """Whether the weights are the base's, byte for byte, and how many tensors are not; None where it is not known."""

    confirmed: bool | None
    differing: int | None
    total: int

    @property
    def told(self) -> dict[str, Any]:
        """As reports have it."""
        return {"base_confirmed": self.confirmed, "differing_tensors": self.differing}

    @property
    def warning(self) -> str:
        """What a person is told if they are not."""
        which = "the weights are" if self.differing is None else f"{self.differing} of {self.total} tensors are"
        return (
            f"{which} not the base's, byte for byte: trained since it was upscaled, or cast. Where the base itself is needed, go "
            "back to it."
        )


def compare_with_base(digests: dict[str, str], entry: Config, record: dict[str, Any]) -> BaseComparison:
    """What digests of weights tell.

    Args:
        digests: Of those that are the base's, by their names; none where no digest of the base is known.
        entry: Of the config, that `upscale` wrote.
        record: Of `upscale.json`.
    """
    if not digests:
        return BaseComparison(None, None, 0)
    if content_sha256(digests) == entry[DIGEST_KEY]:
        return BaseComparison(True, 0, len(digests))
    base = record.get("base")
    recorded = base.get("tensor_sha256") if isinstance(base, dict) else None
    if not isinstance(recorded, dict) or content_sha256(recorded) != entry[DIGEST_KEY]:
        return BaseComparison(False, None, len(digests))
    differing = sum(recorded.get(name) != digest for name, digest in digests.items())
    return BaseComparison(False, differing, len(digests))


def digested_names(model: BaseModel, tensors: list[OutputTensor]) -> dict[str, str]:
    """Where each weight of the base stands in the upscaled model, and its name for the base's digest."""
    weights = weight_names(model)
    return {
        tensor.recipe.source: tensor.name.removeprefix(model.prefix)
        for tensor in tensors
        if isinstance(tensor.recipe, Copy) and tensor.recipe.source in weights
    }


def base_tensors(model: BaseModel, plan: Plan) -> list[OutputTensor]:
    """The tensors of the base, as an upscaled checkpoint holds them, in the order of the base's layers."""

    def carried(name: str, source: str) -> OutputTensor:
        return OutputTensor(name, Copy(model.tensors[source].shape, source), model.tensors[source].dtype)

    outer = [carried(name, name) for name in model.outer_names() if not plan.owns(name)]
    layers: dict[int, list[OutputTensor]] = {}
    for layer, index in plan.kept_indices.items():
        names = model.layer_names(index)
        layers[layer] = [
            carried(model.new_name(layer, key), source) for key, source in names.items() if not plan.owns(source)
        ]
    return in_file_order(outer, (tensor for index in sorted(layers) for tensor in layers[index]))


def keeps_base(model: str | Path) -> bool | None:
    """Whether the layers of the base are all in a checkpoint, with the weights that they had before it was upscaled.

    Its weights are read once.

    Args:
        model: A folder or hub id.

    Returns:
        None where it was upscaled before digests were recorded.

    Raises:
        RequestError: If the model was not made by `upscale`.
    """
    with resolve_source(str(model)) as source:
        entry = read_config_entry(read_config(source.folder), source.folder)
        opened = open_base(source.folder)
        plan = read_plan(entry, opened)
        if plan.dropped_layers:
            return False
        if DIGEST_KEY not in entry:
            return None
        names = digested_names(opened, base_tensors(opened, plan))
        with TensorDigests(opened.tensors, names) as digests:
            return compare_with_base(digests.finish(), entry, read_record(source.folder) or {}).confirmed
