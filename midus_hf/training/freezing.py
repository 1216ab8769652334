"""Which parameters train: the layers that were added to the base, or everything."""

import dataclasses
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclasses.dataclass(frozen=True)
class TrainableReport:
    """What trains, for a person to read.

    Args:
        trainable: `"new"` or `"all"`.
        layers: Indices of the decoder layers that train, ascending.
        num_layers: L, all decoder layers.
        parameters: Parameters that train.
        total_parameters: All parameters; tied ones count once.
        parameters_of_part: Parameters that train by what they belong to: a part of the layers, such as their
            attention, or a part of the model outside them.
    """

    trainable: str
    layers: list[int]
    num_layers: int
    parameters: int
    total_parameters: int
    parameters_of_part: dict[str, int]

    def __rich__(self) -> RenderableType:
        which = "the new layers alone" if self.trainable == "new" else "everything"
        summary = (
            f"Training {which}: {self.parameters:,} of {self.total_parameters:,} parameters "
            f"({self.parameters / self.total_parameters:.2%}), {len(self.layers)} of {self.num_layers} layers"
        )
        table = Table("part", "parameters", caption=f"layers {', '.join(map(str, self.layers))}")
        table.columns[1].justify = "right"
        for part, count in self.parameters_of_part.items():
            table.add_row(part, f"{count:,}")
        return Group(summary, table)


def new_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the layers that were added to the base, as `upscale` recorded them in the config.

    Raises:
        ValueError: If the config records none, or layers that the model does not have.
    """
    upscale = getattr(config, "upscale", None)
    layers = upscale.get("new_layers") if isinstance(upscale, dict) else None
    if not layers:
        raise ValueError(
            f"trainable is 'new', but the config of this {config.model_type} model records no new layers in "
            "upscale.new_layers; upscale the model first, or set trainable: all."
        )
    outside = [layer for layer in layers if not 0 <= layer < config.num_hidden_layers]
    if outside:
        raise ValueError(
            f"upscale.new_layers of the config names {outside}; expected 0 <= layer < {config.num_hidden_layers}. "
            "Upscale the base again."
        )
    return sorted(layers)


def set_trainable(model: PreTrainedModel, trainable: Literal["new", "all"]) -> TrainableReport:
    """Set `requires_grad` of every parameter.

    With `"new"`, the added layers train whole (norms, projections, memory) and nothing else does: not the base layers,
    the embeddings, the final norm or the head.

    Args:
        model: A causal language model whose decoder has `layers`.
        trainable: `"new"` or `"all"`.

    Raises:
        ValueError: If `trainable` is neither, or is `"new"` and the config records no new layers.
    """
    if trainable not in ("new", "all"):
        raise ValueError(f"trainable is {trainable!r}; expected 'new' or 'all'.")
    layers: nn.ModuleList = model.get_decoder().layers
    chosen = new_layers(model.config) if trainable == "new" else list(range(len(layers)))
    model.requires_grad_(trainable == "all")
    for index in chosen:
        layers[index].requires_grad_(True)

    parameters_of_part: dict[str, int] = {}
    inside = {id(parameter) for parameter in layers.parameters()}
    for index in chosen:
        for part, module in layers[index].named_children():
            count = sum(parameter.numel() for parameter in module.parameters())
            parameters_of_part[f"layers.{part}"] = parameters_of_part.get(f"layers.{part}", 0) + count
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            parameters_of_part[name] = parameter.numel()
    return TrainableReport(
        trainable=trainable,
        layers=chosen,
        num_layers=len(layers),
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameters_of_part=parameters_of_part,
    )
