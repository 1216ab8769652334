"""Comparison of the weights of an upscaled checkpoint with its base's, byte for byte."""

from typing import Any

from midus_hf.anatomy.record import UpscaleRecord
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.content_digest import content_sha256, weight_names
from upscalers.plan.plan import Plan
from upscalers.tensors.recipes import Copy
from upscalers.tensors.writer import OutputTensor, in_file_order


def compare_with_base(digests: dict[str, str], upscaled: UpscaleRecord, record: dict[str, Any]) -> dict[str, Any]:
    """Return `{"base_confirmed", "differing_tensors"}` of digests by name: None if unknown."""
    if not digests:
        return {"base_confirmed": None, "differing_tensors": None}
    if content_sha256(digests) == upscaled.base_sha256:
        return {"base_confirmed": True, "differing_tensors": 0}
    base = record.get("base")
    recorded = base.get("tensor_sha256") if isinstance(base, dict) else None
    differing = None
    if isinstance(recorded, dict) and content_sha256(recorded) == upscaled.base_sha256:
        differing = sum(recorded.get(name) != digest for name, digest in digests.items())
    return {"base_confirmed": False, "differing_tensors": differing}


def digested_names(model: BaseCheckpoint, tensors: list[OutputTensor]) -> dict[str, str]:
    """Return the name of each base weight in digests, by the name of the tensor that holds it in the upscaled model."""
    weights = weight_names(model)
    return {
        tensor.recipe.source: tensor.name.removeprefix(model.prefix)
        for tensor in tensors
        if isinstance(tensor.recipe, Copy) and tensor.recipe.source in weights
    }


def base_tensors(model: BaseCheckpoint, plan: Plan) -> list[OutputTensor]:
    """Return the tensors of the base that an upscaled checkpoint holds, in the order of the base's layers."""

    def carried(name: str, source: str) -> OutputTensor:
        return OutputTensor(name, Copy(model.tensors[source].shape, source), model.tensors[source].as_stored.dtype)

    names_in_base = model.outer_names(plan.num_base_layers)
    outer = [carried(in_base, name) for name, in_base in names_in_base.items() if not plan.owns(name)]
    layers: dict[int, list[OutputTensor]] = {}
    for layer, index in plan.kept_indices.items():
        names = model.layer_names[index]
        layers[layer] = [
            carried(model.new_name(layer, key), source)
            for key, source in names.items()
            if not plan.owns(source) and source not in model.packed
        ]
    return in_file_order(outer, (tensor for index in sorted(layers) for tensor in layers[index]))
